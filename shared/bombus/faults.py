"""Fault injection: named points at which tests can make a process die, freeze or hang, for example between two writes.

Some recovery code runs only after a crash at one exact place, which a test that kills at random rarely hits. That is
why the points are in the code itself, like TiKV's failpoints and FoundationDB's buggify. They do nothing unless an
environment variable names one: `BOMBUS_KILL_AT=trainer.step.said` sends SIGKILL there, `BOMBUS_STOP_AT` sends SIGSTOP,
`BOMBUS_HANG_AT` makes the thread wait there forever, and the suffix `:3` makes it happen the third time.
"""

import os
import signal
import threading
from collections.abc import Mapping
from enum import StrEnum

import msgspec

HANG = "BOMBUS_HANG_AT"
SIGNALS = {"BOMBUS_KILL_AT": signal.SIGKILL, "BOMBUS_STOP_AT": signal.SIGSTOP, HANG: None}


class Point(StrEnum):
    """All points. Each is just before or after an effect that outlasts the process."""

    TRAINER_OPENING = "trainer.opening"
    TRAINER_OPENED = "trainer.opened"
    TRAINER_MODEL_LOADING = "trainer.model.loading"
    TRAINER_MODEL_LOADED = "trainer.model.loaded"
    TRAINER_TOKENIZER_STORED = "trainer.tokenizer.stored"
    TRAINER_STEP_MADE_AGAIN = "trainer.step.made_again"  # a step between the checkpoint and the newest step on the log
    TRAINER_BATCH_FOUND = "trainer.batch.found"
    TRAINER_BATCH_READ = "trainer.batch.read"
    TRAINER_BIN_DONE = "trainer.bin.done"  # after a micro-batch: there are gradients, but no update yet
    TRAINER_UPDATE_DONE = "trainer.update.done"  # after a mini-batch: only some of the step's updates are done
    TRAINER_STEP_TRAINED = "trainer.step.trained"
    TRAINER_CHECKPOINT_BEGUN = "trainer.checkpoint.begun"
    TRAINER_CHECKPOINT_WRITTEN = "trainer.checkpoint.written"  # durable, but under its temporary name
    TRAINER_CHECKPOINT_RENAMED = "trainer.checkpoint.renamed"
    TRAINER_DIRECTORY_ASIDE = "trainer.directory.aside"  # the folder is moved away, its replacement not yet in place
    TRAINER_STEP_SAID = "trainer.step.said"
    TRAINER_STEP_SEEN = "trainer.step.seen"  # completed in the trainer's state, old checkpoints not yet removed
    TRAINER_CHECKPOINTS_PRUNED = "trainer.checkpoints.pruned"
    TRAINER_WEIGHTS_BEGUN = "trainer.weights.begun"
    TRAINER_WEIGHTS_WRITTEN = "trainer.weights.written"
    TRAINER_WEIGHTS_RENAMED = "trainer.weights.renamed"
    TRAINER_WEIGHTS_STORED = "trainer.weights.stored"  # one object of a version that goes through the object store
    TRAINER_WEIGHTS_SAID = "trainer.weights.said"
    TRAINER_WEIGHTS_SEEN = "trainer.weights.seen"
    TRAINER_WEIGHTS_PRUNED = "trainer.weights.pruned"
    OPERATION_MADE_AGAIN = "operation.made_again"  # one operation that follows a model's recovery checkpoint
    OPERATION_FOUND = "operation.found"
    OPERATION_READ = "operation.read"
    OPERATION_EXECUTED = "operation.executed"
    OPERATION_STORED = "operation.stored"  # the result is stored, but not on the log yet
    OPERATION_SAID = "operation.said"
    OPERATION_SEEN = "operation.seen"
    MODEL_CHECKPOINT_BEGUN = "model_checkpoint.begun"
    MODEL_CHECKPOINT_WRITTEN = "model_checkpoint.written"
    MODEL_CHECKPOINT_PUBLISHED = "model_checkpoint.published"
    MODEL_CHECKPOINT_SEEN = "model_checkpoint.seen"
    MODEL_CHECKPOINT_PRUNED = "model_checkpoint.pruned"  # older checkpoints are removed
    SERVING_SAID = "serving.said"  # only the base model is loaded
    SERVING_BEGUN = "serving.begun"  # all models are rebuilt
    REST_FREED = "rest.freed"  # the trainer has freed its memory to sleep, but not reported it yet
    REST_WOKEN = "rest.woken"  # the trainer has restored its models, but not reported it yet
    COMPACTION_VERIFIED = "compaction.verified"  # verified, but nothing archived yet
    COMPACTION_ARCHIVED = "compaction.archived"  # archived, but nothing purged yet
    COMPACTION_PURGING = "compaction.purging"  # the leader has checked everything and is about to send the purge
    COMPACTION_PURGED = "compaction.purged"  # purged, but not recorded on the log yet
    TRAINER_SUPERSEDED = "trainer.superseded"  # the trainer has learned that another trainer has opened its run


class _Fault(msgspec.Struct):
    point: Point
    number: signal.Signals | None  # None makes the thread hang
    left: int  # how many more times the point must be reached before the fault happens


_armed: list[_Fault] = []


def arm(environment: Mapping[str, str]) -> None:
    """Read the environment variables. Called at import, and again in a process that was forked with a different
    environment.

    Raises `ValueError` for a point that does not exist.
    """
    _armed.clear()
    for variable, number in SIGNALS.items():
        name, _, count = environment.get(variable, "").partition(":")
        if name:
            _armed.append(_Fault(Point(name), number, int(count or 1)))


def reached(point: Point) -> None:
    """Mark `point` in the code. The process dies, freezes or hangs here if an environment variable says so."""
    if _armed:
        _strike(point)


def _strike(point: Point) -> None:
    for fault in _armed:
        if fault.point == point:
            fault.left -= 1
            if fault.left == 0:
                _happen(fault)


def _happen(fault: _Fault) -> None:
    if fault.number is None:
        os.write(2, f"hangs at {fault.point}\n".encode())
        threading.Event().wait()
    else:
        os.write(2, f"{fault.number.name} at {fault.point}\n".encode())
        os.kill(os.getpid(), fault.number)


arm(os.environ)
