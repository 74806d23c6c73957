"""A group of episodes of one task: which of them are ended, which are aborted, and which are replaced.

Both clients use this module, for single and multi-model episodes.
"""

import logging
import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Generic, TypeVar

from bombus.sdk import running
from bombus.sdk.claimed import LIFETIMES
from bombus.sdk.core import REPLACE_WAIT_S
from bombus.sdk.errors import (
    BadRequest,
    EpisodeGone,
    EpisodesFailed,
    InfraError,
    NotYourEpisode,
    OtherOutcome,
    SwarmError,
    failure_of,
)
from bombus.sdk.multi_model import HiveCore, MultiModelResult, check_roles
from bombus.sdk.running import AgentResult, checked_output, infra_of
from bombus.sdk.types import Credentials, MultiModelEpisode, Task, WorkflowOutput

log = logging.getLogger("bombus")

KEEP_LEAST_S = 0.1  # least time between two touches, however short the idle limit is
REFUSED = (BadRequest, NotYourEpisode, OtherOutcome)  # refusals that concern only one report of the group

ClaimT = TypeVar("ClaimT", bound=Credentials | MultiModelEpisode)
GivenT = TypeVar("GivenT")  # what an agent returns
OutcomeT = TypeVar("OutcomeT")
Claiming = Callable[..., Coroutine[Any, Any, list[ClaimT]]]  # `begin_episodes` with the group's common arguments


class GroupRun(ABC, Generic[ClaimT, GivenT, OutcomeT]):
    """The episodes of a group, one per place, and their results. Threads may share it.

    Up to `replace_infra` episodes that were lost to infrastructure or taken back by the hive are replaced. `lost`
    counts all lost episodes by error type, including those that were replaced. `claim(n, max_wait_s=)` claims `n` more
    episodes.
    """

    def __init__(
        self, core: HiveCore, task: Task, claim: Claiming[ClaimT], claimed: Sequence[ClaimT], replace_infra: int = 0
    ) -> None:
        self.task = task
        self.results: list[OutcomeT | None] = [None] * len(claimed)
        self.failures: dict[int, Exception] = {}
        self.lost: Counter[str] = Counter()
        self._core = core
        self._claim = claim
        self._claimed: list[ClaimT] = list(claimed)
        self._ended: set[int] = set()
        self._waiting = dict.fromkeys(range(len(claimed)), core.claimed.clock())  # place not begun yet -> waiting since
        self._replacements_left = replace_infra
        self._replaced = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._claimed)

    def begin(self, index: int) -> ClaimT:
        """Return the newest episode in a place. Its agent begins now.

        The episode's time limit is extended by the time for which it has waited for its agent.
        """
        claimed = self._claimed[index]
        if (since := self._waiting.pop(index, None)) is not None:
            self._core.claimed.extend(self._ids(claimed), self._core.claimed.clock() - since)
        return claimed

    @property
    def episodes(self) -> list[str]:
        """Return the ids of the newest episode in each place, one id per engine."""
        return [episode for one in self._claimed for episode in self._ids(one)]

    @property
    def keep_every_s(self) -> float:
        """Return how often to call `keep`, so that no finished or waiting episode goes idle."""
        return min(running.KEEP_FINISHED_S, max(KEEP_LEAST_S, self._core.claimed.shortest_idle_s / 3))

    def succeeded(self, index: int, given: GivenT) -> None:
        """Record an agent's result.

        Raises `ValueError` or `BadReward` if no episode can be ended with this result, and `EpisodeGone` if the agent
        took too long, because its episode would then be aborted instead of ended.
        """
        claimed = self._claimed[index]
        result = self._checked(claimed, given)
        if not all(self._core.claimed.finished(episode) for episode in self._ids(claimed)):
            raise EpisodeGone(
                f"{claimed.episode} lasted longer than max_episode_time, which is {LIFETIMES:g} times its idle limit: "
                "give the group a longer discard_episode_timeout"
            )
        self.results[index] = result

    def failed(self, index: int, error: Exception) -> None:
        error = infra_of(error)
        running.reports.report(error, f"episode {self._claimed[index].episode} of task {self.task.task_id} is lost")
        with self._lock:
            self.results[index] = None
            self.failures[index] = error
            self.lost[type(error).__name__] += 1

    # ---- operations ---------------------------------------------------------------------------------------------

    async def replace(self, index: int) -> bool:
        """Claim another episode in place of one that failed. Returns whether there is now another episode to play."""
        with self._lock:
            if not self._is_replaceable(index):
                return False
            self._replacements_left -= 1
        try:
            await self._abort(index)
            (claimed,) = await self._claim(1, max_wait_s=REPLACE_WAIT_S)
        except SwarmError as error:
            log.warning("no episode could be claimed in place of %s: %r", self._claimed[index].episode, error)
            return False
        with self._lock:
            del self.failures[index]
            self._claimed[index] = claimed
            self._replaced += 1
        return True

    async def keep(self) -> None:
        """Keep the episodes whose agents are done, or have not begun, from going idle."""
        await self._touch([*self._done(), *self._waiting])

    async def end(self) -> list[int]:
        """End the episodes whose agents are done, together, and abort the others.

        An episode that the hive has taken back, or whose report it refuses, is lost without affecting the others. If
        lost episodes are to be replaced, this returns their places before anything has been ended, and must be called
        again after the replacements have been played.
        """
        while done := self._done():
            try:
                await self._end(done)
                self._ended.update(done)
            except EpisodeGone as error:
                over = await self._touch(done)
                if not over:
                    await self._end_each(done)
                for index in over:
                    self.failed(index, error)
                if again := [index for index in over if self._is_replaceable(index)]:
                    return again
            except REFUSED:
                await self._end_each(done)
        for index in self.failures:
            try:
                await self._abort(index)
            except SwarmError as error:  # the other reports have reached the hive, and are not affected
                log.warning("%s could not be aborted, and will end once idle: %s", self._claimed[index].episode, error)
        return []

    def outcome(self) -> list[OutcomeT | None]:
        """Return the results, with None for each lost episode. Raises `EpisodesFailed` if all were lost."""
        if len(self.failures) == len(self._claimed):
            raise EpisodesFailed(list(self.results), self.failures)
        return self.results

    def tell(self) -> None:
        """If episodes were lost, log how many the group still has, and why the lost ones were lost."""
        if self.lost:
            log.warning(
                "the group of task %s has %d of %d episodes: %s were lost, of which %d were replaced",
                self.task.task_id,
                len(self._claimed) - len(self.failures),
                len(self._claimed),
                ", ".join(f"{count} by {reason}" for reason, count in sorted(self.lost.items())),
                self._replaced,
            )

    def _done(self) -> list[int]:
        return [place for place, one in enumerate(self.results) if one is not None and place not in self._ended]

    def _is_replaceable(self, index: int) -> bool:
        is_lost = isinstance(self.failures.get(index), InfraError | EpisodeGone)
        return is_lost and self._replacements_left > 0

    async def _end_each(self, places: Sequence[int]) -> None:
        """End episodes one by one, to find out which reports are refused."""
        for index in places:
            try:
                await self._end([index])
                self._ended.add(index)
            except (EpisodeGone, *REFUSED) as error:
                self.failed(index, error)

    # ---- for one kind of episode ---------------------------------------------------------------------------------

    @abstractmethod
    def _ids(self, claimed: ClaimT) -> list[str]: ...

    @abstractmethod
    def _checked(self, claimed: ClaimT, given: GivenT) -> OutcomeT: ...

    @abstractmethod
    async def _end(self, places: Sequence[int]) -> None: ...

    @abstractmethod
    async def _abort(self, index: int) -> None: ...

    @abstractmethod
    async def _touch(self, places: Sequence[int]) -> list[int]:
        """Keep the episodes in these places from going idle. Returns the places of episodes that have ended."""


