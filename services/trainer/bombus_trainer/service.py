"""The trainer on the bus: follows the log, makes each outstanding step once, and says what came of it (R11)."""

import asyncio
import logging
import secrets
import threading
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from time import perf_counter
from typing import NoReturn, TypeVar

import msgspec

from bombus import telemetry
from bombus.bus import Bus
from bombus.errors import BombusError, BusUnavailable, EngineFault, Refused
from bombus.events import AnyEvent, BatchReady
from bombus.follow import Follower
from bombus.inbox import EngineBroke, Message, StageReached, StepBroke, StepDone, TrainerOpens, WeightsSaved
from bombus.models import resolve_model
from bombus.run_config import RunConfig
from bombus.state import EngineState, Phase
from bombus_trainer import checkpoint, export
from bombus_trainer.checkpoint import Facts
from bombus_trainer.executor import Executor, Interrupted
from bombus_trainer.options import TrainerOptions
from bombus_trainer.reading import read_batch
from bombus_trainer.settings import TrainerSettings

log = logging.getLogger(__name__)

ANSWER_S = 30.0
REASON_CHARS_MAX = 2000
T = TypeVar("T")


class RunOver(Exception):
    """The run was stopped, has failed, or another trainer has opened it."""


class Trainer:
    """Trains one engine's runs, one after the other, until cancelled.

    Everything that it needs to go on after a crash is on the log or in the checkpoint that the log names.
    """

    def __init__(self, bus: Bus, options: TrainerOptions, name: str = "") -> None:
        self.name = name or f"trainer-{secrets.token_hex(4)}"
        self._bus = bus
        self._options = options
        self._follower = Follower(bus, self._on_event)
        self._batch_trace = ""  # of the end that completed the newest batch
        self._run = 0  # the run that is, or was last, ours
        self._opened = False
        self._over = threading.Event()  # read by the training thread between micro-batches
        self._attempt = 0
        self._tokenizer = ""

    async def run(self) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._follower.run())
                tasks.create_task(self._serve())
        finally:
            self._over.set()

    async def _serve(self) -> None:
        await self._follower.caught_up()
        while True:
            await self._follower.wait_for(lambda _: self._has_work())
            self._run, self._opened = self._engine.run, False
            self._over.clear()
            try:
                await self._train_run()
            except RunOver:
                log.info("run %d is over for %s", self._run, self.name)

    # ---- what the log says ------------------------------------------------------------------------------------

    @property
    def _engine(self) -> EngineState:
        return self._follower.hive.engine(self._options.engine)

    def _has_work(self) -> bool:
        return self._engine.phase != Phase.OFFLINE and self._engine.run > self._run

    def _is_over(self) -> bool:
        """Until we have opened the run, somebody else's name on it means nothing."""
        engine = self._engine
        ours = engine.trainer == self.name or not self._opened
        return engine.run != self._run or engine.phase == Phase.OFFLINE or not ours

    def _on_event(self, _position: int, event: AnyEvent) -> None:
        if isinstance(event, BatchReady):
            self._batch_trace = self._follower.traceparent
        if self._is_over():
            self._over.set()

    async def _wait(self, holds: Callable[[EngineState], bool], timeout_s: float | None = None) -> None:
        """Until the fold says so. Raises `RunOver` when the run ends before, `TimeoutError`."""
        await self._follower.wait_for(lambda _: self._is_over() or holds(self._engine), timeout_s)
        if self._is_over():
            raise RunOver

    async def _pause(self, seconds: float) -> None:
        try:
            await self._wait(lambda _: False, seconds)
        except TimeoutError:
            pass

    # ---- what we say ------------------------------------------------------------------------------------------

    async def _say(self, fact: Message) -> None:
        """Put a fact into the inbox however long the bus is away, unless the run ends meanwhile."""
        while True:
            try:
                await self._bus.send(fact)
                return
            except BusUnavailable as error:
                log.warning("a fact waits for the bus: %s", error)
                await self._pause(self._options.retry_s)

    def _id(self, what: str) -> str:
        """The same fact has the same id, however often it is sent."""
        return f"{self._options.engine}-{self._run}-{self._engine.trainer_epoch}-{what}"

    async def _stage(self, stage: str) -> None:
        if self._engine.phase == Phase.BOOTING:
            message_id = f"{self.name}-{self._run}-{stage.replace(' ', '-')}"
            await self._say(StageReached(id=message_id, engine=self._options.engine, run=self._run, stage=stage))

    # ---- a run ------------------------------------------------------------------------------------------------

    async def _train_run(self) -> None:
        """Load, publish what the log lacks, make outstanding steps; after a failure all of it again, a little later."""
        await self._open()
        executor: Executor | None = None
        failures = 0
        while True:
            try:
                executor = executor or await self._boot()
                await self._publish_missing_weights(executor)
                await self._wait(lambda engine: engine.batch is not None)
                await self._step(executor, self._outstanding())
                failures = 0
                continue
            except Interrupted:
                raise RunOver from None
            except RunOver:
                raise
            except BusUnavailable as error:
                log.warning("run %d waits for the bus: %s", self._run, error)
            except Exception as error:  # out of memory, a full disk, a bug: counted, and in the end given up
                failures += 1
                log.exception("run %d: attempt %d failed", self._run, self._attempt)
                await self._report_failure(error, failures)
            executor = None  # whatever the attempt left in it is gone before its successor is loaded
            await self._pause(min(self._options.retry_s * 2.0 ** max(failures - 1, 0), self._options.retry_s_max))

    def _outstanding(self) -> BatchReady:
        batch = self._engine.batch
        if batch is None:
            raise RunOver
        return batch

    async def _open(self) -> None:
        """Become the run's trainer: facts of the one before us are ignored from here on."""
        opens = TrainerOpens(
            id=f"{self.name}-{self._run}", engine=self._options.engine, run=self._run, trainer=self.name
        )
        while True:
            try:
                answer = await self._bus.ask(opens, ANSWER_S)
                break
            except BusUnavailable as error:
                log.warning("opening run %d: %s", self._run, error)
                await self._pause(self._options.retry_s)
            except Refused as refused:
                log.info("run %d is not to be trained: %s", self._run, refused.why)
                raise RunOver from None
        await self._follower.wait_position(answer.position, ANSWER_S)
        self._opened = True
        if self._is_over():
            raise RunOver

    async def _boot(self) -> Executor:
        """The model, ready to be trained. One that cannot be loaded ends the run."""
        await self._stage("loading the model")
        try:
            executor = await self._load()
        except Exception as error:  # a stranger's model may fail in any way: the user is told which
            log.exception("run %d cannot be trained", self._run)
            await self._give_up(_reason(error))
        await self._publish_tokenizer(executor)
        return executor

    async def _publish_missing_weights(self, executor: Executor) -> None:
        """Version 0, or that of a step which was completed and whose weights never reached the log."""
        done = self._engine.step_done
        newest = 0 if done is None else done.step
        if self._engine.version < newest:
            await self._stage("writing the first weights")
            await self._publish_weights(executor, newest)

    async def _give_up(self, reason: str) -> NoReturn:
        broke = EngineBroke(id=self._id("gave-up"), engine=self._options.engine, run=self._run, reason=reason)
        await self._say(broke)
        await self._wait(lambda _: False)
        raise RunOver

    async def _load(self) -> Executor:
        """The model as the log's newest step left it."""
        engine = self._engine
        if engine.active is None:
            raise EngineFault("the engine runs without a configuration")
        job = RunConfig.from_json(engine.active.config)
        options = self._options
        settings = TrainerSettings.of_job(job, options.device, options.bin_tokens_max)
        dtype = "bfloat16" if job.model.dtype == "auto" else job.model.dtype
        done = engine.step_done

        def load() -> Executor:
            folder = resolve_model(
                job.model.path, dtype=dtype, seed=job.model.seed % 2**31, allow_download=options.allow_download
            )
            executor = Executor(folder, settings)
            if done is not None:
                executor.restore(checkpoint.load(Path(done.checkpoint), done.checkpoint_digest))
            return executor

        return await _in_thread(load)

    async def _publish_tokenizer(self, executor: Executor) -> None:
        blob = msgspec.msgpack.encode(dict(sorted(executor.files.items())))
        name = f"tokenizer-{sha256(blob).hexdigest()}"
        if self._engine.weights is None or self._engine.weights.weights.tokenizer != name:
            await self._bus.put_blob(name, blob)
        self._tokenizer = name

    async def _publish_weights(self, executor: Executor, version: int) -> None:
        root = self._place("weights")
        epoch = self._engine.trainer_epoch
        weights = await _in_thread(lambda: executor.export(root, version, epoch, self._tokenizer))
        saved = WeightsSaved(
            id=self._id(f"weights-{version}"),
            engine=self._options.engine,
            run=self._run,
            step=version,
            trainer_epoch=epoch,
            weights=weights,
        )
        await self._say(saved)
        await self._wait(lambda engine: engine.version >= version)
        named = [ready for ready in (self._engine.weights, self._engine.weights_before) if ready is not None]
        export.keep_only(root, [ready.weights.where for ready in named])

    # ---- a step -----------------------------------------------------------------------------------------------

    async def _step(self, executor: Executor, batch: BatchReady) -> None:
        """One attempt: read, train, checkpoint, say so. Whatever it raises, the step may be repeated."""
        self._attempt += 1
        before = self._engine.step_done
        epoch = self._engine.trainer_epoch
        with telemetry.span("trainer.step", self._batch_trace, engine=self._options.engine, step=batch.step):
            start = perf_counter()
            read = await read_batch(self._bus, batch)
            for episode, why in read.lost.items():
                log.error("episode %s is left out of step %d: %s", episode, batch.step, why)
            read_s = perf_counter() - start
            metrics = await _in_thread(lambda: executor.train_step(list(read.groups), batch.step, self._over.is_set))
            metrics["episodes_left_out"] += len(read.lost)
            metrics["seconds_read"] = read_s
            facts = Facts(
                engine=self._options.engine,
                run=self._run,
                step=batch.step,
                trainer_epoch=epoch,
                attempt=self._attempt,
                config_digest=batch.config_digest,
                metrics=metrics,
            )
            root = self._place("checkpoints")
            saved = await _in_thread(lambda: executor.save(root, facts))
            done = StepDone(
                id=self._id(f"step-{batch.step}-{self._attempt}"),
                engine=self._options.engine,
                run=self._run,
                step=batch.step,
                trainer_epoch=epoch,
                checkpoint=saved.path,
                checkpoint_digest=saved.digest,
                metrics=metrics,
            )
            await self._say(done)
            await self._wait(lambda engine: engine.step_done is not None and engine.step_done.step >= batch.step)
            checkpoint.keep_only(root, [saved.path, *([before.checkpoint] if before else [])])
        log.info("step %d: reward %.4g, loss %.4g", batch.step, metrics["reward_mean"], metrics["loss"])

    async def _report_failure(self, error: Exception, failures: int) -> None:
        """A failed step is counted by the coordinator; a failure outside of one (weights, say) by ourselves."""
        batch = self._engine.batch
        if batch is None:
            if failures >= self._engine.collection.max_step_failures:
                await self._give_up(_reason(error))
            return
        counted = self._engine.step_failures
        broke = StepBroke(
            id=self._id(f"broke-{batch.step}-{secrets.token_hex(4)}"),
            engine=self._options.engine,
            run=self._run,
            step=batch.step,
            trainer_epoch=self._engine.trainer_epoch,
            reason=_reason(error),
        )
        await self._say(broke)
        await self._wait(lambda engine: engine.step_failures > counted)

    def _place(self, what: str) -> Path:
        hive = self._bus.subjects.hive
        return self._options.folder / what / hive / self._options.engine / f"run-{self._run}"


async def _in_thread(work: Callable[[], T]) -> T:
    """So that the log is followed meanwhile: that is how a stop reaches a step."""
    return await asyncio.to_thread(work)


def _reason(error: Exception) -> str:
    """One sentence. Our own errors are written for people; of others the kind says most."""
    why = str(error) if isinstance(error, BombusError) else f"{type(error).__name__}: {error}"
    return why[:REASON_CHARS_MAX]


async def run(url: str, hive: str, options: TrainerOptions, name: str = "") -> None:
    """Train an engine's runs until cancelled."""
    telemetry.configure("trainer")
    async with await Bus.connect(url, hive, name=f"trainer-{options.engine}") as bus:
        await bus.ensure_streams()
        await Trainer(bus, options, name).run()
