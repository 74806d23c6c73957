"""Records the results of episodes: as objects, as lines in a file in the `--out` folder, and as the summary of a
rollout."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec

from bombus.hive.failures import FailureKind
from bombus.private import private_folder
from bombus.rollout.process import StopReason
from bombus.rollout.tasks import AgentTask
from bombus.sdk.types import EpisodeUsage

RECORDS = "episodes.jsonl"
OUTPUTS = "outputs"
FAILURES_IN_A_ROW = 16  # after this many failures, the infrastructure is not expected to recover


class LossReason(StrEnum):
    """Why an episode has no reward."""

    INFRA = "infrastructure failure"
    TAKEN_BACK = "taken back by the hive"
    LIMIT = "over a limit"


class PlayedEpisode(msgspec.Struct, frozen=True, kw_only=True):
    """An episode that ended with a reward.

    `stopped` says why its agent was stopped, or is None if the agent exited. `complaint` is the error of a failed
    reward command.
    """

    episode: str
    reward: float
    seconds: float
    exit_code: int
    used: EpisodeUsage
    stopped: StopReason | None = None
    output: str = ""
    complaint: str = ""
    parts: Mapping[str, float] = {}  # the named parts of the reward, if any


class LostEpisode(msgspec.Struct, frozen=True, kw_only=True):
    """An episode that was aborted or could not be claimed. If it could not be claimed, `episode` is "".

    `failure` is the kind of failure that the log records.
    """

    loss: LossReason
    why: str
    failure: FailureKind
    episode: str = ""
    output: str = ""


def record_of(task: AgentTask, result: PlayedEpisode | LostEpisode) -> dict[str, object]:
    """Return the record of an episode, for one line of `episodes.jsonl`."""
    record: dict[str, object] = {"task_id": task.task_id, "episode": result.episode}
    if isinstance(result, LostEpisode):
        why = {"lost": result.loss, "failure": result.failure, "why": result.why}
        return {**record, "reward": None, **why, "output": result.output}
    return {
        **record,
        "reward": result.reward,
        "seconds": round(result.seconds, 3),
        "exit_code": result.exit_code,
        "calls": result.used.calls,
        "prompt_tokens": result.used.prompt_tokens,
        "completion_tokens": result.used.completion_tokens,
        "stopped": result.stopped,
        "output": result.output,
    }


class RecordFolder:
    """The `--out` folder, which contains a line for each episode, and the output of each episode's programs."""

    def __init__(self, path: Path) -> None:
        self._lines = private_folder(path) / RECORDS
        self._outputs = private_folder(path / OUTPUTS)

    def output(self, episode: str) -> Path:
        """Return the path of the file for an agent's output."""
        return self._outputs / f"{episode}.txt"

    def played(self) -> Counter[str]:
        """Return how many episodes of each task earlier runs have finished, with a reward or aborted at a limit.

        If the last line was cut short when a run was killed, the line does not count, and a newline is appended to it.
        """
        if not self._lines.exists():
            return Counter()
        text = self._lines.read_bytes()
        if text and not text.endswith(b"\n"):
            with self._lines.open("ab") as lines:
                lines.write(b"\n")
        return Counter(filter(None, map(_played_task, text.splitlines())))

    def add(self, task: AgentTask, result: PlayedEpisode | LostEpisode) -> None:
        with self._lines.open("ab") as lines:
            lines.write(msgspec.json.encode(record_of(task, result)) + b"\n")


def _played_task(line: bytes) -> str:
    """Return the task id of a record whose episode will not be played again, or "" for any other line."""
    try:
        record = msgspec.json.decode(line, type=dict[str, Any])
    except msgspec.MsgspecError:
        return ""
    is_over = record.get("reward") is not None or record.get("lost") == LossReason.LIMIT
    return str(record.get("task_id", "")) if is_over else ""


def mean_of(rewards: Sequence[float]) -> str:
    """Return the mean as text, or "-" if there are no rewards."""
    return f"{sum(rewards) / len(rewards):.3f}" if rewards else "-"


class FailuresInARow:
    """Counts, for each task, the infrastructure failures since an episode was last played to its end."""

    def __init__(self, tasks: int) -> None:
        self._is_one_task = tasks == 1
        self._failed: Counter[str] = Counter()

    def add(self, task: AgentTask, result: PlayedEpisode | LostEpisode) -> str:
        """Count an episode. Return why the next episodes are expected to fail too, or "" if they are not.

        If there are several tasks, half of `FAILURES_IN_A_ROW` must come from tasks other than the one that failed
        most: one bad task says nothing about the others.
        """
        if isinstance(result, PlayedEpisode):
            self._failed.clear()
        elif result.loss == LossReason.INFRA:
            self._failed[task.task_id] += 1
            total, most = self._failed.total(), max(self._failed.values())
            if total >= FAILURES_IN_A_ROW and (self._is_one_task or total - most >= FAILURES_IN_A_ROW // 2):
                return f"{total} infrastructure failures in a row, the last: {result.why}"
        return ""


class RolloutTally:
    """Counts the episodes of a rollout. `total` is None if the rollout ends after a number of trainer steps instead."""

    def __init__(self, total: int | None) -> None:
        self.total = total
        self.rewards: list[float] = []
        self.running = 0
        self.stopped: Counter[str] = Counter()
        self.lost: Counter[str] = Counter()
        self.steps = 0
        self._complaint = ""  # latest error of the reward command
        self._rewards_before = 0  # number of rewards before the newest step

    def stepped(self, steps: int) -> list[float]:
        """Record that the trainer has now made this many steps, and return the rewards added since the previous
        call."""
        since, self._rewards_before, self.steps = self.rewards[self._rewards_before :], len(self.rewards), steps
        return since

    def add(self, result: PlayedEpisode | LostEpisode) -> None:
        if isinstance(result, LostEpisode):
            self.lost[f"{result.loss}: {result.why}"] += 1
            return
        self.rewards.append(result.reward)
        self._complaint = result.complaint or self._complaint
        if result.stopped is not None:
            self.stopped[result.stopped] += 1

    def line(self) -> str:
        """Return the progress in one line."""
        done = f"{len(self.rewards)}/{self.total}" if self.total is not None else f"{len(self.rewards)}"
        lost = f", {self.lost.total()} lost" if self.lost else ""
        steps = f", {self.steps} steps" if self.steps else ""
        complaint = f", {self._said()}" if self._said() else ""
        mean = mean_of(self.rewards)
        return f"{done} episodes, mean reward {mean}, {self.running} running{lost}{steps}{complaint}"

    def summary(self) -> Iterator[str]:
        """Yield the lines of the final summary."""
        steps = f"; the trainer has made {self.steps} steps" if self.steps else ""
        yield f"{len(self.rewards)} episodes, mean reward {mean_of(self.rewards)}{steps}"
        if self._said():
            yield f"  {self._said()}"
        for reason, count in self.stopped.most_common():
            yield f"  {count} were stopped at a limit: {reason}"
        for why, count in self.lost.most_common():
            yield f"  {count} lost: {why}"

    def _said(self) -> str:
        """Return a message with the reward command's latest error, or "" if any reward so far is not 0."""
        return f"the reward command failed: {self._complaint}" if self._complaint and not any(self.rewards) else ""
