"""Runs whose episodes become rollout groups, in the simulator: their engine, and clients that play on it."""

import random

from bombus.errors import BusUnavailable
from bombus.hive import events as ev
from bombus.hive import inbox
from bombus.hive.events import Collection, EpisodeType, Weights
from bombus.hive.inbox import Done, EpisodeResult, Granted
from bombus.hive.state import EngineState, Phase
from bombus.hive.trajectories.queue import QueuedGroup
from tests.sim.client import TASKS, Caller, Mood
from tests.sim.faults import Fault
from tests.sim.fold import Follower
from tests.sim.gateway import Gateway
from tests.sim.grouped_ledger import BATCH, GROUPED_ENGINE, GroupedLedger
from tests.sim.link import Link, Net
from tests.sim.loop import Process
from tests.sim.operations import store
from tests.sim.server import TRAJECTORIES_STREAM

BEAT_S = 0.7


class GroupedEngine(Process):
    """Plays what the engine needs: its operator, its trainer, ours or an outside one, its replica, an environment."""

    def __init__(self, name: str, net: Net, mood: Mood) -> None:
        super().__init__(net.loop, name)
        self._net = net
        self._mood = mood
        self._job = Collection(
            rollout_groups=net.pick.random() < 0.6,
            episode_groups=True,
            num_repeat=net.pick.choice((1, 2, 2)),
            max_carry_staleness=net.pick.choice((0, 1, 1, 2)),
            max_open_claims=net.pick.choice((4, 16)),
            boot_s=30.0,
        )

    async def main(self) -> None:
        self.link = Link(self, self._net)
        self.follower = Follower(self.link)
        self._run = self._epoch = 0
        self.spawn(self.follower.run())
        await self.follower.caught_up()
        while True:
            await self.sleep(BEAT_S * self._net.pick.random())
            engine = self.follower.hive.engine(GROUPED_ENGINE)
            try:
                await self._look_after(engine)
            except BusUnavailable:
                pass  # the next time

    async def _look_after(self, engine: EngineState) -> None:
        pick = self._net.pick
        if engine.phase == Phase.OFFLINE:
            await self.link.ask(
                inbox.Configure(
                    id=self._net.fresh("configure"), engine=GROUPED_ENGINE, config="{}", config_digest="d",
                    collection=self._job, model="m",
                )
            )  # fmt: skip
            await self._register()
            return
        if engine.suspended:
            await self.link.ask(inbox.Resume(id=self._net.fresh("resume"), engine=GROUPED_ENGINE))
            return
        if self._mood.meddling and pick.random() < 0.02:
            await self._meddle()
            return
        alive = inbox.ReplicaAlive(
            id=self._net.fresh("alive"), engine=GROUPED_ENGINE, replica="s", url="s", run=engine.run,
            version=engine.version,
        )  # fmt: skip
        await self.link.send(alive)
        if self._run != engine.run:
            await self._open(engine.run)
        elif engine.batch is not None:
            if pick.random() < 0.3:
                await self._make_step(engine, engine.batch)
        elif engine.version < max(engine.step, 0):
            await self._save(engine, max(engine.step, 0))
        elif engine.phase == Phase.ROLLING:
            await self._act(engine)

    async def _register(self) -> None:
        registers = inbox.RegisterTrainer(
            id=self._net.fresh("register"), engine=GROUPED_ENGINE, trainer=self._net.fresh("trainer"), batch_size=BATCH,
            max_token_len=64, checkpoint_dir="", save_checkpoint_interval=0, starting_step=0, num_steps=1_000,
        )  # fmt: skip
        await self.link.ask(registers)

    async def _meddle(self) -> None:
        match self._net.pick.randrange(3):
            case 0:
                await self.link.ask(inbox.Stop(id=self._net.fresh("stop"), engine=GROUPED_ENGINE))
            case 1:
                await self.link.ask(inbox.ResetGroups(id=self._net.fresh("reset"), engine=GROUPED_ENGINE))
            case _:
                await self._register()

    async def _open(self, run: int) -> None:
        opens = inbox.TrainerOpens(id=self._net.fresh("open"), engine=GROUPED_ENGINE, run=run, trainer=self.link.token)
        answer = await self.link.ask(opens)
        if isinstance(answer, Done):
            self._run, self._epoch = run, answer.epoch

    async def _make_step(self, engine: EngineState, batch: ev.BatchReady) -> None:
        await self.link.send(
            inbox.StepDone(
                id=self._net.fresh("step"), engine=GROUPED_ENGINE, run=engine.run, step=batch.step,
                trainer_epoch=self._epoch, checkpoint="c", checkpoint_digest="d",
            )
        )  # fmt: skip

    async def _save(self, engine: EngineState, step: int) -> None:
        await self.link.send(
            inbox.WeightsSaved(
                id=self._net.fresh("weights"), engine=GROUPED_ENGINE, run=engine.run, step=step,
                trainer_epoch=self._epoch, weights=Weights(where="w"),
            )
        )  # fmt: skip

    async def _act(self, engine: EngineState) -> None:
        """Push a group that fits few batches, or take a batch where the trainer is an outside one."""
        if self._net.pick.random() < 0.1:
            body = await store(self.link, self._net.fresh("pushed").encode(), TRAJECTORIES_STREAM)
            group = QueuedGroup(environment=None, sequences=self._net.pick.choice((1, 3)), body=body)
            key = self._net.fresh("push")
            await self.link.ask(inbox.PushGroups(id=key, engine=GROUPED_ENGINE, groups=(group,), key=key))
        elif not engine.makes_steps:
            taken = await self.link.ask(inbox.TakeBatch(id=self._net.fresh("take"), engine=GROUPED_ENGINE))
            if isinstance(taken, inbox.BatchTaken) and taken.number and self._net.pick.random() < 0.3:
                sent = inbox.BatchSent(
                    id=self._net.fresh("sent"), engine=GROUPED_ENGINE, run=taken.run, number=taken.number
                )
                await self.link.send(sent)


