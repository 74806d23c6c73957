"""Clients and an operator: they send requests to the gateways until they are answered, and record the answers."""

import random
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import msgspec

from bombus.errors import BusUnavailable, Code, Refused
from bombus.hive import inbox
from bombus.hive.collection import BATCH_METHODS
from bombus.hive.events import Collection, EpisodeType, Method
from bombus.hive.inbox import Done, EpisodeResult, Granted
from bombus.hive.state import Phase
from tests.sim.faults import Fault, Faults
from tests.sim.gateway import Gateway, GatewayFault, Hangup
from tests.sim.loop import Process
from tests.sim.referee import ENGINE, JobConfig, Referee, TrainerPart

T = TypeVar("T")
Request = Callable[[Gateway], Coroutine[Any, Any, T]]

TASKS = ("t1", "t2", "t3")
CALL_ATTEMPTS = 5
OPERATOR_S = 2.0


class Mood:
    """How clients and the operator behave now, and the `faults` that strike them.

    While `playing` they begin episodes; while `meddling` they stop engines and forget episodes.
    """

    def __init__(self, faults: Faults) -> None:
        self.faults = faults
        self.playing = True
        self.meddling = True


class Caller(Process):
    """A sender of commands. `pending` names the command that is not answered yet."""

    def __init__(self, name: str, gateways: list[Gateway], pick: random.Random) -> None:
        super().__init__(gateways[0].loop, name)
        self.pending = ""
        self._gateways = gateways
        self._pick = pick
        self._numbers = 0

    def kill(self) -> None:
        super().kill()
        self.pending = ""

    def fresh(self, what: str) -> str:
        self._numbers += 1
        return f"{self.name}-{what}-{self._numbers}"

    async def claim_in_slices(self, gateway: Gateway, claim: inbox.Claim, wait_s: float) -> inbox.AnyAnswer:
        """Claim as the gateway does for any claim (R13), and confirm the answer."""
        answer = await gateway.in_slices(claim, f"{self.fresh('asking')}.{self.lives}", wait_s)
        gateway.confirm(claim.claim)
        return answer

    async def request_until_answered(self, what: str, send: Request[T]) -> T | Refused:
        """Send a request to one gateway after another until there is an answer."""
        self.pending = what
        while True:
            try:
                answer: T | Refused = await self._pick.choice(self._gateways).request(self, send)
                break
            except Refused as refused:
                if refused.code not in GatewayFault:
                    answer = refused
                    break
            except (Hangup, BusUnavailable):
                pass
            await self.sleep(self._pick.random() * 0.5)
        self.pending = ""
        return answer


