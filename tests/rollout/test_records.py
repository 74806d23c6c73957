"""What is counted and shown of a rollout."""

import io
from pathlib import Path

from bombus.hive.failures import FailureKind
from bombus.rollout.display import ProgressDisplay, described
from bombus.rollout.process import StopReason
from bombus.rollout.records import (
    FAILURES_IN_A_ROW,
    FailuresInARow,
    LossReason,
    LostEpisode,
    PlayedEpisode,
    RecordFolder,
    RolloutTally,
)
from bombus.rollout.tasks import AgentTask
from bombus.sdk.types import EpisodeUsage

TASK = AgentTask(task_id="a", prompt="p")
USED = EpisodeUsage(calls=3, prompt_tokens=100, completion_tokens=40)
PLAYED = PlayedEpisode(episode="main-1-1", reward=0.5, seconds=12.4, exit_code=0, used=USED)
STOPPED = PlayedEpisode(
    episode="main-1-2", reward=0.0, seconds=60, exit_code=-15, used=USED, stopped=StopReason.TIMEOUT
)
LOST = LostEpisode(
    loss=LossReason.INFRA,
    why="the reward command\x1b[31m could not start",
    failure=FailureKind.GRADER,
    episode="main-1-3",
)


def test_a_line_says_how_an_episode_went() -> None:
    assert described(TASK, PLAYED) == "a main-1-1: reward 0.5 (12 s, 3 calls, 40 tokens)"
    assert described(TASK, STOPPED) == "a main-1-2: reward 0 (60 s, 3 calls, 40 tokens, stopped: timeout)"
    assert described(TASK, LOST).startswith("a main-1-3: infrastructure failure: the reward command")


def test_the_summary_counts_rewards_limits_and_losses() -> None:
    tally = RolloutTally(8)
    assert tally.line() == "0/8 episodes, mean reward -, 0 running"
    for result in (PLAYED, STOPPED, LOST, LOST):
        tally.add(result)
    tally.running, tally.steps = 2, 1
    assert tally.line() == "2/8 episodes, mean reward 0.250, 2 running, 2 lost, 1 steps"
    assert list(tally.summary()) == [
        "2 episodes, mean reward 0.250; the trainer has made 1 steps",
        "  1 were stopped at a limit: timeout",
        f"  2 lost: infrastructure failure: {LOST.why}",
    ]


def test_each_step_of_the_trainer_has_the_rewards_since_the_one_before_it() -> None:
    tally = RolloutTally(None)
    for result in (PLAYED, STOPPED):
        tally.add(result)
    assert tally.stepped(1) == [0.5, 0.0]
    tally.add(PLAYED)
    assert tally.stepped(3) == [0.5]
    assert tally.stepped(4) == []
    assert tally.steps == 4


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_has_one_line_that_is_written_again_and_a_pipe_a_line_for_each_episode() -> None:
    terminal, pipe = Terminal(), io.StringIO()
    progress = RolloutTally(2).line()
    for stream in (terminal, pipe):
        tally = RolloutTally(2)
        display = ProgressDisplay(stream)
        display.changed(tally)
        display.finished(TASK, PLAYED, tally)
        display.finished(TASK, LOST, tally)
        tally.steps = 1
        display.stepped([0.5, 0.0], tally)
        display.close(tally)
    assert pipe.getvalue().splitlines() == [
        described(TASK, PLAYED),
        "a main-1-3: infrastructure failure: the reward command\\x1b[31m could not start",
        "step 1 after 0 s: mean reward 0.250 of 2 episodes",
        "0 episodes, mean reward -; the trainer has made 1 steps",
    ]
    last = terminal.getvalue().split("\r\x1b[2K")
    assert last[1:3] == [progress, progress]
    assert "could not start\n" in last[3]
    assert last[4].startswith("step 1 after 0 s:")


def test_what_the_reward_command_complains_of_is_shown_until_an_episode_has_a_reward() -> None:
    failed = PlayedEpisode(episode="e", reward=0.0, seconds=1, exit_code=0, used=USED, complaint="No module named x")
    tally = RolloutTally(8)
    tally.add(failed)
    assert tally.line().endswith(", the reward command failed: No module named x")
    assert list(tally.summary())[1] == "  the reward command failed: No module named x"
    tally.add(PLAYED)
    assert "failed" not in "".join([tally.line(), *tally.summary()])


def test_failures_that_an_episode_with_a_reward_interrupts_are_not_in_a_row() -> None:
    failures = FailuresInARow(tasks=1)
    for _ in range(3):
        assert not any(failures.add(TASK, LOST) for _ in range(FAILURES_IN_A_ROW - 1))
        assert not failures.add(TASK, PLAYED)
    assert not any(failures.add(TASK, LOST) for _ in range(FAILURES_IN_A_ROW - 1))
    assert failures.add(TASK, LOST) == f"16 infrastructure failures in a row, the last: {LOST.why}"


def test_failures_of_one_task_among_others_say_nothing_of_these() -> None:
    failures = FailuresInARow(tasks=2)
    assert not any(failures.add(TASK, LOST) for _ in range(5 * FAILURES_IN_A_ROW))
    other = AgentTask(task_id="b", prompt="p")
    half = FAILURES_IN_A_ROW // 2
    assert not any(failures.add(other, LOST) for _ in range(half - 1))
    assert failures.add(other, LOST)


def test_episodes_that_the_hive_took_back_or_that_met_a_limit_are_no_failures() -> None:
    failures = FailuresInARow(tasks=1)
    for loss in (LossReason.TAKEN_BACK, LossReason.LIMIT):
        lost = LostEpisode(loss=loss, why="w", failure=FailureKind.HIVE)
        assert not any(failures.add(TASK, lost) for _ in range(2 * FAILURES_IN_A_ROW))


def test_a_folder_says_what_was_played_also_after_a_kill_in_the_middle_of_a_line(tmp_path: Path) -> None:
    lines = tmp_path / "episodes.jsonl"
    lost = '{"task_id":"a","reward":null,"lost":"%s"}\n'
    whole = '{"task_id":"a","reward":0.0}\n{"task_id":"b","reward":1}\n' + lost % "infrastructure failure"
    lines.write_text(whole + lost % "over a limit" + '{"task_id":"b","rew')
    assert RecordFolder(tmp_path).played() == {"a": 2, "b": 1}
    assert lines.read_bytes().endswith(b'"rew\n'), "the next line begins anew"
