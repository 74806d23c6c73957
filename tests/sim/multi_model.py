"""Multi-model episodes in the simulator: clients that play on two engines at once, and the second engine."""

import random

from bombus.errors import BusUnavailable, Refused
from bombus.hive import events as ev
from bombus.hive import inbox
from bombus.hive.events import Collection, EpisodeType, Weights
from bombus.hive.inbox import Done, EpisodeResult, Granted, MultiModelGranted
from bombus.hive.state import EngineState, Phase
from tests.sim.client import TASKS, Caller, Mood
from tests.sim.faults import Fault
from tests.sim.fold import Follower
from tests.sim.gateway import Gateway, Hangup
from tests.sim.link import Link, Net
from tests.sim.loop import Process
from tests.sim.multi_model_ledger import MAIN, SIDE, Episodes, MultiModelLedger

BEAT_S = 0.7


class SideEngine(Process):
    """Plays all that the second engine needs: its operator, its trainer and its replica."""

    def __init__(self, name: str, net: Net, mood: Mood) -> None:
        super().__init__(net.loop, name)
        self._net = net
        self._mood = mood

    async def main(self) -> None:
        self.link = Link(self, self._net)
        self.follower = Follower(self.link)
        self._run = self._epoch = 0
        self.spawn(self.follower.run())
        await self.follower.caught_up()
        while True:
            await self.sleep(BEAT_S)
            engine = self.follower.hive.engine(SIDE)
            try:
                await self._look_after(engine)
            except BusUnavailable:
                pass  # the next time

    async def _look_after(self, engine: EngineState) -> None:
        pick = self._net.pick
        if engine.phase == Phase.OFFLINE:
            await self.link.ask(self._configure())
            await self.link.ask(inbox.Start(id=self._net.fresh("start"), engine=SIDE))
            return
        if engine.suspended:
            await self.link.ask(inbox.Resume(id=self._net.fresh("resume"), engine=SIDE))
            return
        if self._mood.meddling and pick.random() < 0.03:
            await self.link.ask(inbox.Stop(id=self._net.fresh("stop"), engine=SIDE))
            return
        alive = inbox.ReplicaAlive(
            id=self._net.fresh("alive"), engine=SIDE, replica="s", url="s", run=engine.run, version=engine.version
        )
        await self.link.send(alive)
        if self._run != engine.run:
            await self._open(engine.run)
        elif engine.batch is not None:
            await self._make_step(engine, engine.batch)
        elif engine.version < max(engine.step, 0):
            await self._save(engine, max(engine.step, 0))

    async def _open(self, run: int) -> None:
        opens = inbox.TrainerOpens(id=self._net.fresh("open"), engine=SIDE, run=run, trainer=self.link.token)
        answer = await self.link.ask(opens)
        if isinstance(answer, Done):
            self._run, self._epoch = run, answer.epoch

    async def _make_step(self, engine: EngineState, batch: ev.BatchReady) -> None:
        await self.link.send(
            inbox.StepDone(
                id=self._net.fresh("step"), engine=SIDE, run=engine.run, step=batch.step, trainer_epoch=self._epoch,
                checkpoint="c", checkpoint_digest="d",
            )
        )  # fmt: skip

    async def _save(self, engine: EngineState, step: int) -> None:
        await self.link.send(
            inbox.WeightsSaved(
                id=self._net.fresh("weights"), engine=SIDE, run=engine.run, step=step, trainer_epoch=self._epoch,
                weights=Weights(where="w"),
            )
        )  # fmt: skip

    def _configure(self) -> inbox.Configure:
        pick = self._net.pick
        rules = Collection(
            batch_size=pick.randint(1, 2),
            num_repeat=pick.randint(1, 2),
            max_open_claims=pick.choice((2, 4, 16)),
            max_staleness=pick.choice((0, 0, 1)),
            drain_s=pick.choice((1.0, 10.0)),
            boot_s=30.0,
        )
        return inbox.Configure(
            id=self._net.fresh("configure"), engine=SIDE, config="{}", config_digest="d", collection=rules, model="m"
        )


