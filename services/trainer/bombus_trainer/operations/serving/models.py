"""Holds a run's models in this process: executes operations on them, and re-executes operations after a crash."""

import logging
from collections.abc import Awaitable, Callable, Container, Iterable
from functools import partial
from time import gmtime, perf_counter, strftime

import msgspec
import torch

from bombus.errors import EngineFault, LogCorrupted, Refused
from bombus.faults import Point, reached
from bombus.hive.events import ModelCheckpointed
from bombus.hive.operations.state import ClientModel, Queued
from bombus.hive.records import BodyRef
from bombus.operations import (
    AbortEpoch,
    Category,
    CheckpointKind,
    CreateModel,
    EndModel,
    Failed,
    ForwardBackward,
    LoadWeights,
    Operation,
    OptimStep,
    Rejected,
    Result,
    SaveWeights,
    decode_operation,
    decode_result,
)
from bombus_trainer.backend import BackendLost, OperationBackend
from bombus_trainer.operations.adam import check_adam
from bombus_trainer.operations.executor import adds_to_gradient
from bombus_trainer.operations.serving.outcomes import loaded_by
from bombus_trainer.operations.serving.rebuilding import Rebuild
from bombus_trainer.operations.serving.recovery_checkpoints import CheckpointClock, RecoveryCheckpoints
from bombus_trainer.recovery.progress import STALLS, Kind, in_thread

log = logging.getLogger(__name__)

FetchStored = Callable[[BodyRef], Awaitable[bytes]]
READING = ("create_model", "load_weights")  # operations that may read a checkpoint
LOST = "its error is no longer kept"  # the error shown for an operation that failed before the trainer was restarted


