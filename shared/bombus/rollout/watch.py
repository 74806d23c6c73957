"""Keeps the episodes being played alive, and reports when one must stop: the hive ended it, or it reached a limit."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from bombus.rollout.process import StopReason
from bombus.sdk.aio import AsyncSwarmClient
from bombus.sdk.types import EpisodeUsage

LOOK_S = 1.0
EPISODES_PER_REQUEST = 1024
MISSED_LOOKS = 2  # checks without an episode before it counts as over: a gateway may just not know it yet at the first


class EpisodeLimits(msgspec.Struct, frozen=True, kw_only=True):
    """An episode's limits: how many calls it may make, and how many tokens these calls may sample. None means no
    limit."""

    turns_max: int | None = None
    tokens_max: int | None = None

    def reason_to_stop(self, used: EpisodeUsage) -> StopReason | None:
        if self.turns_max is not None and used.calls >= self.turns_max:
            return StopReason.TURNS
        if self.tokens_max is not None and used.completion_tokens >= self.tokens_max:
            return StopReason.TOKENS
        return None


class WatchedEpisode:
    """An episode that is being played. `stop` gets a result when the episode's agent has to stop."""

    def __init__(self) -> None:
        self.stop: asyncio.Future[StopReason] = asyncio.get_running_loop().create_future()
        self.used = EpisodeUsage()
        self._missed = 0

    def seen(self, used: EpisodeUsage | None, limits: EpisodeLimits) -> None:
        """Record the usage that the hive reported. None means that the episode is not among the open ones."""
        self._missed = self._missed + 1 if used is None else 0
        self.used = used or self.used
        reason = StopReason.OVER if self._missed >= MISSED_LOOKS else limits.reason_to_stop(self.used)
        if reason is not None and not self.stop.done():
            self.stop.set_result(reason)


class EpisodeWatch:
    """Asks the hive once a second for the usage of the episodes that are being played."""

    def __init__(self, client: AsyncSwarmClient, limits: EpisodeLimits) -> None:
        self._client = client
        self._limits = limits
        self._watched: dict[str, WatchedEpisode] = {}
        self.has_seen_calls = False  # true once any episode has made a call

    @property
    def count(self) -> int:
        """Return how many episodes are being played."""
        return len(self._watched)

    @contextmanager
    def watching(self, episode_uuid: str) -> Iterator[WatchedEpisode]:
        watched = self._watched[episode_uuid] = WatchedEpisode()
        try:
            yield watched
        finally:
            del self._watched[episode_uuid]

    async def run(self) -> None:
        """Watch until cancelled. Raises the client's errors."""
        while True:
            await asyncio.sleep(LOOK_S)
            names = list(self._watched)
            for start in range(0, len(names), EPISODES_PER_REQUEST):
                await self._look(names[start : start + EPISODES_PER_REQUEST])

    async def _look(self, names: list[str]) -> None:
        open_ones = await self._client.watch_episodes(names)
        self.has_seen_calls |= any(used.calls for used in open_ones.values())
        for name in names:
            if (watched := self._watched.get(name)) is not None:
                watched.seen(open_ones.get(name), self._limits)
