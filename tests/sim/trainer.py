"""A trainer as in service.py: opens the run and makes each outstanding step. It may be killed anywhere or run twice."""

from collections.abc import Callable

from bombus.errors import BusUnavailable, Refused
from bombus.hive import inbox
from bombus.hive.events import BatchReady, Weights
from bombus.hive.records import digest
from bombus.hive.state import EngineState, Phase
from tests.sim.faults import Fault
from tests.sim.fold import RETRY_S, Follower
from tests.sim.gateway import read_record
from tests.sim.link import Link, Net
from tests.sim.loop import Process
from tests.sim.referee import ENGINE, Checkpoint, Referee, trained
from tests.sim.server import CALLS_STREAM
from tests.sim.variants import Variant

ANSWER_S = 15.0


class RunOver(Exception):
    """The run was stopped, has failed, or was opened by another trainer."""


class StepBroken(Exception):
    """A step failed, as from a lack of memory, a full disk or a bug."""


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
        self._run, self._opened, self._over, self._attempt = 0, False, False, 0
        self.spawn(self.follower.run())
        await self.follower.caught_up()
        while True:
            await self.follower.wait_for(lambda: self._engine.phase != Phase.OFFLINE and self._engine.run > self._run)
            self._run, self._opened, self._over = self._engine.run, False, False
            try:
                await self._train_run()
            except RunOver:
                pass

    @property
    def _engine(self) -> EngineState:
        return self.follower.hive.engine(ENGINE)

    def _is_over(self) -> bool:
        engine = self._engine
        ours = engine.trainer == self._id or not self._opened
        return engine.run != self._run or engine.phase == Phase.OFFLINE or not ours

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

    def _fact_id(self, what: str) -> str:
        return f"{ENGINE}-{self._run}-{self._engine.trainer_epoch}-{what}"

    # ---- a run ----

    async def _train_run(self) -> None:
        await self._open()
        model: bytes | None = None
        while True:
            try:
                if model is None:
                    model = await self._load()
                await self._publish_missing_weights()
                await self._wait(lambda engine: engine.batch is not None)
                batch = self._engine.batch
                assert batch is not None
                model = trained(model, batch)
                await self._step(model, batch)
                continue
            except BusUnavailable:
                pass
            except StepBroken:
                await self._report_failure()
            if self._variant != Variant.TRAINED_ON:
                model = None  # its state after the failed attempt is unknown
            await self._pause(RETRY_S)

    async def _open(self) -> None:
        opens = inbox.TrainerOpens(id=f"{self._id}-{self._run}", engine=ENGINE, run=self._run, trainer=self._id)
        while True:
            try:
                answer = await self.link.request(opens, ANSWER_S)
                break
            except BusUnavailable:
                await self._pause(RETRY_S)
            except Refused:
                raise RunOver from None
        await self.follower.wait_for(lambda: self.follower.position >= answer.position, ANSWER_S * 10)
        self._opened = True
        if self._is_over():
            raise RunOver

    async def _load(self) -> bytes:
        """Return the model after the newest step on the log."""
        if self._engine.phase == Phase.BOOTING:
            stage = inbox.StageReached(id=f"{self._id}-{self._run}-load", engine=ENGINE, run=self._run, stage="loading")
            await self._send(stage)
        await self.sleep(self._net.pick.random() * 0.5)
        done = self._engine.step_done
        if done is None:
            return b"loaded"
        saved = self._referee.disk.get(done.checkpoint)
        if saved is None:
            assert self._is_stale(), f"checkpoint {done.checkpoint}, which the log names, is gone"
            raise StepBroken
        assert saved.digest == done.checkpoint_digest
        return saved.model

    def _is_stale(self) -> bool:
        """Return whether our fold lags, so that files that it names may be gone already."""
        return self.follower.position < self._referee.position

    async def _publish_missing_weights(self) -> None:
        done = self._engine.step_done
        version = 0 if done is None else done.step
        if self._engine.version >= version:
            return
        await self.sleep(self._net.pick.random() * 0.5)
        epoch = self._engine.trainer_epoch
        where = f"weights/{self._run}/{version}/{epoch}"
        self._referee.weights[where] = self._run, version
        await self._send(
            inbox.WeightsSaved(
                id=self._fact_id(f"weights-{version}"),
                engine=ENGINE,
                run=self._run,
                step=version,
                trainer_epoch=epoch,
                weights=Weights(where=where),
            )
        )
        await self._wait(lambda engine: engine.version >= version)
        named = {ready.weights.where for ready in (self._engine.weights, self._engine.weights_before) if ready}
        for path, (run, _) in list(self._referee.weights.items()):
            ours = int(path.rpartition("/")[2]) <= epoch or self._variant == Variant.SWEPT_ALL
            if path not in named and run == self._run and ours:
                del self._referee.weights[path]

    async def _step(self, model: bytes, batch: BatchReady) -> None:
        """Make one attempt: read, train, write the checkpoint, report it."""
        self._attempt += 1
        before = self._engine.step_done
        epoch = self._engine.trainer_epoch
        await self._read(batch)
        await self.sleep(self._net.pick.random() * 1.5)
        if self._over:
            raise RunOver
        if self._net.faults.strikes(Fault.BROKEN_STEP):
            raise StepBroken
        path = f"checkpoints/{self._run}/step-{batch.step}-epoch-{epoch}-attempt-{self._attempt}"
        saved = Checkpoint(self._run, batch.step, epoch, model, digest(path.encode() + model).hex())
        done = inbox.StepDone(
            id=self._fact_id(f"step-{batch.step}-{self._attempt}"),
            engine=ENGINE,
            run=self._run,
            step=batch.step,
            trainer_epoch=epoch,
            checkpoint=path,
            checkpoint_digest=saved.digest,
        )
        if self._variant == Variant.UNSAVED_STEP:
            await self._send(done)
        await self.sleep(self._net.pick.random() * 0.3)
        self._referee.disk[path] = saved
        await self.sleep(self._net.pick.random() * 0.1)
        await self._send(done)
        await self._wait(lambda engine: engine.step_done is not None and engine.step_done.step >= batch.step)
        kept = {path, before.checkpoint if before is not None else ""}
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

        await self.link.call(read)

    async def _report_failure(self) -> None:
        batch = self._engine.batch
        if batch is None:
            return
        counted = self._engine.step_failures
        broke = inbox.StepBroke(
            id=self._net.fresh("broke"),
            engine=ENGINE,
            run=self._run,
            step=batch.step,
            trainer_epoch=self._engine.trainer_epoch,
            reason="a simulated failure",
        )
        await self._send(broke)
        await self._wait(lambda engine: engine.step_failures > counted)
