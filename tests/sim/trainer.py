"""A trainer as in service.py: opens the run and makes each outstanding step. It may be killed anywhere or run twice."""

from collections.abc import Callable

from bombus.errors import BusUnavailable, LogCorrupted, Refused
from bombus.hive import inbox
from bombus.hive.events import BatchReady, Weights
from bombus.hive.records import digest
from bombus.hive.state import EngineState, Phase
from bombus.hive.steps import checkpoints, is_due, steps_after
from tests.sim.faults import Fault
from tests.sim.fold import RETRY_S, Follower
from tests.sim.gateway import read_record
from tests.sim.link import Link, Net
from tests.sim.loop import Process
from tests.sim.referee import ENGINE, LOADED, Checkpoint, Published, Referee, checkpoint_every, trained
from tests.sim.server import CALLS_STREAM
from tests.sim.variants import Variant

ANSWER_S = 15.0
BEAT_S = 2.0
PATIENCE_S = 8.0  # of the coordinator with its silence
HANGS_S = 3.0  # until a thread that hangs is noticed
RESTART_S = 0.5
LOOK_S = 1.0
LOADS_MAX = 2  # that fail in a row, before the run is suspended


class RunOver(Exception):
    """The run was stopped, has failed, or was opened by another trainer."""


class StepBroken(Exception):
    """A step failed, as from a lack of memory, a full disk or a bug."""


class LoadBroken(Exception):
    """The model could not be loaded, for a lack of memory or because a file system is away."""