class GroupedClient(Caller):
    """Plays episodes as fast as they are granted, and ends, aborts or forgets them."""

    def __init__(
        self, name: str, gateways: list[Gateway], ledger: GroupedLedger, mood: Mood, pick: random.Random
    ) -> None:
        super().__init__(name, gateways, pick)
        self._ledger = ledger
        self._mood = mood

    async def main(self) -> None:
        while True:
            await self.sleep(self._pick.random() * 0.5)
            if self._mood.playing:
                await self._play()

    async def _play(self) -> None:
        pick = self._pick
        claim = inbox.Claim(
            id="",
            engine=GROUPED_ENGINE,
            claim=f"{self.fresh('claim')}-{self.lives}",
            client=self.name,
            count=pick.choice((1, 2, 2, 5)) if pick.random() < 0.9 else 1,
            type=EpisodeType.EVAL if pick.random() < 0.1 else EpisodeType.TRAIN,
            discard_timeout_s=10.0,
        )
        granted = await self.request_until_answered(
            claim.claim, lambda gateway: self.claim_in_slices(gateway, claim, 5.0)
        )
        if not isinstance(granted, Granted):
            return
        await self.sleep(pick.random() * pick.choice((0.5, 4.0)))
        task = pick.choice(TASKS)
        for episode in granted.episodes:
            roll = pick.random()
            if roll < 0.05:
                aborts = inbox.Abort(
                    id=self.fresh("abort"), engine=GROUPED_ENGINE, client=self.name, episodes=(episode,)
                )
                await self.request_until_answered(aborts.id, lambda gateway: gateway.command(aborts))  # noqa: B023
            elif roll > 0.07 or not self._mood.meddling:  # otherwise it is forgotten and becomes idle
                await self._end(EpisodeResult(episode=episode, task=task, reward=pick.choice((0.0, 1.0))))

    async def _end(self, result: EpisodeResult) -> None:
        ends = inbox.End(id=self.fresh("end"), engine=GROUPED_ENGINE, client=self.name, results=(result,))
        answer = await self.request_until_answered(ends.id, lambda gateway: gateway.command(ends))
        if not isinstance(answer, Done):
            return
        self._ledger.acknowledged_end(result)
        if self._mood.faults.strikes(Fault.REPEAT):
            await self.request_until_answered(f"{ends.id} again", lambda gateway: gateway.command(ends))
