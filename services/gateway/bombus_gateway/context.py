"""What every door of the gateway shares."""

import asyncio
import logging
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from bombus.bus import Bus
from bombus.bus.follow import Follower
from bombus.errors import BusUnavailable, Refused
from bombus.hive.inbox import Touch
from bombus_gateway.keys import Keys
from bombus_gateway.settings import GatewaySettings

log = logging.getLogger(__name__)

TOUCH_S = 1.0
CONFIRM_S = 0.2
_SEND_S = 5.0
TOUCHES_MAX = 10_000  # episodes or claims in one message


class Touches:
    """Signs of life, coalesced: one message a second and engine for episodes, sooner for claims (R5, R13)."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._open: dict[str, Counter[str]] = {}
        self._seen: dict[str, set[str]] = {}
        self._confirmed: dict[str, list[str]] = {}

    def touch(self, engine: str, episode: str) -> None:
        """This episode shows life now: a heartbeat."""
        self._seen.setdefault(engine, set()).add(episode)

    def confirm(self, engine: str, claim: str) -> None:
        """The answer to this claim was written to a live connection."""
        self._confirmed.setdefault(engine, []).append(claim)

    @contextmanager
    def held(self, engine: str, episode: str) -> Iterator[None]:
        """This episode is alive as long as the block runs: an open call."""
        calls = self._open.setdefault(engine, Counter())
        calls[episode] += 1
        self.touch(engine, episode)
        try:
            yield
        finally:
            calls[episode] -= 1
            if calls[episode] <= 0:
                del calls[episode]

    async def run(self) -> None:
        """Send what has gathered, until cancelled."""
        beat = 0
        beats = round(TOUCH_S / CONFIRM_S)
        while True:
            await asyncio.sleep(CONFIRM_S)
            beat += 1
            if beat % beats == 0 or any(self._confirmed.values()):
                await self.flush()

    async def flush(self) -> None:
        for engine in {*self._open, *self._seen, *self._confirmed}:
            episodes = tuple(self._seen.pop(engine, set()).union(self._open.get(engine, ())))
            confirmed = tuple(self._confirmed.pop(engine, ()))
            for start in range(0, max(len(episodes), len(confirmed)), TOUCHES_MAX):
                end = start + TOUCHES_MAX
                await self._send(engine, episodes[start:end], confirmed[start:end])

    async def _send(self, engine: str, episodes: tuple[str, ...], confirmed: tuple[str, ...]) -> None:
        touch = Touch(id=uuid.uuid4().hex, engine=engine, episodes=episodes, confirmed=confirmed)
        try:
            await self._bus.inbox.send(touch, timeout_s=_SEND_S)
        except (BusUnavailable, Refused) as error:
            # Open calls are touched again a second later.
            self._confirmed.setdefault(engine, []).extend(confirmed)
            log.warning("signs of life were not sent", extra={"engine": engine, "why": str(error)})


@dataclass
class Gateway:
    """Made once in `service.run`; `ready` says whether it has folded the log as it was at the start (R18)."""

    settings: GatewaySettings
    bus: Bus
    follower: Follower
    keys: Keys
    touches: Touches = field(init=False)
    ready: bool = False

    def __post_init__(self) -> None:
        self.touches = Touches(self.bus)
