"""Makes calls on all ranks of a trainer: the leader announces each call, the others follow, and no rank waits for a
failed one.

Between calls the other ranks wait on torch's store, for hours if need be; the process group's timeout applies only
during a call. After each call, every rank reports its outcome. If all report the same failure (such as a damaged
checkpoint), they can continue. Otherwise some ranks may be in the middle of a collective, so all processes end.
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
from bombus.hive.events import Canary
from bombus.operations import Operation, Result
from bombus.weights.checkpoints import Checkpoint
from bombus_trainer.backend import BackendLost, BaseLoader, Loader, OperationBackend, TrainerBackend
from bombus_trainer.backends.torch.model import PolicyModel
from bombus_trainer.data.batch import EpisodeGroup
from bombus_trainer.data.fates import StepAccount
from bombus_trainer.operations.checkpoints import ModelCheckpoint
from bombus_trainer.operations.settings import ExecutorSettings
from bombus_trainer.publish.export import ModelPart, Outline, Tensors, WeightsSource
from bombus_trainer.publish.step_checkpoint import StepFacts
from bombus_trainer.ranks import LEADER, Ranks
from bombus_trainer.settings import TrainerSettings

log = logging.getLogger(__name__)

T = TypeVar("T")
LOAD, LOAD_BASE, STOP = "load", "load_base", "stop"
GRACE_S = 10.0  # how long the other ranks may take to report after one has failed
POLL_S = 60.0
RankCall = tuple[str, tuple[object, ...]]  # a method of the loaded backend, and its arguments


class Board:
    """The store shared by all ranks, in which calls are announced and their outcomes reported."""

    def __init__(self, store: Store, ranks: Ranks, grace_s: float = GRACE_S) -> None:
        self.ranks = ranks
        self.grace_s = grace_s
        self._store = store
        self._number = 0

    def announce(self, call: RankCall) -> None:
        """Start the next call on all ranks. Called by the leader."""
        self._number += 1
        self._store.set(f"call/{self._number}", "there")
        self.ranks.share(call)

    def next(self) -> RankCall:
        """Wait for the next call, however long that takes. Called by the other ranks."""
        self._number += 1
        while not self._arrives(f"call/{self._number}", POLL_S):
            pass
        call: RankCall = self.ranks.share()
        return call

    def report(self, failure: Exception | None) -> None:
        self._store.set(f"outcome/{self._number}/{self.ranks.rank}", "" if failure is None else f"!{_words(failure)}")

    def outcome(self, rank: int, patience_s: float) -> str | None:
        """Return the error that a rank reports ("" if it succeeded), or None if it does not report in time."""
        key = f"outcome/{self._number}/{rank}"
        return self._store.get(key).decode().removeprefix("!") if self._arrives(key, patience_s) else None

    def forget(self) -> None:
        """Remove the current call, which all ranks have completed, so that the store does not grow with each call."""
        for key in (f"call/{self._number}", *(f"outcome/{self._number}/{rank}" for rank in range(self.ranks.size))):
            self._store.delete_key(key)

    def _arrives(self, key: str, patience_s: float) -> bool:
        try:
            self._store.wait([key], timedelta(seconds=patience_s))
        except dist.DistStoreError:
            return False
        return True


class Leader:
    """Loads backends that span all ranks. The functions `load` and `load_base` that it is created with load this rank's
    part."""

    def __init__(self, board: Board, load: Loader, load_base: BaseLoader, timeout_s: float) -> None:
        self._board = board
        self._load = load
        self._load_base = load_base
        self._timeout_s = timeout_s
        self._lost: BackendLost | None = None

    def load(self, job: RunConfig) -> TrainerBackend:
        """Load a job on all ranks. Raises `EngineFault` if all ranks raise the same one, or otherwise `BackendLost`."""
        return _LeaderBackend(self, self.run((LOAD, (job,)), lambda: self._load(job)))

    def load_base(self, job: RunConfig, executor: ExecutorSettings) -> OperationBackend:
        """Load the base of training operations on all ranks. Raises the same errors as `load`."""
        return _LeaderOperations(self, self.run((LOAD_BASE, (job, executor)), lambda: self._load_base(job, executor)))

    def run(self, call: RankCall, ours: Callable[[], T]) -> T:
        """Make a call on all ranks; `ours` is this rank's part.

        If all ranks raise the same error, this error is raised. After any other failure, raises `BackendLost`.
        """
        if self._lost is not None:
            raise self._lost
        failure: Exception | None = None
        try:
            self._board.announce(call)
            value = ours()
        except Exception as error:  # any error must be reported to the other ranks
            failure = error
        self._board.report(failure)
        patience_s = self._timeout_s if failure is None else self._board.grace_s
        others = {rank: self._board.outcome(rank, patience_s) for rank in range(1, self._board.ranks.size)}
        if failure is None and all(outcome == "" for outcome in others.values()):
            self._board.forget()
            return value
        if failure is not None and all(outcome == _words(failure) for outcome in others.values()):
            raise failure
        self._lost = BackendLost(_sentence(failure, others))
        raise self._lost from failure

    def stop(self) -> None:
        """End the other ranks, if they are still running."""
        try:
            if self._lost is None:
                self._board.announce((STOP, ()))
        except RuntimeError as error:  # they were stopped too, and ended first
            log.info("the other ranks have already ended: %s", error)


class _LeaderBackend:
    """A backend on several ranks, as the leader's service sees it."""

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
        self,
        groups: list[EpisodeGroup],
        step: int,
        interrupted: Callable[[], bool] = lambda: False,
        account: Callable[[StepAccount], None] = lambda account: None,
    ) -> dict[str, float]:
        return self._leader.run(
            ("train_step", (groups, step)), lambda: self._ours.train_step(groups, step, interrupted, account)
        )

    def save(self, root: Path, facts: StepFacts) -> Checkpoint[StepFacts]:
        return self._leader.run(("save", (root, facts)), lambda: self._ours.save(root, facts))

    def restore(self, path: Path, digest: str) -> None:
        self._leader.run(("restore", (path, digest)), lambda: self._ours.restore(path, digest))

    def outline(self, part: ModelPart = ModelPart.MODEL) -> Outline:
        return self._ours.outline(part)

    def canary(self, part: ModelPart = ModelPart.MODEL, source: WeightsSource | None = None) -> Canary | None:
        return self._ours.canary(part, source or self)

    def read_weights(self, use: Callable[[Tensors], T], part: ModelPart = ModelPart.MODEL) -> T:
        return self._leader.run(("gather_weights", (part,)), lambda: self._ours.read_weights(use, part))