class Trainer(Process):
    link: Link
    follower: Follower

    def __init__(self, name: str, net: Net, referee: Referee, variant: Variant | None) -> None:
        super().__init__(net.loop, name)
        self._net = net
        self._referee = referee
        self._variant = variant

    async def main(self) -> None:
        self.link = Link(self, self._net)
        self._id = self.link.token  # a different name in each life
        self.follower = Follower(self.link, self._on_event)
        self._run, self._epoch, self._opened, self._over, self._attempt = 0, 0, False, False, 0
        self.spawn(self.follower.run())
        self._beats = self._net.faults.rates[Fault.STOP] > 0  # without, it is as one of an older version
        if self._beats:
            self.spawn(self._beat())
        await self.follower.caught_up()
        while True:
            await self.follower.wait_for(lambda: self._engine.phase != Phase.OFFLINE and self._engine.run > self._run)
            self._run = self._engine.run
            while self._is_running():
                self._opened = self._over = False
                try:
                    await self._train_run()
                except RunOver:
                    pass
                await self.follower.wait_for(lambda: not self._is_running() or not self._engine.trainer)

    @property
    def _engine(self) -> EngineState:
        return self.follower.hive.engine(ENGINE)

    def _is_running(self) -> bool:
        return self._engine.run == self._run and self._engine.phase != Phase.OFFLINE

    def _is_over(self) -> bool:
        ours = self._engine.trainer_epoch == self._epoch or not self._opened
        return not self._is_running() or not ours

    def _on_event(self) -> None:
        self._over = self._over or self._is_over()

    async def _wait(self, holds: Callable[[EngineState], bool], timeout_s: float = 0.0) -> None:
        await self.follower.wait_for(lambda: self._is_over() or holds(self._engine), timeout_s)
        if self._is_over():
            raise RunOver

    async def _pause(self, seconds: float) -> None:
        try:
            await self._wait(lambda _: False, seconds)
        except TimeoutError:
            pass

    async def _send(self, fact: inbox.AnyMessage) -> None:
        while True:
            try:
                await self.link.send(fact)
                return
            except BusUnavailable:
                await self._pause(RETRY_S)

    async def _say(self, fact: inbox.AnyMessage, shows: Callable[[EngineState], bool]) -> None:
        """Put a fact into the inbox and wait until the log shows it, as `RunOwnership.say` does."""
        while True:
            restarts = self._net.restarts
            await self._send(fact)
            while restarts == self._net.restarts:
                try:
                    return await self._wait(shows, LOOK_S)
                except TimeoutError:
                    pass

    def _fact_id(self, what: str) -> str:
        return f"{ENGINE}-{self._run}-{self._epoch}-{what}"

    async def _beat(self) -> None:
        while True:
            await self.sleep(BEAT_S)
            if self._opened and not self._is_over():
                alive = inbox.TrainerAlive(
                    id=self._net.fresh("alive"), engine=ENGINE, run=self._run, trainer_epoch=self._epoch, doing="a step"
                )
                try:
                    await self.link.send(alive)
                except BusUnavailable:
                    pass

    async def _hang(self) -> None:
        """Hang, as a thread may, until the watch in the process notices that, reports it and ends the process."""
        await self.sleep(HANGS_S)
        hangs = inbox.TrainerHangs(
            id=self._fact_id("hangs"),
            engine=ENGINE,
            run=self._run,
            trainer_epoch=self._epoch,
            doing="a step",
            still_s=HANGS_S,
        )
        try:
            await self._send(hangs)
        except RunOver:
            pass
        self._net.loop.soon(self.kill)
        self._net.loop.after(RESTART_S, self.start)
        await self.sleep(RESTART_S)  # which never ends, as this process does

    # ---- a run ----

    async def _train_run(self) -> None:
        await self._open()
        model: bytes | None = None
        failed = 0
        while True:
            try:
                if model is None:
                    await self._wait(lambda engine: not engine.suspended)
                    model = await self._load()
                    failed = 0
                await self._publish_missing_weights(model)
                await self._wait(lambda engine: engine.batch is not None)
                batch = self._engine.batch
                assert batch is not None
                model = trained(model, batch)
                await self._step(model, batch)
                continue
            except BusUnavailable:
                pass
            except LoadBroken:
                failed += 1
                if failed == LOADS_MAX:
                    await self._give_up()
                    failed = 0
            except StepBroken:
                await self._report_failure()
            if self._variant != Variant.TRAINED_ON:
                model = None  # its state after the failed attempt is unknown
            await self._pause(RETRY_S)

    async def _open(self) -> None:
        opens = inbox.TrainerOpens(
            id=self._net.fresh("open"),
            engine=ENGINE,
            run=self._run,
            trainer=self._id,
            patience_s=PATIENCE_S if self._beats else 0.0,
        )
        while True:
            try:
                answer = await self.link.request(opens, ANSWER_S)
                break
            except BusUnavailable:
                await self._pause(RETRY_S)
            except Refused:
                raise RunOver from None
        await self.follower.wait_for(lambda: self.follower.position >= answer.position, ANSWER_S * 10)
        assert isinstance(answer, inbox.Done)
        self._epoch, self._opened = answer.epoch, True
        if self._is_over():
            raise RunOver

    async def _load(self) -> bytes:
        """Return the model after the newest step on the log: steps since the newest good checkpoint are made again."""
        if self._engine.phase == Phase.BOOTING:
            stage = inbox.StageReached(id=f"{self._id}-{self._run}-load", engine=ENGINE, run=self._run, stage="loading")
            await self._send(stage)
        await self.sleep(self._net.pick.random() * 0.5)
        if self._net.faults.strikes(Fault.FAILED_LOAD):
            raise LoadBroken
        if self._net.faults.strikes(Fault.HANG):
            await self._hang()
        engine = self._engine
        if engine.step_done is None:
            return LOADED
        model, restored = self._restored(engine)
        for step in steps_after(engine.steps, restored, engine.step_done.step) or ():
            await self._read(step.batch)
            await self.sleep(self._net.pick.random() * 0.5)
            model = trained(model, step.batch)
            self._referee.count("steps made again")
            if engine.weights is not None and engine.weights.version == step.batch.step:
                assert engine.weights.weights.sha256 == digest(model).hex(), f"step {step.batch.step}, made again"
                self._referee.count("steps made again to the bytes on the log")
        return model

    def _restored(self, engine: EngineState) -> tuple[bytes, int]:
        """Return the model of the newest checkpoint from which the run can go on, and its step, as service.py does."""
        assert engine.step_done is not None
        newest = engine.step_done.step
        for done in checkpoints(engine.steps):
            saved = self._referee.disk.get(done.checkpoint)
            if saved is None or saved.damaged:
                self._referee.count("checkpoints passed over")
                continue
            assert saved.digest == done.checkpoint_digest
            if steps_after(engine.steps, done.step, newest) is not None:
                return saved.model, done.step
        if steps_after(engine.steps, 0, newest) is None:
            assert self._is_superseded(), f"no checkpoint from which step {newest} can be made again is left"
            raise StepBroken
        return LOADED, 0

    def _is_superseded(self) -> bool:
        """Return whether the run is not ours any more on the log, so that what our fold names may be gone already."""
        engine = self._referee.hive.engine(ENGINE)
        return (engine.run, engine.trainer) != (self._run, self._id) or engine.phase == Phase.OFFLINE

    async def _publish_missing_weights(self, model: bytes) -> None:
        done = self._engine.step_done
        version = 0 if done is None else done.step
        if self._engine.version >= version:
            return
        await self.sleep(self._net.pick.random() * 0.5)
        epoch = self._epoch
        where = f"weights/{self._run}/{version}/{epoch}"
        self._referee.weights[where] = Published(self._run, version, model)
        saved = inbox.WeightsSaved(
            id=self._fact_id(f"weights-{version}"),
            engine=ENGINE,
            run=self._run,
            step=version,
            trainer_epoch=epoch,
            weights=Weights(where=where, sha256=digest(model).hex()),
        )
        await self._say(saved, lambda engine: engine.version >= version)
        named = {ready.weights.where for ready in (self._engine.weights, self._engine.weights_before) if ready}
        for path, published in list(self._referee.weights.items()):
            ours = int(path.rpartition("/")[2]) <= epoch or self._variant == Variant.SWEPT_ALL
            if path not in named and published.run == self._run and ours:
                del self._referee.weights[path]

    async def _step(self, model: bytes, batch: BatchReady) -> None:
        """Make one attempt: read, train, write the checkpoint if one is due, report it."""
        self._attempt += 1
        epoch = self._epoch
        await self._read(batch)
        await self.sleep(self._net.pick.random() * 1.5)
        if self._over:
            raise RunOver
        if self._net.faults.strikes(Fault.BROKEN_STEP):
            raise StepBroken
        if self._net.faults.strikes(Fault.HANG):
            await self._hang()
        due = is_due(self._engine.steps, batch.step, checkpoint_every(self._engine))
        path = f"checkpoints/{self._run}/step-{batch.step}-epoch-{epoch}-attempt-{self._attempt}"
        saved = Checkpoint(self._run, batch.step, epoch, model, digest(path.encode() + model).hex())
        done = inbox.StepDone(
            id=self._fact_id(f"step-{batch.step}-{self._attempt}"),
            engine=ENGINE,
            run=self._run,
            step=batch.step,
            trainer_epoch=epoch,
            checkpoint=path if due else "",
            checkpoint_digest=saved.digest if due else "",
        )
        if self._variant == Variant.UNSAVED_STEP:
            await self._send(done)
        if due:
            await self.sleep(self._net.pick.random() * 0.3)
            self._referee.disk[path] = saved
            await self.sleep(self._net.pick.random() * 0.1)
        await self._say(done, lambda engine: engine.step_done is not None and engine.step_done.step >= batch.step)
        kept = {done.checkpoint for done in (*self._engine.kept, *checkpoints(self._engine.steps))}
        for other, checkpoint in list(self._referee.disk.items()):
            ours = checkpoint.trainer_epoch <= epoch or self._variant == Variant.SWEPT_ALL
            if other not in kept and checkpoint.run == self._run and ours:
                del self._referee.disk[other]

    async def _read(self, batch: BatchReady) -> None:
        """Check that every call of the batch is there, is the one that was referenced (R6) and is not too old (R14)."""
        calls = self.link.server.streams[CALLS_STREAM]
        bound = self._engine.collection.trained_staleness
        refs = [ref for group in batch.groups for episode in group.episodes for ref in episode.calls]

        def read() -> None:
            for ref in refs:
                record = read_record(calls.get(ref.seq).body, ref)
                assert bound is None or batch.step - 1 - record.oldest <= bound

        try:
            await self.link.call(read)
        except LogCorrupted:
            if self._is_superseded():
                raise StepBroken from None
            raise

    async def _report_failure(self) -> None:
        batch = self._engine.batch
        if batch is None:
            return
        before = self._engine.step_failures, self._engine.suspensions
        broke = inbox.StepBroke(
            id=self._net.fresh("broke"),
            engine=ENGINE,
            run=self._run,
            step=batch.step,
            trainer_epoch=self._epoch,
            reason="a simulated failure",
        )
        await self._say(broke, lambda engine: (engine.step_failures, engine.suspensions) != before)

    async def _give_up(self) -> None:
        """Let the run be suspended. Before its first version the job may be at fault, which ends the run."""
        engine = self._engine
        if engine.waits_for_operator:
            return
        suspensions = engine.suspensions
        broke = inbox.EngineBroke(
            id=self._net.fresh("stuck"),
            engine=ENGINE,
            run=self._run,
            reason="the model cannot be loaded",
            trainer_epoch=self._epoch,
            may_pass=engine.version >= 0 or self._net.pick.random() < 0.7,
        )
        await self._say(broke, lambda engine: engine.suspensions > suspensions)
