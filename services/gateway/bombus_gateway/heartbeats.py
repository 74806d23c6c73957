"""Collects heartbeats from episodes and clients, and confirmations of claims, and forwards them in a few messages."""

import asyncio
import logging
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable

from bombus.bus import Bus
from bombus.errors import BusUnavailable, Refused
from bombus.hive.inbox import Touch

log = logging.getLogger(__name__)

HEARTBEAT_S = 1.0
CONFIRM_S = 0.2
_SEND_S = 5.0
TOUCHES_MAX = 10_000  # maximum number of episodes or claims in one message


class Heartbeats:
    """Sends each engine's live episodes in one message a second, and confirmed claims sooner (R5, R13).

    A separate message each second lists the live clients, which belong to no engine. `hears_clients` returns whether
    this gateway receives their heartbeats.
    """

    def __init__(self, bus: Bus, hears_clients: Callable[[], bool]) -> None:
        self._bus = bus
        self._hears_clients = hears_clients
        self._open = defaultdict[str, Counter[str]](Counter)
        self._seen: dict[str, set[str]] = {}
        self._sessions: dict[str, set[str]] = {}
        self._environments: dict[str, set[int]] = {}
        self._clients: set[str] = set()
        self._confirmed: dict[str, list[str]] = {}

    def touch(self, engine: str, episode: str) -> None:
        """Report that this episode is alive now."""
        self._seen.setdefault(engine, set()).add(episode)

    def touch_session(self, engine: str, session: str) -> None:
        """Report that the client of this session of training operations is alive now."""
        self._sessions.setdefault(engine, set()).add(session)

    def touch_environment(self, engine: str, environment: int) -> None:
        """Report that this environment of rollout groups is alive now."""
        self._environments.setdefault(engine, set()).add(environment)

    def touch_client(self, client: str) -> None:
        """Report that the process of this client is alive now."""
        self._clients.add(client)

    def confirm(self, engine: str, claim: str) -> None:
        """Report that the answer to this claim was written to a live connection."""
        self._confirmed.setdefault(engine, []).append(claim)

    def opened(self, engine: str, episode: str) -> None:
        """Count an open call of this episode. The episode is reported as alive until all of its calls are `closed`."""
        self._open[engine][episode] += 1
        self.touch(engine, episode)

    def closed(self, engine: str, episode: str) -> None:
        calls = self._open[engine]
        calls[episode] -= 1
        if calls[episode] <= 0:
            del calls[episode]

    async def run(self) -> None:
        """Send what has been collected, until cancelled."""
        beat = 0
        beats = round(HEARTBEAT_S / CONFIRM_S)
        while True:
            await asyncio.sleep(CONFIRM_S)
            beat += 1
            if beat % beats == 0:
                await self.beat()
            if beat % beats == 0 or any(self._confirmed.values()):
                await self.flush()

    async def beat(self) -> None:
        """Report the live clients. Even an empty report shows the coordinator that this gateway can hear clients."""
        if not self._hears_clients():
            return
        clients, self._clients = tuple(self._clients), set()
        for start in range(0, max(1, len(clients)), TOUCHES_MAX):
            await self._send(Touch(id=uuid.uuid4().hex, clients=clients[start : start + TOUCHES_MAX]))

    async def flush(self) -> None:
        for engine in {*self._open, *self._seen, *self._sessions, *self._environments, *self._confirmed}:
            episodes = tuple(self._seen.pop(engine, set()).union(self._open.get(engine, ())))
            sessions = tuple(self._sessions.pop(engine, ()))
            environments = tuple(self._environments.pop(engine, ()))
            confirmed = tuple(self._confirmed.pop(engine, ()))
            for start in range(0, max(map(len, (episodes, sessions, environments, confirmed))), TOUCHES_MAX):
                part = slice(start, start + TOUCHES_MAX)
                touch = Touch(
                    id=uuid.uuid4().hex,
                    engine=engine,
                    episodes=episodes[part],
                    sessions=sessions[part],
                    environments=environments[part],
                    confirmed=confirmed[part],
                )
                await self._send(touch)

    async def _send(self, touch: Touch) -> None:
        try:
            await self._bus.inbox.send(touch, timeout_s=_SEND_S)
        except (BusUnavailable, Refused) as error:
            # Only confirmations must be kept: open calls are reported again a second later.
            self._confirmed.setdefault(touch.engine, []).extend(touch.confirmed)
            log.warning("heartbeats could not be sent", extra={"engine": touch.engine, "why": str(error)})