class ServedModels:
    """The models in memory.

    Each is in the state that the log implies: its recovery checkpoint, and the operations executed after it, in order.
    """

    def __init__(
        self,
        executor: OperationBackend,
        recovery: RecoveryCheckpoints,
        fetch_body: FetchStored,
        names: tuple[str, str],
        stall_s: float,
    ) -> None:
        """Initialize without any models.

        `fetch_body` reads a body or a result from the stream `ops`. `names` are two names for the base: the callers'
        and the executor's.
        """
        self.executor = executor
        self._recovery = recovery
        self._fetch_body = fetch_body
        self._names = names
        self._stall_s = stall_s
        self._begun: dict[str, int] = {}  # number of each model's creation, since names are reused
        self._clocks: dict[str, CheckpointClock] = {}
        self._read: dict[str, set[str]] = {}  # checkpoints that each model loaded since its recovery checkpoint
        self._away: dict[str, set[str]] = {}  # models that cannot be rebuilt now: checkpoints their operations read

    # ---- following the log ----------------------------------------------------------------------------------------

    def is_gone(self, models: dict[str, ClientModel]) -> bool:
        """Return whether a model in this process has ended."""
        return any(not self._is_open(name, models) for name in self._begun)

    def _is_open(self, name: str, models: dict[str, ClientModel]) -> bool:
        model = models.get(name)
        return model is not None and model.closed is None and model.begun == self._begun[name]

    def forget_ended(self, models: dict[str, ClientModel]) -> None:
        """Forget the models that have ended."""
        for name in [name for name in self._begun if not self._is_open(name, models)]:
            self.executor.drop(name)
            del self._begun[name]
            self._clocks.pop(name, None)  # missing if the model could not be rebuilt
            self._read.pop(name, None)
            self._away.pop(name, None)

    async def make_again(self, model: ClientModel, rebuild: Rebuild) -> None:
        """Rebuild a model: load its recovery checkpoint, and re-execute the operations since then.

        If the recovery checkpoint is gone, or trainers do not survive re-executing an operation, a checkpoint that the
        model's client saved is used instead, provided that the log has the operations after it.

        Raises `EngineFault` or `LogCorrupted` if the model cannot be rebuilt, because a file or a body is gone.
        """
        self.executor.drop(model.name)
        self._hold(model)
        checkpoint, done = model.checkpoint, model.done  # only failed ends come after `done`, and need no repetition
        executed = [each for each in model.again() if each.number <= done]
        begun = min(done, await self._first(model, checkpoint, rebuild))
        self._clocks[model.name] = CheckpointClock(begun, model.checkpointed, at_once=begun > model.checkpointed)
        self._read[model.name] = set()
        for queued in executed:
            if queued.number <= begun:
                continue
            await rebuild.begins(queued.number)
            operation = await self._execute_again(model, queued)
            self._note(model, queued, operation, queued.failed)
            reached(Point.OPERATION_MADE_AGAIN)

    async def _first(self, model: ClientModel, checkpoint: ModelCheckpointed | None, rebuild: Rebuild) -> int:
        """Load the checkpoint to rebuild a model from, if there is one. Return the number of the last operation that
        need not be re-executed."""
        deadly = await rebuild.rescued_from()
        if deadly:
            load = partial(self.executor.rescue, model.name, _made_by(model), deadly)
        elif checkpoint is not None:
            await rebuild.begins(checkpoint.number)
            load = partial(self._load, model, checkpoint)
        else:
            return model.begun - 1
        limit_s = STALLS * self._stall_s or None
        begun = await in_thread(Kind.LOAD, f"model {model.name}, from a checkpoint", load, limit_s)
        if begun is None:
            raise rebuild.none_survived()
        return begun

    def _load(self, model: ClientModel, checkpoint: ModelCheckpointed) -> int | None:
        """Load a model's recovery checkpoint, or else one that its client saved.

        Returns the number of the last operation in it.
        """
        try:
            self._recovery.load(self.executor, model.name, checkpoint)
        except EngineFault:
            number = self.executor.rescue(model.name, _made_by(model), model.checkpointed)
            if number is None:
                raise
            log.warning("model %s continues from its client's checkpoint: its recovery checkpoint is gone", model.name)
            return number
        return checkpoint.number

    def holds(self, name: str) -> bool:
        """Return whether a model was created here and has not been forgotten, even if it cannot be rebuilt now."""
        return name in self._begun

    async def try_again(self, model: ClientModel, rebuild: Rebuild) -> Exception | None:
        """Rebuild a model. If it cannot be rebuilt now, drop it and return the error."""
        try:
            await self.make_again(model, rebuild)
        except (EngineFault, LogCorrupted) as error:
            self.executor.drop(model.name)
            self._away[model.name] = await self._named_by(model)
            return error
        self._away.pop(model.name, None)
        return None

    async def _named_by(self, model: ClientModel) -> set[str]:
        """Return the checkpoints that a model's operations read, whether those operations are re-executed or still
        waiting."""
        found: set[str] = set()
        for queued in model.again():
            if queued.op not in READING or queued.body is None or (queued.waits and queued.reads_removed):
                continue
            try:
                found.add(_checkpoint_of(decode_operation(await self._fetch_body(queued.body))))
            except (LogCorrupted, msgspec.MsgspecError) as error:  # it cannot be executed either
                log.warning("operation %s of model %s cannot be read: %s", queued.key, model.name, error)
        return found

    def _hold(self, model: ClientModel) -> None:
        self._begun[model.name] = model.begun

    async def _execute_again(self, model: ClientModel, queued: Queued) -> Operation:
        """Re-execute an operation for its effect on the model. Files that it wrote for its caller are not written
        again."""
        operation = await self._read_again(queued)
        if queued.failed:
            failure = await self._failure(queued)
            if adds_to_gradient(operation):
                self.executor.execute(model.name, Rejected(failure=failure, counts=True))
            elif isinstance(operation, OptimStep) and failure.category is Category.USER and _is_step(operation):
                self.executor.clear(model.name)
            return operation
        if isinstance(operation, SaveWeights):
            return operation
        if isinstance(operation, EndModel):
            operation = EndModel(reset_weights=operation.reset_weights)
        result = await self.execute(model, queued, operation)
        if isinstance(result, Failed):
            raise EngineFault(
                f"operation {queued.key} of model {model.name} succeeded before, but fails while the model is "
                f"being rebuilt: {result.error}"
            )
        if queued.loaded and queued.loaded != loaded_by(result):
            raise EngineFault(
                f"the checkpoint {_checkpoint_of(operation)} is no longer the one that operation {queued.key} of "
                f"model {model.name} loaded, and there is no later recovery checkpoint: restore the old one, or end "
                "the model and create it from a checkpoint"
            )
        return operation

    async def _failure(self, queued: Queued) -> Failed:
        """Return the result of an operation that failed."""
        found: Result | None = None
        try:
            if queued.result is not None:
                found = decode_result(await self._fetch_body(queued.result))
        except LogCorrupted as error:
            log.warning("the result of operation %s cannot be read: %s", queued.key, error)
        category = Category.SERVER if queued.by_server else Category.USER
        return found if isinstance(found, Failed) else Failed(error=LOST, category=category)

    async def _read_again(self, queued: Queued) -> Operation:
        """Read an operation that has already been executed. If it failed and its body is gone, assume that it spoiled
        the gradient.

        If that assumption is wrong, the next step fails unnecessarily, which is better than a step with a different
        gradient.
        """
        try:
            return await self.read(queued)
        except LogCorrupted as error:
            if not queued.failed:
                raise
            log.warning("operation %s failed, and its body is gone: %s", queued.key, error)
            return Rejected(failure=Failed(error=LOST, category=Category.SERVER), counts=True)

    # ---- operations -----------------------------------------------------------------------------------------------

    async def read(self, queued: Queued) -> Operation:
        """Return an operation. If it cannot be read, return a `Rejected` that says why."""
        if queued.body is None:
            return EndModel(save_as=queued.save_as)
        if queued.waits and queued.reads_removed:
            why = f"{queued.reads} was removed while this operation waited for its model: load another checkpoint"
            return Rejected(failure=Failed(error=why, category=Category.USER))
        try:
            operation = decode_operation(await self._fetch_body(queued.body))
        except LogCorrupted as error:
            if not queued.waits:
                raise
            why = f"the body of this operation is lost ({error}): send the operation again under another key"
        except msgspec.MsgspecError as error:
            why = f"this operation cannot be read ({error}): gateway and trainer must run the same version"
        else:
            if not queued.passive or not _changes(operation):
                return _named(operation, queued)
            why = "this operation was announced as one that leaves the model as it is, but it changes the model"
        return Rejected(failure=Failed(error=why, category=Category.SERVER), counts=not queued.passive)

    async def execute(
        self, model: ClientModel, queued: Queued, operation: Operation, removed: Container[str] = ()
    ) -> Result:
        """Execute an operation in a thread. Failures are returned as results; only a lost device or rank raises an
        exception.

        `removed` contains the checkpoints whose files still exist although the log has removed them.
        """
        if isinstance(operation, CreateModel):
            self.executor.drop(model.name)
            self._hold(model)
            self._clocks[model.name] = CheckpointClock(queued.number - 1, queued.number - 1)
            if operation.base == self._names[0]:
                operation = msgspec.structs.replace(operation, base=self._names[1])
        if isinstance(operation, SaveWeights):
            name = f"{model.name}/{operation.checkpoint}/{operation.name}"
            is_needed = self._was_loaded(name) or any(name in named for named in self._away.values())
            if is_needed and (operation.overwrite or name in removed):
                why = f"a model was made from the checkpoint {name} and has no recovery checkpoint yet"
                why += ", so it cannot be replaced now"
                return Failed(error=f"{why}: save under another name, or try it later", category=Category.SERVER)
        number = queued.number
        if isinstance(operation, EndModel):  # the saved model excludes this operation; a reset comes after the save
            number -= 1
        name = f"{_made_by(model)}{number}"
        kind, limit_s = Kind.OPERATION, None
        if isinstance(operation, CreateModel | LoadWeights):
            kind, limit_s = Kind.LOAD, STALLS * self._stall_s or None
        elif isinstance(operation, SaveWeights | EndModel):
            kind = Kind.CHECKPOINT
        what = f"operation {queued.number} of model {model.name}, {queued.op}"
        return await in_thread(kind, what, partial(self._execute, model.name, operation, name), limit_s)

    def give_up(self, model: ClientModel, queued: Queued, operation: Operation) -> Failed:
        """Return the failure of an operation that no trainer has survived. Only the gradient is marked as failed."""
        why = (
            f"trainers ended {queued.begun} times while they executed this operation, so it is not retried. Check the "
            "kernel log for the out-of-memory killer and the ends of the trainers' logs; send less data per operation"
        )
        if isinstance(operation, CreateModel):
            self.executor.drop(model.name)
        self.executor.fail_gradient(model.name, operation, why)
        return Failed(error=why, category=Category.SERVER)

    def _execute(self, model: str, operation: Operation, name: str) -> Result:
        try:
            return self.executor.execute(model, operation, name)
        except BackendLost:
            raise
        except torch.AcceleratorError as error:
            raise BackendLost(f"the device failed in an operation of model {model}: {error}") from error
        except Exception as error:  # a bug must fail only one operation of one model
            log.exception("an operation of model %s failed", model)
            why = f"the trainer failed in this operation, because of a bug in bombus ({type(error).__name__}: {error})"
            failed = Failed(error=why[:2000], category=Category.SERVER)
            self.executor.fail_gradient(model, operation, failed.error)
            return failed

    def note(self, model: ClientModel, queued: Queued, operation: Operation, result: Result) -> bool:
        """Record that an operation's result is on the log. Returns whether the model still matches the log.

        If this trainer failed, the model may be partly changed and must then be rebuilt.
        """
        if isinstance(result, Failed) and result.category is Category.SERVER and _is_whole(operation):
            return False
        if not queued.passive and model.name in self._clocks:
            self._note(model, queued, operation, isinstance(result, Failed))
        return True

    def _note(self, model: ClientModel, queued: Queued, operation: Operation, has_failed: bool) -> None:
        size = 0 if queued.body is None else queued.body.size
        checkpoint = "" if has_failed else _checkpoint_of(operation)
        if checkpoint:
            self._read.setdefault(model.name, set()).add(checkpoint)
        self._clocks[model.name].note(queued.number, size, perf_counter(), at_once=bool(checkpoint))

    def needs_checkpoint(self, name: str) -> bool:
        """Return whether a checkpoint must not be removed yet.

        That is the case if a model has loaded it and has had no recovery checkpoint since, or if a model that cannot be
        rebuilt now may need it later, because its operations read it or because it can replace the model's recovery
        checkpoint.
        """
        return self._was_loaded(name) or any(
            name in named or name.startswith(f"{model}/{CheckpointKind.TRAINING}/")
            for model, named in self._away.items()
        )

    def _was_loaded(self, name: str) -> bool:
        """Return whether any model has loaded this checkpoint and has had no recovery checkpoint since."""
        return any(name in read for model, read in self._read.items() if self._clocks[model].at_once)

    # ---- recovery checkpoints ----------------------------------------------------------------------------------------

    def due_for_checkpoints(self) -> Iterable[tuple[str, CheckpointClock]]:
        """Yield the models that have changed since their recovery checkpoints, each with its clock."""
        there = self.executor.models
        return (
            (name, clock) for name, clock in self._clocks.items() if clock.number > clock.checkpointed and name in there
        )

    async def write_checkpoint(self, name: str) -> tuple[int, str, str]:
        """Write a recovery checkpoint of a model. Raises `OSError` if it cannot be written.

        Returns the number of the last operation in the checkpoint, its folder and its digest.
        """
        clock = self._clocks[name]
        start = perf_counter()
        write = partial(self._recovery.write, self.executor, name, clock.number)
        folder, digest = await in_thread(Kind.CHECKPOINT, f"the recovery checkpoint of model {name}", write)
        clock.wrote(perf_counter() - start)
        self._read.pop(name, None)
        return clock.number, folder, digest

    async def remove_old_checkpoints(self, models: Iterable[ClientModel]) -> None:
        """Remove the recovery checkpoints that the log no longer names."""
        named = [model.checkpoint.folder for model in models if model.checkpoint is not None and model.closed is None]
        await in_thread(Kind.REMOVAL, "removing old recovery checkpoints", partial(self._recovery.remove_others, named))


