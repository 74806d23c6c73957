"""Serves an operations run (R17): loads the base, executes waiting operations, and publishes results and recovery
checkpoints."""

import logging
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from itertools import count
from math import inf
from pathlib import Path
from time import perf_counter
from typing import NoReturn, TypeVar

from torch import AcceleratorError

from bombus.bus import Bus
from bombus.bus.large.parts import Parts
from bombus.errors import BusUnavailable, Code, Refused
from bombus.faults import Point, reached
from bombus.hive.inbox import (
    CheckpointWritten,
    ModelAway,
    OperationBegins,
    OperationDone,
    RebuildsModel,
    TrainerRests,
    TrainerServes,
)
from bombus.hive.operations.state import ClientModel, Queued, TrainingClients, bodies_share
from bombus.hive.records import BodyRef
from bombus.hive.state import EngineState, Phase
from bombus.operations import Category, EndModel, Failed, ModelEnded, Operation, Result
from bombus_trainer.backend import BackendLost, BaseLoader
from bombus_trainer.operations.serving.base_weights import publish_base
from bombus_trainer.operations.serving.memory import give_back
from bombus_trainer.operations.serving.models import ServedModels
from bombus_trainer.operations.serving.outcomes import encoded, loaded_by, metrics_of, saved_by, shape_of
from bombus_trainer.operations.serving.rebuilding import NoneSurvived, Rebuild
from bombus_trainer.operations.serving.recovery_checkpoints import RecoveryCheckpoints
from bombus_trainer.operations.serving.turns import Turns
from bombus_trainer.operations.settings import ExecutorSettings
from bombus_trainer.options import TrainerOptions
from bombus_trainer.ownership import RunOwnership
from bombus_trainer.publish.directories import remove_earlier
from bombus_trainer.recovery.progress import STALLS, Kind, in_thread
from bombus_trainer.recovery.reports import FailedAttempts, RunReports, check_lost, reason_of

log = logging.getLogger(__name__)

LOAD_SHARE = 0.75  # largest share of the time allowed for booting that a load may take
FULL_SHARE = 0.5  # share of the bytes for bodies above which recovery checkpoints are due immediately
SUSPENDED_CHARS_MAX = 500
END = "end_model"
T = TypeVar("T")


