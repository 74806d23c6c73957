"""Clients in the simulator that show that they live until they die, and what must hold of their episodes."""

import random
from collections.abc import Callable, Sequence

from bombus.bus.headers import INBOX
from bombus.errors import BusUnavailable, Refused
from bombus.hive import events as ev
from bombus.hive import inbox
from bombus.hive.events import AbortReason
from bombus.hive.inbox import Granted
from bombus.hive.state import EngineState
from tests.sim.client import Caller, Mood
from tests.sim.gateway import Gateway, Hangup
from tests.sim.server import BEGIN_NS, Message

BEAT_S = 1.0
SILENCE_S = 4.0  # as the jobs of the simulator have it
FREED_S = 15.0  # from calm: until a gateway is heard from, then the silence, a tick, and a late message
FOR_EVER_S = 100_000.0


class MortalClient(Caller):
    """Holds episodes that never go idle, and aborts them: whoever reports rewards has to agree on steps, too.

    It dies with some open, and a client with another id takes its place.
    """

    def __init__(self, name: str, gateways: list[Gateway], mood: Mood, pick: random.Random) -> None:
        super().__init__(name, gateways, pick)
        self._mood = mood
        self.id = ""

    async def main(self) -> None:
        self.id = self.fresh(f"life-{self.lives}")
        self.spawn(self._beat())
        while True:
            await self.sleep(self._pick.expovariate(2.0))
            if self._mood.playing:
                await self._play()

    async def _beat(self) -> None:
        while True:
            gateway, living = self._pick.choice(self._gateways), self.id
            try:
                await gateway.request(self, lambda g: _touched(g, living))  # noqa: B023
            except (Hangup, BusUnavailable, Refused):
                pass  # the next one says the same
            await self.sleep(BEAT_S)

    async def _play(self) -> None:
        claim = inbox.Claim(
            id="",
            engine="main",
            claim=self.fresh(f"claim-{self.lives}"),
            client=self.id,
            count=self._pick.choice((1, 2)),
            discard_timeout_s=FOR_EVER_S,
            touches=True,
        )
        granted = await self.request_until_answered(claim.claim, lambda gateway: gateway.claim(claim, 2.0))
        if not isinstance(granted, Granted):
            return
        await self.sleep(self._pick.choice((0.1, 2.0, SILENCE_S + 2.0)))
        if self._mood.meddling and self._pick.random() < 0.5:
            self.id = self.fresh(f"life-{self.lives}")
            return
        command = inbox.Abort(id=self.fresh("abort"), engine="main", client=self.id, episodes=granted.episodes)
        await self.request_until_answered(command.id, lambda gateway: gateway.command(command))


class SilenceLedger:
    """Sees what is stored of clients that touch. No episode of theirs is taken for a silence that was none.

    How long a silence was is known where the server's clock is not `set` meanwhile.
    """

    def __init__(self, engine: Callable[[], EngineState], count: Callable[[str], None], is_set: bool) -> None:
        self._engine = engine
        self._count = count
        self._is_set = is_set
        self._stamps: dict[int, int] = {}  # by the sequence of an inbox message, in ns
        self._touched: dict[str, list[int]] = {}  # the sequences of the touches of each client

    def heard(self, messages: Sequence[Message]) -> None:
        for each in messages:
            self._stamps[each.seq] = each.time_ns
            if isinstance(each.message, inbox.Touch):
                for client in each.message.clients:
                    self._touched.setdefault(client, []).append(each.seq)

    def decided(self, messages: Sequence[Message]) -> None:
        """Check events, once they are folded."""
        for each in messages:
            if isinstance(each.event, ev.EpisodeAborted) and each.event.reason == AbortReason.SILENT:
                for episode in each.event.episodes:
                    self._count("episodes of silent clients")
                    self._check(self._engine().closed[episode].client, int(each.headers[INBOX]))

    def _check(self, client: str, answered: int) -> None:
        """Check that a client was silent for long enough when this inbox message was decided."""
        before = [seq for seq in self._touched.get(client, ()) if seq < answered]
        heard_ns = self._stamps[before[-1]] if before else BEGIN_NS
        silent_s = (self._stamps[answered] - heard_ns) / 1e9
        assert self._is_set or silent_s >= SILENCE_S, f"{client} was silent for {silent_s:.1f} s alone"


async def _touched(gateway: Gateway, client: str) -> None:
    gateway.touch_client(client)