def _made_by(model: ClientModel) -> str:
    """Return the prefix of the names under which checkpoints record a model's operations; the number follows it."""
    return f"{model.run}/{model.name}/{model.opened_ns}/"


def _named(operation: Operation, queued: Queued) -> Operation:
    """Return the operation with a checkpoint name that is derived from the log, so that re-execution gives the same
    name."""
    if isinstance(operation, EndModel) and operation.reset_weights and operation.save_as:  # the name may be used again
        return msgspec.structs.replace(operation, save_as=f"{operation.save_as}-{queued.number}")
    if not isinstance(operation, SaveWeights) or operation.name:
        return operation
    taken = strftime("%Y%m%d-%H%M%S", gmtime(queued.accepted_ns / 1e9))
    return msgspec.structs.replace(operation, name=f"{taken}-{queued.number}")


def _changes(operation: Operation) -> bool:
    """Return whether an operation changes its model."""
    if isinstance(operation, ForwardBackward | Rejected):
        return adds_to_gradient(operation)
    return not isinstance(operation, SaveWeights)


def _is_whole(operation: Operation) -> bool:
    """Return whether an operation must change its model completely or not at all, even if it fails midway."""
    if isinstance(operation, EndModel):
        return operation.reset_weights
    return isinstance(operation, OptimStep | AbortEpoch | LoadWeights)


def _checkpoint_of(operation: Operation) -> str:
    """Return the checkpoint that an operation reads, or "". The operation's caller may replace or remove it later."""
    return operation.checkpoint if isinstance(operation, LoadWeights | CreateModel) else ""


def _is_step(operation: OptimStep) -> bool:
    """Return whether a step's parameters are valid. If such a step failed, it cleared the gradient."""
    try:
        check_adam(operation.adam)
    except Refused:
        return False
    return True
