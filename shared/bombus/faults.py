"""Named points at which a process can be made to die or to freeze: how tests reach the moments between two writes.

Recovery code runs only after a crash at just the wrong place, and a test that kills at random seldom meets it. So the
places are in the code, as TiKV's failpoints and FoundationDB's buggify are, and do nothing unless the environment
names one: `BOMBUS_KILL_AT=trainer.step.said` is SIGKILL there, `BOMBUS_STOP_AT` SIGSTOP, `...said:3` the third time.
"""

import os
import signal
from collections.abc import Mapping
from enum import StrEnum

import msgspec

SIGNALS = {"BOMBUS_KILL_AT": signal.SIGKILL, "BOMBUS_STOP_AT": signal.SIGSTOP}


class Point(StrEnum):
    """All there are. Each stands before or behind something that outlives the process."""

    TRAINER_OPENING = "trainer.opening"
    TRAINER_OPENED = "trainer.opened"
    TRAINER_MODEL_LOADED = "trainer.model.loaded"
    TRAINER_TOKENIZER_STORED = "trainer.tokenizer.stored"
    TRAINER_BATCH_FOUND = "trainer.batch.found"
    TRAINER_BATCH_READ = "trainer.batch.read"
    TRAINER_BIN_DONE = "trainer.bin.done"  # a micro-batch: gradients, and no update yet
    TRAINER_UPDATE_DONE = "trainer.update.done"  # a mini-batch: some of the step's updates
    TRAINER_STEP_TRAINED = "trainer.step.trained"
    TRAINER_CHECKPOINT_BEGUN = "trainer.checkpoint.begun"
    TRAINER_CHECKPOINT_WRITTEN = "trainer.checkpoint.written"  # durable, under its draft's name
    TRAINER_CHECKPOINT_RENAMED = "trainer.checkpoint.renamed"
    TRAINER_STEP_SAID = "trainer.step.said"
    TRAINER_STEP_SEEN = "trainer.step.seen"  # completed in our fold, old checkpoints not yet removed
    TRAINER_CHECKPOINTS_PRUNED = "trainer.checkpoints.pruned"
    TRAINER_WEIGHTS_BEGUN = "trainer.weights.begun"
    TRAINER_WEIGHTS_WRITTEN = "trainer.weights.written"
    TRAINER_WEIGHTS_RENAMED = "trainer.weights.renamed"
    TRAINER_WEIGHTS_STORED = "trainer.weights.stored"  # one object of a version, where they go by the object store
    TRAINER_WEIGHTS_SAID = "trainer.weights.said"
    TRAINER_WEIGHTS_SEEN = "trainer.weights.seen"
    TRAINER_WEIGHTS_PRUNED = "trainer.weights.pruned"
    TRAINER_SUPERSEDED = "trainer.superseded"  # knows that another trainer has opened its run


class _Fault(msgspec.Struct):
    point: Point
    number: signal.Signals
    left: int  # how often it is still passed by, and this one


_armed: list[_Fault] = []


def arm(environment: Mapping[str, str]) -> None:
    """Read the variables. Done at import; a process that was forked with another environment does it again.

    Raises `ValueError` for a point that does not exist.
    """
    _armed.clear()
    for variable, number in SIGNALS.items():
        name, _, count = environment.get(variable, "").partition(":")
        if name:
            _armed.append(_Fault(Point(name), number, int(count or 1)))


def reached(point: Point) -> None:
    """The process is at `point`: it dies or freezes here if it was told to."""
    if _armed:
        _strike(point)


def _strike(point: Point) -> None:
    for fault in _armed:
        if fault.point == point:
            fault.left -= 1
            if fault.left == 0:
                os.write(2, f"{fault.number.name} at {point}\n".encode())
                os.kill(os.getpid(), fault.number)


arm(os.environ)