class Client(Caller):
    def __init__(self, name: str, gateways: list[Gateway], referee: Referee, mood: Mood, pick: random.Random) -> None:
        super().__init__(name, gateways, pick)
        self._referee = referee
        self._mood = mood
        self._rewards = pick.choice(((0.0, 1.0), (0.0, 1.0, 0.5), (0.0, 1.0, float("nan"))))
        self._pace = pick.choice((2.0, 8.0))
        # Nothing is drawn from `pick`: histories stay those of their seeds. The hash is of integers: that of None is an
        # address, which each process has its own of.
        self._by_call = random.Random(hash(pick.getstate()[1]))

    async def main(self) -> None:
        while True:
            await self.sleep(self._pick.expovariate(self._pace))
            if self._mood.playing:
                await self._play()

    async def _play(self) -> None:
        pick = self._pick
        claim = inbox.Claim(
            id="",
            engine=ENGINE,
            claim=self._claim_id(),
            client=self.name,
            count=pick.choice((1, 1, 2, 3)),
            type=EpisodeType.EVAL if pick.random() < 0.1 else EpisodeType.TRAIN,
            discard_timeout_s=pick.choice((2.0, 10.0, 40.0)),
            owner="" if self.name == "ann" else self.name,
        )
        wait_s = pick.choice((0.0, 2.0, 5.0))
        granted = await self.request_until_answered(
            f"claim {claim.claim}", lambda gateway: gateway.claim(claim, wait_s)
        )
        if not isinstance(granted, Granted):
            return
        self._referee.acknowledged_grant(claim.claim, granted)
        task = pick.choice(TASKS)
        results = []
        for episode in granted.episodes:
            answered: list[str] = []
            alive = await self._run_episode(episode, granted.run, answered)
            roll = pick.random()
            if not alive or roll < 0.05:
                await self._abort(episode, infra=not alive)
            elif roll > 0.07 or not self._mood.meddling:  # otherwise it is forgotten and becomes idle
                reward = pick.choice(self._rewards)
                results.append(self._result(EpisodeResult(episode=episode, task=task, reward=reward), answered))
        if pick.random() < 0.5:
            await self._end(results, granted.run)
        else:
            for result in results:
                await self._end([result], granted.run)
        if pick.random() < 0.5:
            vote = inbox.AgreeSync(id=self.fresh("vote"), engine=ENGINE, client=self.name)
            await self.request_until_answered("a vote", lambda gateway: gateway.command(vote))

    def _result(self, result: EpisodeResult, answered: list[str]) -> EpisodeResult:
        """Return the result, in which perhaps each answered call has a reward of its own."""
        if not answered or self._by_call.random() < 0.7:
            return result
        rewards = {call: self._by_call.choice(self._rewards) for call in self._by_call.sample(answered, len(answered))}
        return msgspec.structs.replace(result, reward=None, rewards_by_call=rewards)

    def _claim_id(self) -> str:
        """Return a new id, or one of a few that clash with the client's earlier claims."""
        if self._pick.random() < 0.15:
            return f"{self.name}-claim-again-{self._pick.randint(1, 8)}"
        return f"{self.fresh('claim')}-{self.lives}"

    async def _run_episode(self, episode: str, run: int, answered: list[str]) -> bool:
        """Make a few calls, and add those that are answered. Return False when one failed."""
        pick = self._pick
        for _ in range(pick.choice((0, 1, 1, 2, 3))):
            if not await self._call(episode, run, answered):
                return False
        if pick.random() < 0.1:
            self.spawn(self._call(episode, run, answered))  # still running when the episode ends
        if pick.random() < 0.1:
            await self.request_until_answered("a heartbeat", lambda gateway: _touched(gateway, episode))
        return True

    async def _call(self, episode: str, run: int, answered: list[str]) -> bool:
        request = self.fresh("request")
        cut_off = self._pick.random() < 0.05
        for attempt in range(CALL_ATTEMPTS):
            gateway = self._pick.choice(self._gateways)
            try:
                call = await gateway.request(self, lambda g: g.call(episode, run, request, attempt > 0, cut_off))  # noqa: B023
            except Refused as refused:
                if refused.code not in GatewayFault:
                    return False
            except (Hangup, BusUnavailable):
                pass
            else:
                if not cut_off:
                    answered.append(call)
                    self._referee.acknowledged_call(episode, call)
                return True
            await self.sleep(self._pick.random() * 0.3)
        return False

    async def _end(self, results: list[EpisodeResult], run: int) -> None:
        if not results:
            return
        for result in results:
            self._referee.ends(result)
        command = inbox.End(id=self.fresh("end"), engine=ENGINE, client=self.name, results=tuple(results))
        answer = await self.request_until_answered(f"{command.id}", lambda gateway: gateway.command(command))
        if isinstance(answer, Refused) and answer.code == Code.BAD_REWARD:
            plain = [msgspec.structs.replace(result, reward=0.0, rewards_by_call=None) for result in results]
            await self._end(plain, run)
            return
        if not isinstance(answer, Done):
            return
        for result in results:
            self._referee.acknowledged_end(result)
        if self._mood.faults.strikes(Fault.REPEAT):
            again = await self.request_until_answered(f"{command.id} again", lambda gateway: gateway.command(command))
            same_run = self._referee.hive.engine(ENGINE).run == run
            assert isinstance(again, Done) or not same_run, f"{command.id} was accepted; when repeated: {again}"
        if self._pick.random() < 0.05:
            await self._call(results[0].episode, run, [])  # too late

    async def _abort(self, episode: str, infra: bool) -> None:
        command = inbox.Abort(id=self.fresh("abort"), engine=ENGINE, client=self.name, episodes=(episode,), infra=infra)
        if isinstance(await self.request_until_answered(command.id, lambda gateway: gateway.command(command)), Done):
            self._referee.acknowledged_aborted(episode)


