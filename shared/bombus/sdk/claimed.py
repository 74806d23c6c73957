"""A client's claimed episodes: how long each may last, and how an exiting program gives them up."""

import logging
import math
import re
import threading
import uuid
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from bombus.hive.bounded import trim
from bombus.hive.failures import FailureKind
from bombus.sdk.requests import NoReply, ServerReply, ServerRequest, is_success, posted

log = logging.getLogger("bombus")

LIFETIMES = 2.0  # default time that an episode may last, as a multiple of its idle limit
EPISODES_MAX = 100_000
ABORTED_AT_ONCE = 1024
GIVE_BACK_S = 5.0  # longer than the server waits in one slice of a claim
_OF_ENGINE = re.compile(r"/e/[a-z0-9][a-z0-9-]*\Z")

Send = Callable[[ServerRequest], Awaitable[ServerReply | NoReply]]


class ClaimedEpisodes:
    """The episodes of one client. Threads may share it. `clock` returns monotonic seconds.

    `root` is the hive's address, even if the client's address names one of its engines.
    """

    def __init__(self, server_url: str, clock: Callable[[], float], client_uuid: str = "") -> None:
        self.client_uuid = client_uuid or str(uuid.uuid4())
        self.root = _OF_ENGINE.sub("", server_url.rstrip("/"))
        self.clock = clock
        self.shortest_idle_s = math.inf  # shortest idle limit of all episodes ever claimed
        self._lock = threading.Lock()
        self._over_at: dict[str, float] = {}  # open episode -> when its time is over
        self._multi_model: dict[str, None] = {}  # episodes that are part of multi-model episodes
        self._sampled: dict[str, bool] = {}  # episode claimed with a sampler -> whether this client has ended it
        self._taking: set[str] = set()  # sampled episodes that a call of `take_datums` is reading

    def note(
        self,
        episodes: Sequence[str],
        idle_s: float,
        lifetime_s: float | None,
        *,
        are_multi_model: bool = False,
        are_sampled: bool = False,
    ) -> None:
        """Record claimed episodes, and how long they may last."""
        over_at = self.clock() + (lifetime_s or LIFETIMES * idle_s)
        with self._lock:
            self.shortest_idle_s = min(self.shortest_idle_s, idle_s)
            self._over_at |= dict.fromkeys(episodes, over_at)
            self._multi_model |= dict.fromkeys(episodes if are_multi_model else ())
            self._sampled |= dict.fromkeys(episodes if are_sampled else (), False)
            trim(self._over_at, EPISODES_MAX)
            trim(self._multi_model, EPISODES_MAX)
            trim(self._sampled, EPISODES_MAX)

    def open(self) -> list[str]:
        """Return the episodes that this client has neither ended nor aborted."""
        with self._lock:
            return list(self._over_at)

    def still_open(self, episodes: Sequence[str]) -> list[str]:
        """Return which of these episodes are still open."""
        with self._lock:
            return [episode for episode in episodes if episode in self._over_at]

    def is_late(self, episode: str) -> bool:
        with self._lock:
            over_at = self._over_at.get(episode)
        return over_at is not None and self.clock() > over_at

    def finished(self, episode: str) -> bool:
        """Record that an agent is done, and return whether it was in time.

        If the agent was in time, its episode may then wait for the rest of its group without a time limit.
        """
        if self.is_late(episode):
            return False
        with self._lock:
            self._over_at[episode] = math.inf
        return True

    def extend(self, episodes: Sequence[str], seconds: float) -> None:
        """Give episodes this many more seconds, because their agents began that long after the claim."""
        with self._lock:
            for episode in episodes:
                if episode in self._over_at:
                    self._over_at[episode] += seconds

    def over(self, episodes: Sequence[str]) -> None:
        """Record that episodes are no longer open."""
        with self._lock:
            for episode in episodes:
                self._over_at.pop(episode, None)
                self._multi_model.pop(episode, None)

    # ---- episodes whose data can be taken ----------------------------------------------------------------------

    def ended(self, episodes: Sequence[str]) -> None:
        """Record that episodes have ended, so that their data can be taken."""
        with self._lock:
            self._sampled |= {episode: True for episode in episodes if episode in self._sampled}

    def begin_taking(self, episodes: Sequence[str] | None) -> list[str]:
        """Reserve these episodes (by default, all that have ended) for the caller, except those that another call is
        taking. Return the reserved ones."""
        with self._lock:
            wanted = [episode for episode, ended in self._sampled.items() if ended] if episodes is None else episodes
            ours = [episode for episode in dict.fromkeys(wanted) if episode not in self._taking]
            self._taking.update(ours)
        return ours

    def taken(self, episodes: Sequence[str]) -> None:
        """Record that the data of episodes have been taken, so that they are not taken twice."""
        with self._lock:
            for episode in episodes:
                self._sampled.pop(episode, None)

    def end_taking(self, episodes: Sequence[str]) -> None:
        with self._lock:
            self._taking.difference_update(episodes)

    # ---- requests that are sent once, without retries ----------------------------------------------------------------

    async def touch_client(self, within_s: float, send: Send) -> bool:
        """Tell the hive once, without retries, that this client is alive. Return whether it replied. Never raises."""
        return is_success(await send(posted("/touch_client", {"client_uuid": self.client_uuid}, within_s)))

    async def give_up(self, episodes: Sequence[str], send: Send) -> None:
        """Abort the episodes of an interrupted program.

        The program is about to exit, so this makes one attempt, and logs a warning if that fails.
        """
        with self._lock:
            parts = [episode for episode in episodes if episode in self._multi_model]
        await self._abort_once(self.multi_model_path("abort"), parts, send)
        await self._abort_once("/abort_episodes", [episode for episode in episodes if episode not in parts], send)

    async def _abort_once(self, path: str, episodes: Sequence[str], send: Send) -> None:
        for first in range(0, len(episodes), ABORTED_AT_ONCE):
            some = episodes[first : first + ABORTED_AT_ONCE]
            body = self.abort_body(some, FailureKind.CLIENT, "the client was interrupted")
            if not is_success(await send(posted(path, body, GIVE_BACK_S))):
                left = len(episodes) - first
                log.warning("%d open episodes could not be aborted, and will be aborted once idle for too long", left)
                break
        self.over(episodes)

    def abort_body(self, episodes: Sequence[str], failure: FailureKind | None, detail: str) -> dict[str, Any]:
        body = {
            "client_uuid": self.client_uuid,
            "episode_uuids": list(episodes),
            "infra": failure is not None and failure.is_infra,  # for hives that do not know kinds of failures
            "detail": detail[:1000],
        }
        return body if failure is None else {**body, "failure": failure}

    def multi_model_path(self, what: str) -> str:
        """Return a route for multi-model episodes.

        These routes are at the hive's root, even if the client's URL names an engine.
        """
        return f"{self.root}/{what}_multi_model_episodes"
