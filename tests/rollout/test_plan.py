"""Command lines of `bombus rollout`."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from bombus.cli import main
from bombus.hive.events import Method
from bombus.rollout.plan import RolloutOptions, plan_of, shortage_of_tasks
from bombus.rollout.presets import PRESETS, ApiDialect
from bombus.rollout.process import StopReason
from bombus.rollout.watch import EpisodeLimits
from bombus.sdk.types import EpisodeUsage, PoolInformation
from tests.rollout.hive import repository, write_tasks


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_tasks(tmp_path, {"prompt": "the quick", "task_id": "a"})
    repository(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def options(**given: object) -> RolloutOptions:
    return RolloutOptions.model_validate({"task": "tasks.jsonl", "agent": "true", "reward": "true", **given})


@pytest.mark.parametrize(
    ("typed", "why"),
    [
        ("--agent 'true {issue}' --reward ./check.sh", "--agent has the field {issue}, which task a does not have"),
        ("--agent true --reward './check.sh {issue}'", "--reward has the field {issue}, which task a does not have"),
        ("--agent true --reward true --sandbox 'env {box}'", "--sandbox has the field {box}, which task a does not"),
        ("--agent true --reward ./judge.sh", "--reward: there is no program ./judge.sh in "),
        ("--agent nosuchagent --reward true", "--agent: there is no program nosuchagent on the PATH"),
        ("--agent true --reward ../repo/check.sh", "--reward: ../repo/check.sh is outside the workspace"),
        ("--agent true --reward ./", "--reward: "),
        ("--agent true --reward true -n 0", "-n 0 is refused: it must be"),
        ("--agent true --reward true --timeout-s 0", "--timeout-s 0.0 is refused: it must be"),
        ("--agent true --reward true --steps 1 --eval", "--eval cannot be combined with --steps"),
        ("--agent true --reward true --url hive:10086", "--url: server_url 'hive:10086' must begin with http://"),
        ("--agent true --reward true --scratch none", "--scratch none is not a folder"),
        ("--agent true --reward true --out tasks.jsonl", "--out tasks.jsonl cannot be made: "),
        ("--agent true --reward true --preset cluade", "there is no preset 'cluade'"),
        (
            "--agent 'env {prompt}' --reward true --preset codex --dialect chat",
            "--dialect is for agents without a preset",
        ),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_claimed(
    folder: Path, capsys: pytest.CaptureFixture[str], typed: str, why: str
) -> None:
    import shlex

    code = main(
        ["rollout", "--task", "tasks.jsonl", "--workspace", "repo", "--url", "http://no.test", *shlex.split(typed)]
    )
    assert code == 2
    assert capsys.readouterr().err.startswith(f"bombus rollout: {why}")


def test_without_a_workspace_a_program_of_it_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rollout", "--task", "tasks.jsonl", "--agent", "true", "--reward", "./check.sh"]) == 2
    assert "there is no program ./check.sh in an empty workspace: give --workspace" in capsys.readouterr().err


def test_an_agent_with_a_preset_gets_its_dialect_and_another_gets_all(folder: Path) -> None:
    plan = plan_of(options(agent="true -p {prompt}", preset="claude"))
    assert plan.preset is PRESETS["claude"]
    assert plan.dialects == (ApiDialect.MESSAGES,)
    assert plan.agent.words == (
        "true",
        "--tools=Bash,Edit,Read,Write",
        "--dangerously-skip-permissions",
        "-p",
        "{prompt}",
    )
    assert plan_of(options()).dialects == tuple(ApiDialect)
    assert plan_of(options(dialect=["chat"])).dialects == (ApiDialect.CHAT,)


def test_tasks_are_played_once_unless_epochs_or_steps_say_otherwise(folder: Path) -> None:
    assert plan_of(options()).epochs == 1
    assert plan_of(options(epochs=3)).epochs == 3
    assert plan_of(options(steps=3)).epochs is None
    assert plan_of(options(steps=3, epochs=2)).epochs == 2


def test_a_tilde_is_expanded_where_a_shell_leaves_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder))
    assert options(out="~/runs", task="~/tasks.jsonl").out == folder / "runs"
    with pytest.raises(ValidationError, match="~nobodyhere/runs is in the home directory of a user who does not exist"):
        options(out="~nobodyhere/runs")


@pytest.mark.parametrize(
    ("calls", "tokens", "reason"),
    [(2, 99, None), (3, 0, StopReason.TURNS), (0, 100, StopReason.TOKENS), (9, 900, StopReason.TURNS)],
)
def test_a_limit_is_reached_by_what_was_recorded(calls: int, tokens: int, reason: StopReason | None) -> None:
    limits = EpisodeLimits(turns_max=3, tokens_max=100)
    used = EpisodeUsage(calls=calls, prompt_tokens=10_000, completion_tokens=tokens)
    assert limits.reason_to_stop(used) == reason
    assert EpisodeLimits().reason_to_stop(used) is None


@pytest.mark.parametrize(
    ("method", "batch", "is_short"),
    [(Method.ENOUGH_TASKS, 1, False), (Method.ENOUGH_TASKS, 2, True), (Method.ENOUGH_EPISODES, 2, False)],
)
def test_fewer_tasks_than_a_batch_has_are_told(folder: Path, method: Method, batch: int, is_short: bool) -> None:
    pool = PoolInformation(sample_collection_method=method, completed_task_target=batch)
    assert ("but --task has 1" in shortage_of_tasks(plan_of(options()), pool)) == is_short