class Operator(Caller):
    """Starts the engine with another job whenever it is offline, resumes suspended runs, and sometimes stops one."""

    def __init__(self, gateways: list[Gateway], mood: Mood, pick: random.Random) -> None:
        super().__init__("operator", gateways, pick)
        self._mood = mood
        self._stops = pick.choice((0.0, 0.0, 0.15))

    async def main(self) -> None:
        late: inbox.Stop | inbox.Resume | None = None  # carried out, and perhaps sent again when it must do nothing
        while True:
            seen = await self.request_until_answered("the phase", _phase)
            assert not isinstance(seen, Refused)
            phase, suspended = seen
            if phase == Phase.OFFLINE:
                await self._command(self._configure())
                await self._command(inbox.Start(id=self.fresh("start"), engine=ENGINE))
                await self._repeat(late)
            elif suspended:
                await self._repeat(late)
                late = inbox.Resume(id=self.fresh("resume"), engine=ENGINE)
                await self._command(late)
            elif self._mood.meddling and self._pick.random() < self._stops:
                late = inbox.Stop(id=self.fresh("stop"), engine=ENGINE)
                await self._command(late)
            await self.sleep(OPERATOR_S)

    async def _repeat(self, command: inbox.AnyMessage | None) -> None:
        if command is not None and self._mood.faults.strikes(Fault.REPEAT):
            await self.sleep(self._pick.random() * 5)
            await self._command(command)

    async def _command(self, command: inbox.AnyMessage) -> None:
        await self.request_until_answered(command.id, lambda gateway: gateway.command(command))

    def _configure(self) -> inbox.Configure:
        path = self._pick.choice(("tiny", "tiny", "other"))
        job = JobConfig(trainer=TrainerPart(self._pick.choice((1, 1, 2, 3))), model={"path": path})
        return inbox.Configure(
            id=self.fresh("configure"),
            engine=ENGINE,
            config=msgspec.json.encode(job).decode(),
            config_digest="d",
            collection=self._rules(),
            model=path,
        )

    def _rules(self) -> Collection:
        pick = self._pick
        batch_size, num_repeat = pick.randint(1, 2), pick.randint(1, 3)
        method = pick.choice(list(Method))
        if method == Method.ENOUGH_NON_DUMMY_TASKS:
            num_repeat = max(num_repeat, 2)  # a single episode never gives a signal
        staleness = 0 if BATCH_METHODS[method].is_by_agreement else pick.choice((0, 1, 2))
        waiting = (staleness + 1) * batch_size * num_repeat
        return Collection(
            method=method,
            batch_size=batch_size,
            num_repeat=num_repeat,
            max_open_claims=pick.choice((3, 6, 16)),
            max_pool_episodes=pick.choice((waiting + 4, 100)),
            max_staleness=staleness,
            max_step_failures=pick.choice((2, 5)),
            boot_s=30.0,
            drain_s=pick.choice((1.0, 10.0)),
            sync_s=pick.choice((2.0, 30.0)),
            agreed_sync_s=pick.choice((0.0, 3.0)),
            client_silence_s=4.0,
            max_carry_staleness=pick.choice((0, 1)),
            replay_steps=pick.choice((1, 3, 1000)),
            resume=pick.choice(("never", "auto", "auto")),
            checkpoints_kept=pick.choice((1, 2, 5)),
        )


async def _phase(gateway: Gateway) -> tuple[Phase, bool]:
    return gateway.engine.phase, bool(gateway.engine.suspended)


async def _touched(gateway: Gateway, episode: str) -> None:
    gateway.touch(episode)