class _LeaderOperations:
    """The models of training clients on all ranks, as the leader's service sees them.

    Each rank has all models, so reads need only the leader's backend, and only the leader removes files.
    """

    def __init__(self, leader: Leader, ours: OperationBackend) -> None:
        self._leader = leader
        self._ours = ours

    @property
    def models(self) -> dict[str, int]:
        return self._ours.models

    @property
    def base(self) -> PolicyModel:
        return self._ours.base

    def execute(self, model: str, operation: Operation, name: str = "") -> Result:
        arguments = (model, operation, name)
        return self._leader.run(("execute", arguments), lambda: self._ours.execute(*arguments))

    def save_for_recovery(self, model: str, name: str) -> ModelCheckpoint:
        return self._leader.run(("save_for_recovery", (model, name)), lambda: self._ours.save_for_recovery(model, name))

    def recover(self, model: str, name: str, digest: str) -> None:
        arguments = (model, name, digest)
        self._leader.run(("recover", arguments), lambda: self._ours.recover(*arguments))

    def rescue(self, model: str, made_by: str, at_least: int) -> int | None:
        arguments = (model, made_by, at_least)
        return self._leader.run(("rescue", arguments), lambda: self._ours.rescue(*arguments))

    def fail_gradient(self, model: str, operation: Operation, why: str) -> None:
        self._leader.run(
            ("fail_gradient", (model, operation, why)), lambda: self._ours.fail_gradient(model, operation, why)
        )

    def clear(self, model: str) -> None:
        self._leader.run(("clear", (model,)), lambda: self._ours.clear(model))

    def drop(self, model: str) -> None:
        self._leader.run(("drop", (model,)), lambda: self._ours.drop(model))

    def release(self) -> None:
        self._leader.run(("release", ()), self._ours.release)

    def remove_checkpoint(self, checkpoint: str) -> None:
        self._ours.remove_checkpoint(checkpoint)


def follow(board: Board, load: Loader, load_base: BaseLoader) -> None:
    """Follow the leader's calls until it stops this rank.

    Raises `BackendLost` if this rank fails and the leader reports no outcome within the grace period. Before that, this
    rank leaves the process group, so that the others do not wait for it.
    """
    loaders: dict[str, Callable[..., object]] = {LOAD: load, LOAD_BASE: load_base}
    backend: object = None
    while True:
        method, arguments = board.next()
        if method == STOP:
            return
        failure: Exception | None = None
        try:
            if method in loaders:
                backend = None  # free its memory first
                backend = loaders[method](*arguments)
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
        parts.append(f"no message came from rank {', '.join(map(str, silent))}")
    return f"the trainer's ranks cannot continue together and are restarting: {'; '.join(parts)}"


def _words(error: Exception) -> str:
    return (str(error) if isinstance(error, BombusError) else f"{type(error).__name__}: {error}") or "it failed"
