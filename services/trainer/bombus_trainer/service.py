"""The trainer on the bus: follows the log, makes each outstanding step once, and publishes the outcome (R11)."""

import asyncio
import logging
import secrets
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import NoReturn

import msgspec
from torch import AcceleratorError

from bombus import telemetry
from bombus.bus import Blobs, Bus, ServerRefused
from bombus.bus.large.parts import Parts
from bombus.datums.differences import BYTES_MAX, StepDifferences, object_name
from bombus.datums.reading import BusCallReader
from bombus.errors import BusUnavailable
from bombus.faults import Point, reached
from bombus.hive.events import BatchReady, TrainerRegistered, WeightsReady
from bombus.hive.fates import Fate
from bombus.hive.inbox import GiveUpGroups, LostGroup, StepBroke, StepDone, WeightsSaved
from bombus.hive.state import EngineState, Phase
from bombus.hive.steps import checkpoints, is_due, steps_after
from bombus.hive.trajectories.training import checkpoint_folder
from bombus.machine.metrics import metrics_server
from bombus.private import private_folder
from bombus.telemetry import TraceSpan
from bombus_trainer import loading
from bombus_trainer.backend import BaseLoader, Loader, TrainerBackend
from bombus_trainer.backends.torch.metrics import LEFT_OUT
from bombus_trainer.data.fates import StepAccount
from bombus_trainer.data.reading import ReadBatch, read_batch
from bombus_trainer.data.rollout_groups import read_rollout_groups
from bombus_trainer.data.samples import Origin
from bombus_trainer.loading import load_backend, pack_tokenizer
from bombus_trainer.machine import this_machine
from bombus_trainer.metrics import TrainerMetrics
from bombus_trainer.operations.serving.server import OperationServer
from bombus_trainer.options import TrainerOptions
from bombus_trainer.ownership import RunOver, RunOwnership
from bombus_trainer.publish.directories import remove_others
from bombus_trainer.publish.export import ModelPart, digest_like
from bombus_trainer.publish.step_checkpoint import StepFacts
from bombus_trainer.recovery.faults import lacks_room
from bombus_trainer.recovery.progress import STALLS, Kind, advanced, in_thread, watch_here
from bombus_trainer.recovery.reports import FailedAttempts, RunReports, check_lost, reason_of
from bombus_trainer.recovery.restoring import restore_newest
from bombus_trainer.recovery.watch import Watch
from bombus_trainer.replay.debug_rollouts import DebugRollouts, allowed_template
from bombus_trainer.replay.retraining import read_whole
from bombus_trainer.versions import Versions

log = logging.getLogger(__name__)

LOAD_SHARE = 0.75  # largest share of the time allowed for booting that a load may take
NO_CHECKPOINT = ("", "")
MADE_AGAIN, DIFFERS = "steps_made_again", "made_again_differs"  # metrics of the first step after a crash
NONFINITE_STEPS = "nonfinite_steps"  # metric: how many consecutive steps, up to this one, skipped an update