class SingleGroup(GroupRun[Credentials, AgentResult, WorkflowOutput]):
    """A group of episodes on one engine."""

    def _ids(self, claimed: Credentials) -> list[str]:
        return [claimed.episode_uuid]

    def _checked(self, claimed: Credentials, given: AgentResult) -> WorkflowOutput:
        return checked_output(given)

    async def _end(self, places: Sequence[int]) -> None:
        ends = [(self.task, self._claimed[place].episode_uuid, self.results[place]) for place in places]
        await self._core.end_episodes([(task, episode, one) for task, episode, one in ends if one is not None])

    async def _abort(self, index: int) -> None:
        error = self.failures[index]
        episode = self._claimed[index].episode_uuid
        await self._core.abort_episode(episode, failure=failure_of(error), detail=repr(error))

    async def _touch(self, places: Sequence[int]) -> list[int]:
        over = await self._core.touch_episodes([self._claimed[place].episode_uuid for place in places])
        return [place for place in places if self._claimed[place].episode_uuid in over]


class MultiModelGroup(GroupRun[MultiModelEpisode, MultiModelResult, MultiModelResult]):
    """A group of multi-model episodes."""

    def _ids(self, claimed: MultiModelEpisode) -> list[str]:
        return claimed.episode_uuids

    def _checked(self, claimed: MultiModelEpisode, given: MultiModelResult) -> MultiModelResult:
        check_roles(claimed, given)
        for one in given.values():
            checked_output(one)
        return given

    async def _end(self, places: Sequence[int]) -> None:
        ends = [(self.task, self._claimed[place], self.results[place]) for place in places]
        await self._core.end_multi_model_episodes(
            [(task, episode, one) for task, episode, one in ends if one is not None]
        )

    async def _abort(self, index: int) -> None:
        error = self.failures[index]
        episode = self._claimed[index]
        await self._core.abort_multi_model_episode(episode, failure=failure_of(error), detail=repr(error))

    async def _touch(self, places: Sequence[int]) -> list[int]:
        over = await self._core.touch_multi_model_episodes([self._claimed[place] for place in places])
        return [place for place in places if self._claimed[place] in over]