class MultiModelClient(Caller):
    """Claims multi-model episodes, and some on the second engine alone. It ends, aborts and forgets them."""

    def __init__(
        self, name: str, gateways: list[Gateway], ledger: MultiModelLedger, mood: Mood, pick: random.Random
    ) -> None:
        super().__init__(name, gateways, pick)
        self._ledger = ledger
        self._mood = mood

    async def main(self) -> None:
        while True:
            await self.sleep(self._pick.expovariate(2.0))
            if self._mood.playing:
                await (self._play() if self._pick.random() < 0.7 else self._play_alone())

    async def _play(self) -> None:
        pick = self._pick
        claim = inbox.MultiModelClaim(
            id="",
            claim=f"{self.fresh('multi')}-{self.lives}",
            client=self.name,
            count=pick.choice((1, 1, 2)),
            type=EpisodeType.EVAL if pick.random() < 0.1 else EpisodeType.TRAIN,
            discard_timeout_s=pick.choice((4.0, 10.0, 40.0)),
            engines=pick.choice(((MAIN, SIDE), (SIDE, MAIN))),
        )
        wait_s = pick.choice((0.0, 5.0, 20.0))
        granted = await self.request_until_answered(
            claim.claim, lambda gateway: self.claim_in_slices(gateway, claim, wait_s)
        )
        if not isinstance(granted, MultiModelGranted):
            return
        count = len(granted.grants[0].episodes)
        several = [{each.engine: each.episodes[number] for each in granted.grants} for number in range(count)]
        self._ledger.acknowledged_grant(several)
        run = next(each.run for each in granted.grants if each.engine == MAIN)
        task = pick.choice(TASKS)
        reports = []
        for multi in several:
            if pick.random() < 0.6:
                await self._call(multi[MAIN], run)
            await self.sleep(pick.random())
            roll = pick.random()
            if roll < 0.1:
                await self._abort(multi)
            elif roll > 0.15 or not self._mood.meddling:  # otherwise it is forgotten and becomes idle
                reports.append(
                    {
                        name: EpisodeResult(episode=episode, task=task, reward=pick.choice((0.0, 0.5, 1.0)))
                        for name, episode in multi.items()
                    }
                )
        if reports:
            await self._end(reports)

    async def _call(self, episode: str, run: int) -> None:
        request = self.fresh("request")
        try:
            gateway = self._pick.choice(self._gateways)
            await gateway.request(self, lambda g: g.call(episode, run, request, False, False))
        except (Refused, Hangup, BusUnavailable):
            pass  # it goes on without

    async def _end(self, reports: list[dict[str, EpisodeResult]]) -> None:
        command = inbox.MultiModelEnd(id=self.fresh("end"), client=self.name, results=tuple(reports))
        answer = await self.request_until_answered(command.id, lambda gateway: gateway.command(command))
        if not isinstance(answer, Done):
            return
        for results in reports:
            self._ledger.acknowledged_end(results)
        if self._mood.faults.strikes(Fault.REPEAT):
            await self.request_until_answered(f"{command.id} again", lambda gateway: gateway.command(command))

    async def _abort(self, multi: Episodes) -> None:
        engine = self._pick.choice((MAIN, SIDE))
        command = inbox.Abort(id=self.fresh("abort"), engine=engine, client=self.name, episodes=(multi[engine],))
        if isinstance(await self.request_until_answered(command.id, lambda gateway: gateway.command(command)), Done):
            self._ledger.acknowledged_aborted(multi)

    async def _play_alone(self) -> None:
        """Play on the second engine, where single claims stand beside multi-model ones."""
        claim = inbox.Claim(
            id="", engine=SIDE, claim=f"{self.fresh('alone')}-{self.lives}", client=self.name, discard_timeout_s=10.0
        )
        granted = await self.request_until_answered(
            claim.claim, lambda gateway: self.claim_in_slices(gateway, claim, 2.0)
        )
        if not isinstance(granted, Granted):
            return
        result = EpisodeResult(episode=granted.episodes[0], task=self._pick.choice(TASKS), reward=1.0)
        end = inbox.End(id=self.fresh("end"), engine=SIDE, client=self.name, results=(result,))
        await self.request_until_answered(end.id, lambda gateway: gateway.command(end))
