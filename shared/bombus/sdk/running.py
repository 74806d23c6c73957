"""Running many episodes: retries of those that fail, and the outcomes of a group."""

import logging
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import TypeVar

from bombus.sdk.core import EpisodeAbort, EpisodeReport
from bombus.sdk.errors import EpisodesFailed, InfraError
from bombus.sdk.types import Credentials, Task, WorkflowOutput

log = logging.getLogger("bombus")

ATTEMPTS_MAX = 3
RETRY_FIRST_S = 2.0
WORKERS_MAX = 64
KEEP_FINISHED_S = 30.0  # between two signs of life of episodes that wait for the rest of their group

T = TypeVar("T")
AgentResult = WorkflowOutput | float  # the outcome, or just the reward
Agent = Callable[[Task, Credentials], AgentResult | Awaitable[AgentResult]]
AsyncAgent = Callable[[Task, Credentials], Awaitable[AgentResult]]


def retry_delays(auto_retry: bool) -> Iterator[float]:
    """Yield the seconds to wait before each further attempt: growing, a little random, and only so many."""
    for attempt in range(ATTEMPTS_MAX - 1 if auto_retry else 0):
        yield RETRY_FIRST_S * 2**attempt * (1 + random.random() / 2)


def retry_note(delay: float | None) -> str:
    return " for good" if delay is None else f", again in {delay:.0f} s"


def workers_for(count: int, max_workers: int | None) -> int:
    if max_workers is not None and max_workers < 1:
        raise ValueError(f"max_workers is {max_workers}: it must be at least 1")
    return max(1, min(count, max_workers or WORKERS_MAX))


def all_or_raise(results: list[T | None], failures: dict[int, Exception]) -> list[T | None]:
    if failures:
        raise EpisodesFailed(results, failures)
    return results


class GroupOutcome:
    """Collects the outcomes of a group's episodes, sorted into those to end and those to abort.

    Up to `replace_infra` episodes whose environments have failed are replaced. Threads may share it.
    """

    def __init__(self, task: Task, claimed: Sequence[Credentials], replace_infra: int = 0) -> None:
        self._task = task
        self._claimed = list(claimed)
        self._replacements = iter(range(replace_infra))
        self.outputs: list[WorkflowOutput | None] = [None] * len(claimed)
        self.failures: dict[int, Exception] = {}
        self.lost: Counter[str] = Counter()  # by the kind of the error, also those that were replaced
        self.replaced = 0

    def credentials(self, index: int) -> Credentials:
        return self._claimed[index]

    def episodes(self) -> list[str]:
        """Return the id of the newest episode in each place."""
        return [one.episode_uuid for one in self._claimed]

    def succeeded(self, index: int, result: AgentResult) -> None:
        self.outputs[index] = result if isinstance(result, WorkflowOutput) else WorkflowOutput(reward=result)

    def failed(self, index: int, error: Exception) -> None:
        episode = self._claimed[index].episode
        log.warning("the agent of episode %s failed, and the episode is aborted: %r", episode, error)
        self.failures[index] = error
        self.lost[type(error).__name__] += 1

    def takes_replacement(self, index: int) -> bool:
        """Return whether another episode is to be played in the place of one that failed, and count it.

        It is where infrastructure was to blame, as long as there are replacements left.
        """
        return isinstance(self.failures[index], InfraError) and next(self._replacements, None) is not None

    def replace(self, index: int, claimed: Credentials) -> None:
        """Go on in this place with another episode."""
        del self.failures[index]
        self._claimed[index] = claimed
        self.replaced += 1

    def not_replaced(self, index: int, error: Exception) -> None:
        """Note that no episode could be claimed in this place, which stays empty."""
        log.warning("no episode could be claimed in the place of %s: %r", self._claimed[index].episode, error)

    def tell(self) -> None:
        """Log how many episodes the group has, and why others were lost, where any were."""
        if self.lost:
            reasons = ", ".join(f"{count} by {reason}" for reason, count in sorted(self.lost.items()))
            found = sum(output is not None for output in self.outputs)
            log.warning(
                "the group of task %s has %d of %d episodes: %s were lost, and %d of these replaced",
                self._task.task_id,
                found,
                len(self.outputs),
                reasons,
                self.replaced,
            )

    def ends(self) -> list[EpisodeReport]:
        return [
            (self._task, one.episode_uuid, output)
            for one, output in zip(self._claimed, self.outputs, strict=True)
            if output is not None
        ]

    def finished(self) -> list[str]:
        """Return the episodes whose agents are done."""
        return [one.episode_uuid for one, output in zip(self._claimed, self.outputs) if output is not None]

    def abort(self, index: int) -> EpisodeAbort:
        """Return how the episode that failed in this place is aborted."""
        error = self.failures[index]
        return self._claimed[index].episode_uuid, isinstance(error, InfraError), repr(error)

    def aborts(self) -> list[EpisodeAbort]:
        return [self.abort(index) for index in self.failures]

    def result(self) -> list[WorkflowOutput | None]:
        """Return the outputs, None where the agent failed. Raises `EpisodesFailed` when all of them did."""
        if len(self.failures) == len(self._claimed):
            raise EpisodesFailed(list(self.outputs), self.failures)
        return self.outputs
