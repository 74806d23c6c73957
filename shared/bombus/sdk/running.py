"""Running many episodes: retries of those that fail, and the outcomes of a group."""

import logging
import random
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import TypeVar

from bombus.sdk.core import EpisodeReport
from bombus.sdk.errors import EpisodesFailed, InfraError
from bombus.sdk.types import Credentials, Task, WorkflowOutput

log = logging.getLogger("bombus")

ATTEMPTS_MAX = 3
RETRY_FIRST_S = 2.0
WORKERS_MAX = 64

T = TypeVar("T")
AgentResult = WorkflowOutput | float  # the outcome, or just the reward
Agent = Callable[[Task, Credentials], AgentResult]
AsyncAgent = Callable[[Task, Credentials], Awaitable[AgentResult]]


def output_of(result: AgentResult) -> WorkflowOutput:
    return result if isinstance(result, WorkflowOutput) else WorkflowOutput(reward=result)


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
    """Collects the outcomes of a group's episodes, sorted into those to end and those to abort."""

    def __init__(self, task: Task, claimed: Sequence[Credentials]) -> None:
        self._task = task
        self._claimed = claimed
        self.outputs: list[WorkflowOutput | None] = [None] * len(claimed)
        self.failures: dict[int, Exception] = {}

    def succeeded(self, index: int, result: AgentResult) -> None:
        self.outputs[index] = output_of(result)

    def failed(self, index: int, error: Exception) -> None:
        episode = self._claimed[index].episode
        log.warning("the agent of episode %s failed, and the episode is aborted: %r", episode, error)
        self.failures[index] = error

    def ends(self) -> list[EpisodeReport]:
        return [
            (self._task, one.episode_uuid, output)
            for one, output in zip(self._claimed, self.outputs, strict=True)
            if output is not None
        ]

    def aborts(self) -> list[tuple[str, bool, str]]:
        """Return (episode, whether infrastructure is to blame, what happened) for each that failed."""
        return [
            (self._claimed[index].episode_uuid, isinstance(error, InfraError), repr(error))
            for index, error in self.failures.items()
        ]

    def result(self) -> list[WorkflowOutput | None]:
        """Return the outputs, None where the agent failed. Raises `EpisodesFailed` when all of them did."""
        if len(self.failures) == len(self._claimed):
            raise EpisodesFailed(list(self.outputs), self.failures)
        return self.outputs