class OperationServer:
    """Serves one run, from the moment this trainer owns it until the run ends."""

    def __init__(
        self,
        bus: Bus,
        options: TrainerOptions,
        ownership: RunOwnership,
        reports: RunReports,
        load_base: BaseLoader,
    ) -> None:
        self._load_base = load_base
        self._bus = bus
        self._options = options
        self._ownership = ownership
        self._reports = reports
        self._parts = Parts(bus)
        self._turns = Turns()
        self._facts = count(1)
        self._models: ServedModels | None = None
        self._checkpoint_pause_until_s = 0.0
        self._begun: set[str] = set()  # models for which this trainer has begun an operation
        self._said: dict[str, str] = {}  # why each model waits, as last published by this trainer
        self._suspended: dict[str, float] = {}  # models that cannot be rebuilt now, and when to retry
        self._lived_through: set[str] = set()  # models that this trainer failed to rebuild, but survived trying to
        self._has_tried = False  # whether this trainer has tried to rebuild a suspended model since its last operation

    async def run(self) -> NoReturn:
        """Serve until the run ends, which raises `RunOver`. Start over after a failure.

        Raises `BackendLost` if only a new process can continue.
        """
        failed = FailedAttempts()
        try:
            while True:
                try:
                    if self._ownership.engine.rest_wanted:
                        await self._sleep()
                    await self._serve(await self._awake())
                    failed.clear()
                    continue
                except Exception as error:  # out of memory, a full disk or a bug; counted, to give up in the end
                    if self._reports.counts(error, failed):
                        await self._report_failure(error, failed.attempts)
                        check_lost(error)
                self._let_go()
                await self._reports.pause(failed)
        finally:
            self._let_go()

    async def _report_failure(self, error: Exception, attempts: int) -> None:
        """Suspend the run after too many failed attempts in a row, unless a device or rank is lost, in which case a new
        process continues."""
        is_lost = isinstance(error, (AcceleratorError, BackendLost))
        if not is_lost and attempts >= self._ownership.engine.collection.max_step_failures:
            await self._reports.suspend(reason_of(error))

    def _let_go(self) -> None:
        """Give back the memory of all models."""
        self._models = None
        give_back()

    # ---- sleep ----------------------------------------------------------------------------------------------------

    async def _sleep(self) -> None:
        """Write recovery checkpoints, free the memory of all models, and wait until the run should continue.

        If a model's recovery checkpoint could not be written, the model is later rebuilt from an older one and the
        operations since then.
        """
        ownership = self._ownership
        if self._models is not None:
            await self._checkpoint_all(self._models)
            await in_thread(Kind.REMOVAL, "freeing memory", self._models.executor.release)
        self._let_go()
        reached(Point.REST_FREED)
        log.info("run %d: the trainer is asleep", ownership.run)
        await self._say_rest(asleep=True)
        await ownership.wait(lambda engine: not (engine.rest_wanted and engine.asleep))  # a new request resets `asleep`

    async def _awake(self) -> ServedModels:
        """Return the models of this run, rebuilding those that are missing."""
        if self._models is None:
            self._models = await self._boot()
        if self._ownership.engine.asleep and not self._ownership.engine.rest_wanted:
            reached(Point.REST_WOKEN)
            await self._say_rest(asleep=False)
        return self._models

    async def _say_rest(self, asleep: bool) -> None:
        ownership = self._ownership
        rests = TrainerRests(**ownership.head(f"rests-{next(self._facts)}"), asleep=asleep)
        await ownership.say(rests, lambda engine: engine.asleep == asleep)

    async def _checkpoint_all(self, models: ServedModels) -> None:
        for name, _ in list(models.due_for_checkpoints()):
            await self._write_checkpoint(models, name)

    # ---- before the first operation -------------------------------------------------------------------------------

    async def _boot(self) -> ServedModels:
        """Load the base, and rebuild the models of this run."""
        ownership = self._ownership
        models = await self._reports.booted(self._load, has_loaded=lambda: ownership.engine.phase != Phase.BOOTING)
        serves = TrainerServes(**ownership.head("serves"))
        if ownership.engine.phase == Phase.BOOTING:
            await ownership.say(serves, lambda engine: engine.phase != Phase.BOOTING, Point.SERVING_SAID)
        await self._when_back(lambda: publish_base(self._bus, self._options, ownership, models.executor.base))
        await self._make_models(models)
        ownership.removed.update(ownership.engine.clients.removed)  # includes removals while no trainer was running
        await models.remove_old_checkpoints(ownership.engine.clients.open_models)
        reached(Point.SERVING_BEGUN)
        return models

    async def _make_models(self, models: ServedModels) -> None:
        """Rebuild all models. A model that cannot be rebuilt waits while the others continue.

        If the recovery checkpoints of all models are missing, their common folder is presumably missing too, and one of
        the faults is raised.
        """
        self._suspended = {}
        faults: dict[str, Exception] = {}
        found = self._ownership.engine.clients.open_models
        for model in found:
            self._ownership.check()
            fault = await self._try_again(models, model)
            if fault is not None:
                faults[model.name] = fault
            if isinstance(fault, NoneSurvived):  # publish it now, since the next model may end this trainer
                await self._say_whether_away(model, fault)
        checkpoints = {model.name: Path(model.checkpoint.folder) for model in found if model.checkpoint is not None}
        if checkpoints and all(name in faults and not path.exists() for name, path in checkpoints.items()):
            raise faults[next(iter(checkpoints))]
        for model in found:
            await self._say_whether_away(model, faults.get(model.name))

    async def _try_again(self, models: ServedModels, model: ClientModel) -> Exception | None:
        """Rebuild a model, or return the error that currently prevents this."""
        rebuild = self._rebuild(model)
        fault = await models.try_again(model, rebuild)
        if fault is None:
            self._lived_through.discard(model.name)
        elif isinstance(fault, NoneSurvived):
            return fault
        else:
            self._lived_through.add(model.name)
        await rebuild.over()
        return fault

    def _rebuild(self, model: ClientModel) -> Rebuild:
        ownership = self._ownership
        say = None if model.name in self._lived_through else partial(self._say_rebuilding, model.name)
        return Rebuild(model, ownership.epoch, ownership.engine.collection.operations.executions_max, say)

    async def _say_rebuilding(self, model: str, number: int, over: bool) -> None:
        ownership = self._ownership
        rebuilds = RebuildsModel(
            **ownership.head(f"rebuilds-{next(self._facts)}"), model=model, number=number, over=over
        )
        await ownership.send(rebuilds)

    async def _say_whether_away(self, model: ClientModel, fault: Exception | None) -> None:
        """Suspend a model and tell its client why, or let it continue."""
        if fault is not None:
            log.error("model %s is suspended, because it cannot be rebuilt: %s", model.name, fault)
            self._suspended[model.name] = perf_counter() + self._options.retry_s_max
        else:
            self._suspended.pop(model.name, None)
        why = "" if fault is None else reason_of(fault)[:SUSPENDED_CHARS_MAX]
        before = "" if isinstance(fault, NoneSurvived) else model.suspended  # each trainer reports this again
        if why == self._said.get(model.name, before):
            return
        self._said[model.name] = why
        ownership = self._ownership
        away = ModelAway(**ownership.head(f"away-{next(self._facts)}"), model=model.name, why=why)
        # Once the log shows this, this trainer also knows which checkpoints were removed while the model was suspended.
        await ownership.say(away, partial(_is_known, model=model, waits=why != ""))

    async def _load(self) -> ServedModels:
        ownership, options = self._ownership, self._options
        engine, job = ownership.engine, ownership.job
        assert engine.started is not None, "a run that serves operations has started"
        base = engine.started.base

        def load() -> ServedModels:
            reached(Point.TRAINER_MODEL_LOADING)
            scratch, recovery = self._folder("scratch"), self._folder("covers")
            remove_earlier(scratch, ownership.run, ownership.epoch)
            remove_earlier(recovery, ownership.run, ownership.epoch)
            run = f"run-{ownership.run}"
            settings = ExecutorSettings(
                checkpoints=self._folder("saved"),
                recovery=recovery / run,
                scratch=scratch / f"{run}-epoch-{ownership.epoch}",
                run=ownership.run,
                trainer_epoch=ownership.epoch,
            )
            executor = self._load_base(job, settings)
            return ServedModels(
                executor,
                RecoveryCheckpoints(recovery / run, ownership.epoch),
                fetch_body=self._fetch,
                names=(base, job.model.path),
                stall_s=options.stall_s,
            )

        limit_s = min(STALLS * options.stall_s, LOAD_SHARE * engine.collection.boot_s)
        models = await in_thread(Kind.LOAD, "loading the model", load, limit_s=limit_s)
        reached(Point.TRAINER_MODEL_LOADED)
        return models

    def _folder(self, what: str) -> Path:
        return self._options.folder / what / self._bus.subjects.hive / self._options.engine

    # ---- serving --------------------------------------------------------------------------------------------------

    async def _serve(self, models: ServedModels) -> None:
        """Do one thing: write a recovery checkpoint that is due, execute the next operation, or wait for one."""
        ownership = self._ownership
        ownership.check()
        await self._reports.until_resumed()
        if ownership.engine.rest_wanted:
            return
        clients = ownership.engine.clients
        if models.is_gone(clients.models):
            models.forget_ended(clients.models)
            self._suspended = {name: due_s for name, due_s in self._suspended.items() if models.holds(name)}
            self._lived_through = set(filter(models.holds, self._lived_through))
            self._said = {name: why for name, why in self._said.items() if models.holds(name)}
            await models.remove_old_checkpoints(clients.open_models)
        await self._remove_weights(models)
        now_s = perf_counter()
        due_s, name = self._next_checkpoint(models)
        if name and due_s <= now_s:
            await self._write_checkpoint(models, name)
            return
        again_s, away = min(((each_s, each) for each, each_s in self._suspended.items()), default=(inf, ""))
        if again_s <= now_s and not self._has_tried:
            self._has_tried = True  # execute an operation before the next attempt, which may take long
            model = clients.models[away]
            await self._say_whether_away(model, await self._try_again(models, model))
            return
        self._has_tried = False
        found = self._next(clients)
        if found is not None:
            await self._execute(models, *found)
            return
        until_s = min(due_s if name else inf, again_s)
        try:
            limit_s = None if until_s == inf else max(0.0, until_s - now_s)
            await ownership.wait(lambda engine: self._has_work(models, engine), limit_s)
        except TimeoutError:
            log.debug("run %d: a recovery checkpoint is due, or it is time to retry rebuilding a model", ownership.run)

    def _next(self, clients: TrainingClients) -> tuple[ClientModel, Queued] | None:
        """Return the next operation. For a suspended model, only an end requested by its client can be executed."""
        there = [model for model in clients.open_models if model.name not in self._suspended]
        found = self._turns.take(there)
        if found is not None:
            return found
        return next(self._ends(clients), None)

    def _ends(self, clients: TrainingClients) -> Iterator[tuple[ClientModel, Queued]]:
        away = (model for model in clients.open_models if model.name in self._suspended and model.waiting)
        yield from ((model, each) for model in away for each in model.operations.values() if _is_clients_end(each))

    def _has_work(self, models: ServedModels, engine: EngineState) -> bool:
        clients = engine.clients
        gone = models.is_gone(clients.models) or bool(self._removable(models))
        waits = any(model.waiting and model.name not in self._suspended for model in clients.open_models)
        return (
            waits or any(self._ends(clients)) or gone or bool(engine.suspended) or engine.rest_wanted or engine.asleep
        )

    async def _remove_weights(self, models: ServedModels) -> None:
        """Remove the checkpoints that the log has removed, unless there is a new one of the same name.

        A checkpoint that a model has loaded is kept until a recovery checkpoint of the model is on the log.
        """
        kept = self._ownership.engine.clients.kept
        for name in self._removable(models):
            self._ownership.removed.discard(name)
            if name not in kept:
                remove = partial(models.executor.remove_checkpoint, name)
                await in_thread(Kind.REMOVAL, f"removing the checkpoint {name}", remove)

    def _removable(self, models: ServedModels) -> list[str]:
        """Return the checkpoints that can be removed now."""
        return sorted(each for each in self._ownership.removed if not models.needs_checkpoint(each))

    def _next_checkpoint(self, models: ServedModels) -> tuple[float, str]:
        """Return when the first recovery checkpoint is due, and for which model ("" if none is due)."""
        engine, options = self._ownership.engine, self._options
        away = sum(model.held_bytes for model in engine.clients.open_models if model.name in self._suspended)
        limits = engine.collection.operations
        room = max(limits.bodies_bytes_max - away, bodies_share(limits))  # bytes of suspended models cannot be freed
        full = engine.clients.held_bytes - away > FULL_SHARE * room
        found = []
        for name, clock in models.due_for_checkpoints():
            due_s = 0.0 if full else clock.due_s(options.checkpoint_s, options.checkpoint_bytes)
            if due_s is not None:
                found.append((max(due_s, self._checkpoint_pause_until_s), name))
        return min(found, default=(0.0, ""))

    async def _execute(self, models: ServedModels, model: ClientModel, queued: Queued) -> None:
        """Execute an operation, and publish its result. Until the result is on the log, the operation may be
        re-executed."""
        ownership = self._ownership
        reached(Point.OPERATION_FOUND)
        operation = await models.read(queued)
        reached(Point.OPERATION_READ)
        ownership.check()  # a superseded trainer must not write checkpoints
        limit = ownership.engine.collection.operations.executions_max
        is_away = model.name in self._suspended
        if is_away:
            result: Result = _without_model(operation, model)
        elif queued.begun_before(ownership.epoch) < limit:
            await self._say_begun(model, queued)
            result = await models.execute(model, queued, operation, ownership.removed)
        else:
            result = models.give_up(model, queued, operation)
        reached(Point.OPERATION_EXECUTED)
        result, body = encoded(models.executor, model.name, operation, result)
        there = models.executor.models
        done = partial(
            OperationDone,
            model=model.name,
            number=queued.number,
            key=queued.key,
            failed=isinstance(result, Failed),
            closes=isinstance(result, ModelEnded) and model.name not in there,
            step=there.get(model.name, model.step),
            metrics=metrics_of(result),
            made=shape_of(result),
            saved=saved_by(operation, result),
            by_server=isinstance(result, Failed) and result.category is Category.SERVER,
            loaded=loaded_by(result),
        )
        await self._publish(model, queued, body, done)
        await ownership.wait(partial(_is_settled, model=model, queued=queued))
        reached(Point.OPERATION_SEEN)
        if not is_away and not models.note(model, queued, operation, result):
            now = ownership.engine.clients.models.get(model.name)
            if now is not None and now.closed is None:
                rebuild = self._rebuild(now)
                await models.make_again(now, rebuild)
                await rebuild.over()

    async def _say_begun(self, model: ClientModel, queued: Queued) -> None:
        """Announce on the log that an operation begins, if it may be the one that ended the previous trainer.

        Only the first operation of each model can be that one, since the model's later operations were still waiting.
        """
        if model.name in self._begun:
            return
        self._begun.add(model.name)
        ownership = self._ownership
        begins = OperationBegins(
            **ownership.head(f"begins-{next(self._facts)}"), model=model.name, number=queued.number, key=queued.key
        )
        await ownership.send(begins)

    async def _publish(
        self, model: ClientModel, queued: Queued, body: bytes, done: Callable[..., OperationDone]
    ) -> None:
        """Store a result and publish it, retrying until the operation is settled.

        Each attempt stores the result again, since the stored copy may have expired.
        """
        ownership = self._ownership
        subject = self._bus.subjects.operation(self._options.engine, model.name)
        while not _is_settled(ownership.engine, model, queued):
            ref = await self._when_back(lambda: self._parts.store(subject, body))
            reached(Point.OPERATION_STORED)
            try:
                await self._bus.inbox.request(done(**ownership.head(f"operation-{next(self._facts)}"), result=ref))
            except BusUnavailable as error:
                log.warning("a result of model %s is waiting for the bus: %s", model.name, error)
                await ownership.pause(self._options.retry_s)
            except Refused as refused:
                log.info("a result of model %s was refused: %s", model.name, refused.why)
                if refused.code is not Code.BODY_GONE:
                    await ownership.pause(self._options.retry_s)  # until this trainer has read that the run is over
            else:
                break
        reached(Point.OPERATION_SAID)

    async def _write_checkpoint(self, models: ServedModels, name: str) -> None:
        """Write a model's recovery checkpoint, publish it, and remove older ones. If writing it fails, retry later."""
        ownership = self._ownership
        reached(Point.MODEL_CHECKPOINT_BEGUN)
        try:
            number, folder, digest = await models.write_checkpoint(name)
        except OSError as error:
            log.warning(
                "the recovery checkpoint of model %s could not be written, and will be retried: %s", name, error
            )
            self._checkpoint_pause_until_s = perf_counter() + self._options.retry_s_max
            return
        reached(Point.MODEL_CHECKPOINT_WRITTEN)
        written = CheckpointWritten(
            **ownership.head(f"model-checkpoint-{next(self._facts)}"),
            model=name,
            number=number,
            folder=folder,
            digest=digest,
        )
        await ownership.say(
            written, partial(_is_checkpointed, name=name, number=number), Point.MODEL_CHECKPOINT_PUBLISHED
        )
        reached(Point.MODEL_CHECKPOINT_SEEN)
        await models.remove_old_checkpoints(ownership.engine.clients.open_models)
        reached(Point.MODEL_CHECKPOINT_PRUNED)

    # ---- the bus --------------------------------------------------------------------------------------------------

    async def _fetch(self, ref: BodyRef) -> bytes:
        return await self._when_back(lambda: self._parts.fetch(ref))

    async def _when_back(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Retry until the bus answers, however long that takes. Raises `RunOver` if the run ends first."""
        ownership = self._ownership
        while True:
            try:
                return await attempt()
            except BusUnavailable as error:
                log.warning("run %d is waiting for the bus: %s", ownership.run, error)
            await ownership.pause(self._options.retry_s)


def _is_clients_end(queued: Queued) -> bool:
    return queued.waits and queued.op == END and queued.body is not None


def _without_model(operation: Operation, model: ClientModel) -> Result:
    """Return the result of ending a model that cannot be rebuilt, and so cannot be saved either."""
    if isinstance(operation, EndModel) and not operation.save_as:
        return ModelEnded()
    why = f"the model cannot be saved, because it cannot be rebuilt now: {model.suspended}"
    return Failed(error=f"{why}. Wait until it can be, or end it without saving it", category=Category.SERVER)


def _is_settled(engine: EngineState, model: ClientModel, queued: Queued) -> bool:
    """Return whether an operation no longer waits, because it has its result or its model has ended."""
    now = engine.clients.models.get(model.name)
    if now is None or now.closed is not None or now.begun != model.begun:
        return True
    operation = now.operations.get(queued.key)
    return operation is None or not operation.waits


def _is_known(engine: EngineState, model: ClientModel, waits: bool) -> bool:
    """Return whether the log says that a model is suspended (if `waits`) or that it continues (if not)."""
    now = engine.clients.models.get(model.name)
    return now is None or now.closed is not None or now.begun != model.begun or bool(now.suspended) == waits


def _is_checkpointed(engine: EngineState, name: str, number: int) -> bool:
    model = engine.clients.models.get(name)
    return model is None or model.closed is not None or model.checkpointed >= number
