"""Plays ready-made tasks with a model, without training, and summarises the results of the episodes."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from bombus.environments.chat_model import NoModelAnswer
from bombus.environments.kinds import RolloutStatus
from bombus.environments.rollout import Rollout, RolloutResult
from bombus.errors import BombusError, Code, Refused, in_one_line
from bombus.sdk.types import Credentials, Task
from bombus.task_groups import first_failure

UNANSWERED_S = 60.0  # how long a server may take to answer its first call, because it may still be starting
REASONS_SHOWN_MAX = 3
FAILURES_IN_A_ROW_MAX = 16  # after this many failures, a server is not expected to recover


class ServerFailed(BombusError):
    """Raised if so many episodes in a row failed that the rest would fail too."""


class EpisodeScore(msgspec.Struct, frozen=True, kw_only=True):
    """The score of an episode. If it was aborted, it has no reward, and `error` gives the reason."""

    tasks: str
    task_id: str
    number: int  # position among the episodes of its task
    status: RolloutStatus
    reward: float | None = None
    is_success: bool | None = None
    rewards: dict[str, float] = {}
    metrics: dict[str, float] = {}
    turns: int = 0
    tool_calls: int = 0
    completion_tokens: int = 0
    seconds: float = 0.0
    error: str = ""

    def line(self) -> str:
        """Return the score as a readable line."""
        if self.reward is None:
            return f"{self.task_id}: aborted: {self.error}"
        truncated = ", truncated" if self.status == RolloutStatus.TRUNCATED else ""
        used = f"{self.turns} turns, {self.completion_tokens} tokens"
        return f"{self.task_id}: reward {self.reward:.3g} ({self.seconds:.1f} s, {used}{truncated})"


def score_of_rollout(tasks: str, task: Task, number: int, result: RolloutResult, seconds: float) -> EpisodeScore:
    """Return the score to record for a rollout."""
    transcript, scores = result.transcript, result.scores
    return EpisodeScore(
        tasks=tasks,
        task_id=task.task_id,
        number=number,
        status=result.status,
        reward=scores.reward if scores is not None else None,
        is_success=scores.is_success if scores is not None else None,
        rewards=scores.rewards if scores is not None else {},
        metrics=scores.metrics if scores is not None else {},
        turns=transcript.turns,
        tool_calls=transcript.tool_calls,
        completion_tokens=transcript.completion_tokens,
        seconds=round(seconds, 3),
        error=in_one_line(result.error) if result.error is not None else "",
    )


class EpisodeSummary:
    """Totals over the episodes of one set of tasks."""

    HEAD = ("tasks", "episodes", "reward", "solved", "truncated", "aborted", "turns", "tokens", "seconds")

    def __init__(self, name: str) -> None:
        self.name = name
        self.rewards: list[float] = []
        self.solved = 0
        self.judged = 0  # number of episodes for which the environment says whether they were solved
        self.truncated = 0
        self.aborted: Counter[str] = Counter()
        self.turns = 0
        self.tokens = 0
        self.seconds = 0.0
        self.metrics: dict[str, list[float]] = {}

    def add(self, score: EpisodeScore) -> None:
        if score.reward is None:
            self.aborted[score.error] += 1
            return
        self.rewards.append(score.reward)
        self.judged += score.is_success is not None
        self.solved += bool(score.is_success)
        self.truncated += score.status == RolloutStatus.TRUNCATED
        self.turns += score.turns
        self.tokens += score.completion_tokens
        self.seconds += score.seconds
        for name, value in score.metrics.items():
            self.metrics.setdefault(name, []).append(value)

    def row(self) -> tuple[str, ...]:
        """Return the cells of the table row. The means are over the episodes that have a reward."""
        count = len(self.rewards)
        return (
            self.name,
            str(count),
            _mean(sum(self.rewards), count, 3),
            f"{self.solved}/{self.judged}" if self.judged else "-",
            str(self.truncated),
            str(self.aborted.total()),
            _mean(self.turns, count, 1),
            _mean(self.tokens, count, 0),
            _mean(self.seconds, count, 1),
        )

    def notes(self) -> Iterator[str]:
        """Yield a line with the means of the metrics, then a line for each of the most common reasons why episodes were
        aborted."""
        if self.metrics:
            yield f"{self.name}: " + ", ".join(
                f"{name} {sum(values) / len(values):.3g}" for name, values in self.metrics.items()
            )
        for why, count in self.aborted.most_common(5):
            yield f"{self.name}: {count} aborted: {why}"


def table(summaries: Sequence[EpisodeSummary]) -> list[str]:
    """Return the lines of a table, with names aligned left and figures aligned right."""
    rows = [EpisodeSummary.HEAD, *(summary.row() for summary in summaries)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(EpisodeSummary.HEAD))]
    return [
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:]))])
        for row in rows
    ]


class ScoreFile:
    """A file with one JSON line per episode. It must not exist yet, so that no other run's results are overwritten."""

    def __init__(self, path: Path) -> None:
        try:
            self._file = path.open("xb")
        except FileExistsError as error:
            raise Refused(Code.BAD_CONFIG, f"{path} already exists: name another file, or move this one") from error
        except OSError as error:
            raise Refused(Code.BAD_CONFIG, f"{path} cannot be written: {in_one_line(error)}") from error

    def add(self, score: EpisodeScore) -> None:
        self._file.write(msgspec.json.encode(score) + b"\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class ServerPatience:
    """Reports why calls are retried, and gives up if the server has not answered any call within the first `within_s`
    seconds.

    A rollout uses it as its `watch`. `report` is called with the first few reasons.
    """

    def __init__(
        self,
        report: Callable[[str], None],
        within_s: float = UNANSWERED_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.gave_up = ""  # the reason for giving up, or "" before that
        self._report = report
        self._within_s = within_s
        self._clock = clock
        self._reasons: set[str] = set()
        self._has_answered = False
        self._since: float | None = None

    def answered(self) -> None:
        self._has_answered = True

    def asked_again(self, why: str) -> None:
        if why not in self._reasons and len(self._reasons) < REASONS_SHOWN_MAX:
            self._reasons.add(why)
            self._report(f"{why}; retrying")
        if self._has_answered:
            return
        now = self._clock()
        if self._since is None:
            self._since = now
        if now - self._since >= self._within_s:
            self.gave_up = f"the server has not answered for {self._within_s:g} s: {why}"
            raise NoModelAnswer(self.gave_up)


class TaskRun:
    """Plays each task of a set several times, with up to `at_once` episodes at a time.

    `report` is called with the score of each finished episode. Raises `ServerFailed` if too many episodes in a row
    fail, or if the rollout's `patience` has given up.
    """

    def __init__(  # noqa: PLR0913 - what a run consists of
        self,
        name: str,
        rollout: Rollout,
        credentials: Credentials,
        report: Callable[[EpisodeScore], None],
        at_once: int,
        patience: ServerPatience | None = None,
    ) -> None:
        self._name = name
        self._rollout = rollout
        self._credentials = credentials
        self._report = report
        self._slots = asyncio.Semaphore(at_once)
        self._patience = patience
        self._failed = 0

    async def run(self, tasks: Sequence[Task], repeat: int = 1) -> None:
        waiting = iter([(task, number) for task in tasks for number in range(repeat)])
        async with first_failure() as group:
            for task, number in waiting:
                await self._slots.acquire()
                group.create_task(self._episode(task, number))

    async def _episode(self, task: Task, number: int) -> None:
        async with self._released():
            began = time.monotonic()
            result = await self._rollout.play(task, self._credentials)
            score = score_of_rollout(self._name, task, number, result, time.monotonic() - began)
            self._report(score)
            if self._patience is not None and self._patience.gave_up:
                raise ServerFailed(self._patience.gave_up)
            self._failed = self._failed + 1 if score.reward is None else 0
            if self._failed >= FAILURES_IN_A_ROW_MAX:
                raise ServerFailed(f"{self._failed} episodes in a row failed, the last one with: {score.error}")

    @asynccontextmanager
    async def _released(self) -> AsyncIterator[None]:
        try:
            yield
        finally:
            self._slots.release()


def _mean(total: float, count: int, digits: int) -> str:
    return f"{total / count:.{digits}f}" if count else "-"