class Trainer:
    """Trains one engine's runs, one after the other, until cancelled.

    Everything that it needs to continue after a crash is on the log, or in the checkpoint that the log names.
    """

    def __init__(
        self,
        bus: Bus,
        options: TrainerOptions,
        name: str = "",
        load: Loader | None = None,
        load_base: BaseLoader | None = None,
    ) -> None:
        """Initialize with `load`, which loads a job, and `load_base`, which loads the base of training operations.

        By default, both load into this process.
        """
        self._load_backend = load or (lambda job: load_backend(job, options))
        self._load_base = load_base or (lambda job, executor: loading.load_base(job, options, executor))
        self.metrics = TrainerMetrics(options.engine)
        self.name = name or f"trainer-{secrets.token_hex(4)}"
        self._bus = bus
        self._options = options
        self._ownership = RunOwnership(bus, options, self.name)
        self._reports = RunReports(options, self._ownership)
        self._attempt = 0
        self._tokenizer = ""
        self._waited_s = 0.0  # how long this trainer waited for the newest batch
        self._restored = 0  # the step of the checkpoint from which the model was loaded
        self._made_again: dict[str, float] = {}  # metrics about steps retrained from there, for the next step to report
        self._debug: DebugRollouts | None = None
        self._watch = Watch(bus, options, self._ownership)

    async def run(self) -> None:
        watch_here(self._watch.works)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._ownership.follow())
                tasks.create_task(self._watch.run())
                tasks.create_task(self._serve())
        finally:
            self._ownership.over.set()

    async def _serve(self) -> None:
        ownership = self._ownership
        await ownership.caught_up()
        while True:
            if ownership.engine.phase == Phase.OFFLINE:
                log.info("waiting for a job: engine %s is offline until it is started", self._options.engine)
            await ownership.next_run()
            while ownership.is_running():
                try:
                    await self._train_run()
                except RunOver:
                    log.info("run %d has ended for %s", ownership.run, self.name)
                await ownership.stand_aside()

    # ---- a run ------------------------------------------------------------------------------------------------

    async def _train_run(self) -> None:
        """Load the model, publish missing weights, and make outstanding steps; start over after a failure.

        An operations run is served by an `OperationServer` until it ends.
        """
        ownership = self._ownership
        await ownership.open()
        if ownership.engine.serves_operations:
            await OperationServer(self._bus, self._options, ownership, self._reports, self._load_base).run()
        root = self._directory("weights")
        async with Versions(self._bus, self._options, root, ownership.run, ownership.epoch) as versions:
            await self._make_steps(versions)

    async def _make_steps(self, versions: Versions) -> NoReturn:
        """Make outstanding steps until the run has ended. After a failure, reload the model."""
        executor: TrainerBackend | None = None
        failed = FailedAttempts()
        while True:
            try:
                executor = executor or await self._boot(versions)
                await self._publish_missing_weights(executor, versions)
                await self._check_finite()
                await self._next_batch()
                with self.metrics.in_flight.track_inprogress():
                    await self._step(executor, self._outstanding())
                failed.clear()
                continue
            except Exception as error:  # out of memory, a full disk or a bug; counted, to give up in the end
                if self._reports.counts(error, failed):
                    await self._report_failure(error, failed.failures)
                    check_lost(error)
            executor = None  # free its memory for the next one
            await self._reports.pause(failed)

    async def _next_batch(self) -> None:
        start = perf_counter()
        await self._ownership.wait(lambda engine: engine.batch is not None)
        self._waited_s = perf_counter() - start

    async def _check_finite(self) -> None:
        """Suspend the run if too many consecutive steps, up to the newest on the log, had non-finite updates."""
        bad = int(_metrics_before(self._ownership.engine).get(NONFINITE_STEPS, 0))
        if bad >= self._ownership.job.trainer.max_nonfinite_steps:
            await self._reports.suspend(
                f"losses or gradients of the last {bad} steps were not finite, and these updates were left out. Look "
                "for extreme rewards with `bombus replay batch`, fix them and resume the run; or stop it, and start "
                "it with a lower trainer.lr (trainer.max_nonfinite_steps says how many such steps in a row are allowed)"
            )
            await self._reports.until_resumed()

    def _outstanding(self) -> BatchReady:
        batch = self._ownership.engine.batch
        if batch is None:
            raise RunOver
        return batch

    async def _boot(self, versions: Versions) -> TrainerBackend:
        """Load the model, publish its tokenizer, and retrain the steps after the checkpoint."""
        executor = await self._reports.booted(
            lambda: self._load_and_check(versions), has_loaded=lambda: self._ownership.engine.version >= 0
        )
        await self._catch_up(executor)
        return executor

    async def _load_and_check(self, versions: Versions) -> TrainerBackend:
        executor = await self._load()
        await versions.check(executor)
        reached(Point.TRAINER_MODEL_LOADED)
        await self._publish_tokenizer(executor)
        reached(Point.TRAINER_TOKENIZER_STORED)
        return executor

    async def _load(self) -> TrainerBackend:
        """Load the model from the newest checkpoint that can be read."""
        engine, job, options = self._ownership.engine, self._ownership.job, self._options
        wanted = job.trainer.save_debug_rollout_data
        template = wanted and allowed_template(wanted, self._directory("rollouts"), options.debug_root)

        def load() -> tuple[TrainerBackend, int]:
            reached(Point.TRAINER_MODEL_LOADING)
            executor = self._load_backend(job)
            advanced("loaded")
            return executor, restore_newest(executor, engine)

        limit_s = min(STALLS * options.stall_s, LOAD_SHARE * engine.collection.boot_s)
        executor, self._restored = await in_thread(Kind.LOAD, "loading the model", load, limit_s)
        self._debug = DebugRollouts(template, executor) if template else None
        return executor

    async def _catch_up(self, executor: TrainerBackend) -> None:
        """Retrain the steps after the checkpoint, up to the newest on the log, and compare the newest step's weights
        with the log."""
        ownership = self._ownership
        engine, over = ownership.engine, ownership.over
        newest = 0 if engine.step_done is None else engine.step_done.step
        self._made_again = {}
        for step in steps_after(engine.steps, self._restored, newest) or ():
            number, recorded = step.batch.step, step.done.metrics if step.done is not None else {}
            log.warning("step %d is retrained, from the checkpoint of step %d", number, self._restored)
            await self._reports.stage(f"retraining step {number}", f"again-{number}")
            groups = read_whole(await self._read(executor, step.batch), step.batch, recorded)
            again = partial(executor.train_step, groups, number, over.is_set)
            await in_thread(Kind.STEP, f"retraining step {number}", again)
            reached(Point.TRAINER_STEP_MADE_AGAIN)
            self._made_again[MADE_AGAIN] = self._made_again.get(MADE_AGAIN, 0.0) + 1.0
            if engine.weights is not None and engine.weights.version == number:
                digest = partial(digest_like, executor, engine.weights.weights)
                same = await in_thread(Kind.WEIGHTS, f"the digest of version {number}", digest)
                self._compare(engine.weights, same)

    def _compare(self, ready: WeightsReady, sha256: str) -> None:
        """Record whether a retrained step's weights differ from those on the log."""
        differs = sha256 != ready.weights.sha256
        self._made_again[DIFFERS] = float(differs)
        if differs:
            log.error(
                "retraining step %d gave different weights from version %d in the log (sha256 %s and %s): either sums "
                "were computed in another order (another machine, other --threads), or kernels are not deterministic",
                *(ready.version, ready.version, sha256, ready.weights.sha256),
            )

    async def _publish_tokenizer(self, executor: TrainerBackend) -> None:
        name, blob = pack_tokenizer(executor.files)
        ready = self._ownership.engine.weights
        if ready is None or ready.weights.tokenizer != name:
            await Blobs(self._bus).put(name, blob)
        self._tokenizer = name

    async def _publish_missing_weights(self, executor: TrainerBackend, versions: Versions) -> None:
        """Publish version 0, or the version of a completed step, if its weights never reached the log."""
        engine = self._ownership.engine
        newest = 0 if engine.step_done is None else engine.step_done.step
        if engine.version < newest:
            await self._reports.stage("writing the first weights", "first-weights")
            await self._publish_weights(executor, newest, versions)
        else:
            await versions.recall(executor, engine.weights)

    async def _publish_weights(self, executor: TrainerBackend, version: int, versions: Versions) -> None:
        ownership = self._ownership
        weights = await versions.publish(executor, version, self._tokenizer, ownership.engine.weights)
        canary = None
        if ownership.job.trainer.canary:
            part = ModelPart.MODEL if weights.adapter_of is None else ModelPart.ADAPTER
            canary = await in_thread(Kind.WEIGHTS, f"the canary of version {version}", partial(executor.canary, part))
        saved = WeightsSaved(**ownership.head(f"weights-{version}"), step=version, weights=weights, canary=canary)
        await ownership.say(saved, lambda engine: engine.version >= version, Point.TRAINER_WEIGHTS_SAID)
        reached(Point.TRAINER_WEIGHTS_SEEN)
        await versions.prune((ownership.engine.weights, ownership.engine.weights_before))
        reached(Point.TRAINER_WEIGHTS_PRUNED)

    # ---- a step -----------------------------------------------------------------------------------------------

    async def _step(self, executor: TrainerBackend, batch: BatchReady) -> None:
        """Make one attempt: train, save a checkpoint if due, and report it. After an error, the step may be retried."""
        self._attempt += 1
        ownership = self._ownership
        reached(Point.TRAINER_BATCH_FOUND)
        about: telemetry.Attributes = {"bombus.engine": self._options.engine, "bombus.step": batch.step}
        with telemetry.span("trainer.step", ownership.batch_trace, about, "CONSUMER") as span:
            metrics, account = await self._train(executor, batch, span)
            reached(Point.TRAINER_STEP_TRAINED)
            due = is_due(ownership.engine.steps, batch.step, self._checkpoint_every(executor))
            path, digest = await self._checkpoint(executor, batch, metrics) if due else NO_CHECKPOINT
            done = StepDone(
                **ownership.head(f"step-{batch.step}-{self._attempt}"),
                step=batch.step,
                checkpoint=path,
                checkpoint_digest=digest,
                metrics=metrics,
                tokens=account.tokens,
            )
            is_done = partial(_has_made, step=batch.step)
            await ownership.say(done, is_done, Point.TRAINER_STEP_SAID)
            reached(Point.TRAINER_STEP_SEEN)
            await self._keep_differences(batch.step, account.differences)
            self.metrics.made(metrics)
            self._made_again = {}
            engine = ownership.engine
            named = [done.checkpoint for done in (*engine.kept, *checkpoints(engine.steps))]
            remove = partial(remove_others, self._checkpoints(), named, ownership.epoch)
            await in_thread(Kind.REMOVAL, "removing old checkpoints", remove)
            reached(Point.TRAINER_CHECKPOINTS_PRUNED)
        shown = [f"{name} {metrics[name]:.4g}" for name in ("reward_mean", "loss") if name in metrics]
        log.info("step %d: %s", batch.step, ", ".join(shown) or "nothing to train on")

    async def _train(
        self, executor: TrainerBackend, batch: BatchReady, span: TraceSpan
    ) -> tuple[dict[str, float], StepAccount]:
        start = perf_counter()
        read = await self._read(executor, batch)
        span.link(call.trace for group in read.groups for episode in group.episodes for call in episode.records)
        read_s = perf_counter() - start
        reached(Point.TRAINER_BATCH_READ)
        for episode, why in read.lost.items():
            what = "group" if batch.taken else "episode"
            log.error("%s %s is left out of step %d: %s", what, episode, batch.step, why)
        if read.gone:
            await self._give_up(batch, read)
        for episode, age in read.stale.items():
            log.error("episode %s is left out of step %d: it is %d versions old", episode, batch.step, age)
        groups, interrupted = list(read.groups), self._ownership.over.is_set
        accounts: list[StepAccount] = []
        train = partial(executor.train_step, groups, batch.step, interrupted, accounts.append)
        metrics = await in_thread(Kind.STEP, f"step {batch.step}", train)
        metrics[NONFINITE_STEPS] = nonfinite_steps(metrics, _metrics_before(self._ownership.engine))
        metrics |= self._made_again
        metrics["episodes_left_out"] += len(read.lost) + len(read.stale)
        metrics["seconds_read"] = read_s
        metrics["seconds_waited"] = self._waited_s
        if self._debug is not None:
            origin, debug = Origin(self._options.engine, self._ownership.run, batch.step), self._debug
            metrics |= await in_thread(Kind.SAMPLES, "writing samples", lambda: debug.save(origin, groups))
        left_out = dict.fromkeys(read.lost, Fate.DROPPED_UNREADABLE) | dict.fromkeys(read.stale, Fate.DROPPED_STALE)
        tokens, differences = accounts[0]
        return metrics, StepAccount(msgspec.structs.replace(tokens, left_out=tokens.left_out | left_out), differences)

    async def _read(self, executor: TrainerBackend, batch: BatchReady) -> ReadBatch:
        """Read the calls, or the rollout groups, of a batch. Raises `BusUnavailable`."""
        engine = self._ownership.engine
        if batch.taken:
            bodies = Parts(self._bus, self._bus.subjects.trajectories_stream)
            registered = engine.trajectories.trainer
            tokens_max = 0 if registered is None else registered.max_token_len
            return await read_rollout_groups(bodies, batch.rollout_groups, batch.step, tokens_max)
        auxiliary_calls = executor.settings.job.rollout.trains_auxiliary_calls
        max_staleness = engine.collection.trained_staleness
        return await read_batch(BusCallReader(self._bus), batch, max_staleness, auxiliary_calls=auxiliary_calls)

    async def _give_up(self, batch: BatchReady, read: ReadBatch) -> None:
        """Report which rollout groups of a batch are lost, so that retraining this step leaves them out too."""
        lost = tuple(
            LostGroup(number, group.body.first)
            for place, (number, group) in enumerate(zip(batch.taken, batch.rollout_groups, strict=True))
            if place in read.gone and group.body is not None
        )
        message = GiveUpGroups(
            id=self._ownership.id(f"lost-{batch.step}-{self._attempt}"),
            engine=self._options.engine,
            run=self._ownership.run,
            number=batch.step,
            groups=lost,
            why=read.lost[f"{batch.step}.{read.gone[-1]}"],
        )
        await self._ownership.send(message)

    async def _checkpoint(
        self, executor: TrainerBackend, batch: BatchReady, metrics: dict[str, float]
    ) -> tuple[str, str]:
        """Save a checkpoint. Return its path and its digest."""
        facts = StepFacts(
            engine=self._options.engine,
            run=self._ownership.run,
            step=batch.step,
            trainer_epoch=self._ownership.epoch,
            attempt=self._attempt,
            config_digest=batch.config_digest,
            metrics=metrics,
            machine=this_machine(self._options.device),
        )
        save = partial(executor.save, self._checkpoints(), facts)
        saved = await in_thread(Kind.CHECKPOINT, f"the checkpoint of step {batch.step}", save)
        return str(saved.path), saved.digest

    async def _keep_differences(self, step: int, episodes: dict[str, bytes]) -> None:
        """Store by how much the step's logprobs differ from the sampler's. They are for people to look at: a bus that
        has no room for them does not stop the run."""
        if sum(map(len, episodes.values())) > BYTES_MAX:
            return
        body = msgspec.msgpack.encode(StepDifferences(run=self._ownership.run, step=step, episodes=episodes))
        try:
            await Blobs(self._bus).put(object_name(self._options.engine, step), body)
        except (BusUnavailable, ServerRefused) as error:
            log.warning("the differences of step %d from the sampler are not stored: %s", step, error)

    # ---- failures ---------------------------------------------------------------------------------------------

    async def _report_failure(self, error: Exception, failures: int) -> None:
        """Report a failed step, which the coordinator counts. If no step was under way, suspend the run if failures
        persist."""
        ownership = self._ownership
        batch = ownership.engine.batch
        waits = lacks_room(error)
        if batch is None:
            is_over = isinstance(error, AcceleratorError) or failures >= ownership.engine.collection.max_step_failures
            if is_over and not waits:
                await self._reports.suspend(reason_of(error))
            return
        before = _counts(ownership.engine)
        broke = StepBroke(
            **ownership.head(f"broke-{batch.step}-{secrets.token_hex(4)}"),
            step=batch.step,
            reason=reason_of(error),
            waits=waits,
        )
        if waits:
            await ownership.send(broke)
        else:
            await ownership.say(broke, lambda engine: _counts(engine) != before)

    def _checkpoint_every(self, executor: TrainerBackend) -> int:
        """Return the number of steps between checkpoints, as registered for rollout groups or as set by the job."""
        registered = self._registered()
        interval = 0 if registered is None else registered.save_checkpoint_interval
        return interval if interval > 0 else executor.settings.config.checkpoint_every

    def _checkpoints(self) -> Path:
        return self._directory("checkpoints") / checkpoint_folder(self._registered())

    def _registered(self) -> TrainerRegistered | None:
        """Return this trainer's registration for batches of rollout groups, or None if it does not train on them."""
        engine = self._ownership.engine
        return engine.trajectories.trainer if engine.makes_steps else None

    def _directory(self, what: str) -> Path:
        hive = self._bus.subjects.hive
        return self._options.folder / what / hive / self._options.engine / f"run-{self._ownership.run}"


