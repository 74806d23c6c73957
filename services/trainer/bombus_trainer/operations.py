"""Operations of all ranks of a trainer: the leader announces them, the others follow, no rank waits for a failed one.

Between operations the others wait at torch's store, for hours if need be; the timeout of the process group applies only
within an operation. After each, every rank reports its outcome. When all report the same failure (a damaged
checkpoint) they can go on. When one has failed in its own way, others may be in the middle of an exchange: then all
processes end.
"""

import logging
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from bombus.config.job import RunConfig
from bombus.errors import BombusError
from bombus_trainer.backend import BackendLost, Loader, TrainerBackend
from bombus_trainer.data.batch import EpisodeGroup
from bombus_trainer.publish.checkpoint import Facts, Saved
from bombus_trainer.publish.export import ModelPart, Outline, Tensors
from bombus_trainer.ranks import LEADER, Ranks
from bombus_trainer.settings import TrainerSettings

log = logging.getLogger(__name__)

T = TypeVar("T")
LOAD, STOP = "load", "stop"
GRACE_S = 10.0  # for the others to report, once one has failed
POLL_S = 60.0
Operation = tuple[str, tuple[object, ...]]  # a method of the backend, and its arguments


class Board:
    """The store that all ranks reach, where operations are announced and their outcomes reported."""

    def __init__(self, store: Store, ranks: Ranks, grace_s: float = GRACE_S) -> None:
        self.ranks = ranks
        self.grace_s = grace_s
        self._store = store
        self._number = 0

    def announce(self, operation: Operation) -> None:
        """Start the next operation on all ranks. Called by the leader."""
        self._number += 1
        self._store.set(f"call/{self._number}", "there")
        self.ranks.share(operation)

    def next(self) -> Operation:
        """Wait for the next operation, however long that takes. Called by the others."""
        self._number += 1
        while not self._arrives(f"call/{self._number}", POLL_S):
            pass
        operation: Operation = self.ranks.share()
        return operation

    def report(self, failure: Exception | None) -> None:
        self._store.set(f"outcome/{self._number}/{self.ranks.rank}", "" if failure is None else f"!{_words(failure)}")

    def outcome(self, rank: int, patience_s: float) -> str | None:
        """Return what went wrong at a rank ("": nothing), or None when it has not reported in time."""
        key = f"outcome/{self._number}/{rank}"
        return self._store.get(key).decode().removeprefix("!") if self._arrives(key, patience_s) else None

    def _arrives(self, key: str, patience_s: float) -> bool:
        try:
            self._store.wait([key], timedelta(seconds=patience_s))
        except dist.DistStoreError:
            return False
        return True


class Leader:
    """Loads backends that span all ranks. `load` loads this rank's part."""

    def __init__(self, board: Board, load: Loader, timeout_s: float) -> None:
        self._board = board
        self._load = load
        self._timeout_s = timeout_s
        self._lost: BackendLost | None = None

    def load(self, job: RunConfig) -> TrainerBackend:
        """Load a job on all ranks. Raises `EngineFault` as `load` does, `BackendLost`."""
        return _LeaderBackend(self, self.run((LOAD, (job,)), lambda: self._load(job)))

    def run(self, operation: Operation, ours: Callable[[], T]) -> T:
        """Run an operation on all ranks; `ours` is this rank's part. Raises what all have raised, or `BackendLost`."""
        if self._lost is not None:
            raise self._lost
        failure: Exception | None = None
        try:
            self._board.announce(operation)
            value = ours()
        except Exception as error:  # whatever it is, the others have to learn of it
            failure = error
        self._board.report(failure)
        patience_s = self._timeout_s if failure is None else self._board.grace_s
        others = {rank: self._board.outcome(rank, patience_s) for rank in range(1, self._board.ranks.size)}
        if failure is None and all(outcome == "" for outcome in others.values()):
            return value
        if failure is not None and all(outcome == _words(failure) for outcome in others.values()):
            raise failure
        self._lost = BackendLost(_sentence(failure, others))
        raise self._lost from failure

    def stop(self) -> None:
        """End the other ranks, if they are still there."""
        try:
            if self._lost is None:
                self._board.announce((STOP, ()))
        except RuntimeError as error:  # they were stopped too, and were faster
            log.info("the other ranks have gone already: %s", error)


class _LeaderBackend:
    """A backend of several ranks, as the leader's service sees it."""

    def __init__(self, leader: Leader, ours: TrainerBackend) -> None:
        self._leader = leader
        self._ours = ours

    @property
    def settings(self) -> TrainerSettings:
        return self._ours.settings

    @property
    def files(self) -> Mapping[str, bytes]:
        return self._ours.files

    @property
    def vocab_size(self) -> int:
        return self._ours.vocab_size

    def train_step(
        self, groups: list[EpisodeGroup], step: int, interrupted: Callable[[], bool] = lambda: False
    ) -> dict[str, float]:
        return self._leader.run(
            ("train_step", (groups, step)), lambda: self._ours.train_step(groups, step, interrupted)
        )

    def save(self, root: Path, facts: Facts) -> Saved:
        return self._leader.run(("save", (root, facts)), lambda: self._ours.save(root, facts))

    def restore(self, path: Path, digest: str) -> None:
        self._leader.run(("restore", (path, digest)), lambda: self._ours.restore(path, digest))

    def outline(self, part: ModelPart = ModelPart.MODEL) -> Outline:
        return self._ours.outline(part)

    def read_weights(self, use: Callable[[Tensors], T], part: ModelPart = ModelPart.MODEL) -> T:
        return self._leader.run(("gather_weights", (part,)), lambda: self._ours.read_weights(use, part))


def follow(board: Board, load: Loader) -> None:
    """Follow the leader's operations until it stops this rank.

    Raises `BackendLost` when this rank fails and the leader does not. By then it has left the process group, so that
    the others do not wait for it.
    """
    backend: TrainerBackend | None = None
    while True:
        method, arguments = board.next()
        if method == STOP:
            return
        failure: Exception | None = None
        try:
            if method == LOAD:
                backend = None  # free its memory first
                backend = load(*arguments)  # type: ignore[arg-type]
            else:
                getattr(backend, method)(*arguments)
        except Exception as error:  # the leader reports it on the log, if it can
            log.exception("rank %d failed to %s", board.ranks.rank, method)
            failure = error
        board.report(failure)
        if failure is not None and board.outcome(LEADER, board.grace_s) is None:
            dist.destroy_process_group()
            board.outcome(LEADER, board.grace_s)
            raise BackendLost(f"rank {board.ranks.rank}: {_words(failure)}") from failure


def _sentence(failure: Exception | None, others: Mapping[int, str | None]) -> str:
    failed = {rank: outcome for rank, outcome in others.items() if outcome}
    silent = [rank for rank, outcome in others.items() if outcome is None]
    parts = [f"rank {rank}: {outcome}" for rank, outcome in failed.items()]
    if failure is not None and not failed:
        parts.append(f"rank {LEADER}: {_words(failure)}")
    if silent:
        parts.append(f"nothing was heard of rank {', '.join(map(str, silent))}")
    return f"the trainer's ranks cannot go on together, and start again: {'; '.join(parts)}"


def _words(error: Exception) -> str:
    return (str(error) if isinstance(error, BombusError) else f"{type(error).__name__}: {error}") or "it failed"