def nonfinite_steps(metrics: Mapping[str, float], before: Mapping[str, float]) -> float:
    """Return how many consecutive steps have skipped updates, given the metrics of a step and of the step before it."""
    left_out = metrics[LEFT_OUT]
    if not left_out:
        return 0.0
    log.warning("%d updates were left out: their losses or gradients are not finite", left_out)
    return before.get(NONFINITE_STEPS, 0.0) + 1.0


def _metrics_before(engine: EngineState) -> Mapping[str, float]:
    """Return the metrics of the newest step, or none if the run was resumed since then, so that counts start over."""
    done = engine.step_done
    return {} if done is None or done.at_ns <= engine.resumed_ns else done.metrics


def _has_made(engine: EngineState, step: int) -> bool:
    return engine.step_done is not None and engine.step_done.step >= step


def _counts(engine: EngineState) -> tuple[int, int]:
    """Return the counts of failed steps and of suspensions. A failed step changes one of the two, even if the run has
    been suspended and resumed since."""
    return engine.step_failures, engine.suspensions


async def run(
    url: str,
    hive: str,
    options: TrainerOptions,
    load: Loader | None = None,
    load_base: BaseLoader | None = None,
) -> None:
    """Train an engine's runs until cancelled."""
    telemetry.configure("trainer")
    private_folder(options.folder)
    async with await Bus.connect(url, hive, name=f"trainer-{options.engine}") as bus:
        await bus.until_streams_exist()
        trainer = Trainer(bus, options, load=load, load_base=load_base)
        async with metrics_server(bus, options, trainer.metrics.exposed):
            await trainer.run()
