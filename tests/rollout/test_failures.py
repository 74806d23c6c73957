"""What fails in a rollout of commands has its kind on the log, and nothing of it is trained."""

import sys
from pathlib import Path
from typing import Any

import pytest

from bombus import AsyncSwarmClient, FailureKind
from bombus.rollout import episode, run
from bombus.rollout.process import StopReason
from bombus.rollout.reward import has_raised
from tests.gateway.openai_hive import GatewayHive, says
from tests.rollout.hive import AGENT, Rolled, repository, write_tasks

PYTHON = f"{sys.executable} -I -S"


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "FAILURE_PAUSE_S", 0.1)
    monkeypatch.setattr(episode, "LOOKS_FOR_CALLS", 1)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_tasks(tmp_path, {"prompt": "the quick", "task_id": "a"})
    repository(tmp_path)
    return tmp_path


async def rolled(folder: Path, client: AsyncSwarmClient, served: GatewayHive, **options: Any) -> Rolled:
    found = Rolled(folder, client, retries=0, **options)
    await found.run()
    await served.until(lambda engine: not engine.open)
    return found


def assert_untrained(served: GatewayHive, kind: FailureKind) -> None:
    counters = served.engine.counters
    assert (counters.aborted_by, counters.ended_by) == ({kind: 1}, {})
    assert (counters.ended, counters.trained, served.engine.pool) == (0, 0, {})


@pytest.mark.parametrize(
    "check",
    ["kill -9 $$", "exit 127", "echo nan", "echo 0,5", "echo 1e12", "sleep 600", "echo '{\"reward\": 1}'"],
)
async def test_a_reward_command_that_does_not_judge(
    served: GatewayHive, client: AsyncSwarmClient, folder: Path, check: str
) -> None:
    (folder / "repo" / "check.sh").write_text(f"#!/bin/sh\n{check}\n")
    found = await rolled(folder, client, served, reward_timeout_s=1.0 if "sleep" in check else 60.0)
    assert_untrained(served, FailureKind.GRADER)
    assert found.records()[0]["failure"] == "grader"


@pytest.mark.parametrize("check", ["raise KeyError('x')", "open('answer.json')", "import nothing_of_that_name"])
async def test_a_reward_command_that_prints_nothing_and_raises_is_no_zero(
    served: GatewayHive, client: AsyncSwarmClient, folder: Path, check: str
) -> None:
    (folder / "check.py").write_text(f"{check}\n")
    await rolled(folder, client, served, reward=f"{PYTHON} {folder}/check.py")
    assert_untrained(served, FailureKind.GRADER)


@pytest.mark.parametrize(
    "check",
    [
        "assert open('answer.txt').read() == 'something else'",
        "import sys; sys.exit('wrong')",
        "import runpy; runpy.run_path('work.py')",  # what the agent has written raises
        "import subprocess, sys; sys.exit(subprocess.run([sys.executable, 'work.py']).returncode)",
        "exec(open('work.py').read())",
    ],
)
async def test_a_verdict_by_the_exit_code_stays_one_and_so_does_work_that_raises(
    served: GatewayHive, client: AsyncSwarmClient, folder: Path, check: str
) -> None:
    (folder / "check.py").write_text(f"{check}\n")
    (folder / "repo/work.py").write_text("raise KeyError('the agent is wrong')\n")
    found = await rolled(folder, client, served, reward=f"{PYTHON} {folder}/check.py")
    assert found.rollout.tally.rewards == [0.0]
    assert served.engine.counters.aborted_by == {}


def test_only_the_end_of_the_errors_says_that_a_command_has_raised(tmp_path: Path) -> None:
    words = ["python", "/checks/check.py"]
    frames = 'Traceback (most recent call last):\n  File "/checks/check.py", line 3, in <module>\n    judge()\n'
    assert has_raised(f"warning\n{frames}KeyError: 'x'\n", words, tmp_path)
    assert has_raised(f"{frames}judging.Broken\n", words, tmp_path)
    assert not has_raised("", words, tmp_path)
    assert not has_raised(f"{frames}AssertionError: it is 3\n", words, tmp_path)
    assert not has_raised(f"{frames}KeyError: 'x'\n\nRan 1 test in 0.1s\n\nFAILED (errors=1)\n", words, tmp_path)
    assert not has_raised(f"{frames}KeyError: 'x'\n", ["sh", "/checks/check.sh"], tmp_path)


async def test_an_agent_that_makes_no_call(served: GatewayHive, client: AsyncSwarmClient, folder: Path) -> None:
    write_tasks(folder, {"prompt": "the quick", "task_id": "a"}, {"prompt": "silent", "task_id": "b"})
    agent = "sh -c 'case $BOMBUS_PROMPT in silent) exit 1;; esac; " + AGENT + " x 1'"
    await rolled(folder, client, served, agent=agent, concurrency=1)
    assert served.engine.counters.aborted_by == {FailureKind.CLIENT: 1}
    assert len(served.engine.pool) == 1


async def test_a_workspace_that_cannot_be_copied_claims_nothing_and_is_the_sandboxs(
    served: GatewayHive, client: AsyncSwarmClient, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bombus.rollout.workspace.COPY", ("false",))
    found = await rolled(folder, client, served)
    assert found.records()[0]["failure"] == "sandbox"
    assert served.engine.counters.claimed == 0


async def test_a_disk_that_is_full_at_the_end(
    served: GatewayHive, client: AsyncSwarmClient, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(episode, "check_room", full)
    await rolled(folder, client, served)
    assert_untrained(served, FailureKind.SANDBOX)


@pytest.mark.parametrize(
    ("limits", "kind"),
    [
        ({"turns_max": 1}, FailureKind.TURNS),
        ({"tokens_max": 1}, FailureKind.TOKENS),
        ({"timeout_s": 2.0}, FailureKind.TIME),
    ],
)
@pytest.mark.parametrize("on_limit", ["reward", "abort"])
async def test_a_limit_is_beside_the_reward_or_the_kind_of_the_abort(
    served: GatewayHive,
    client: AsyncSwarmClient,
    folder: Path,
    limits: dict[str, Any],
    kind: FailureKind,
    on_limit: str,
) -> None:
    agent = f"sh -c '{AGENT} x 1; exec sleep 600'"
    await rolled(folder, client, served, agent=agent, on_limit=on_limit, **limits)
    counters = served.engine.counters
    if on_limit == "abort":
        assert_untrained(served, kind)
    else:
        assert (counters.ended_by, counters.aborted_by) == ({kind: 1}, {})
        assert len(served.engine.pool) == 1


def test_each_reason_to_stop_an_agent_has_a_kind() -> None:
    kinds = {reason: reason.failure for reason in StopReason}
    assert kinds[StopReason.OVER] == FailureKind.HIVE
    assert all(kind.is_trained for reason, kind in kinds.items() if reason != StopReason.OVER)


async def test_an_agent_that_failed_while_no_replica_served(
    served: GatewayHive, client: AsyncSwarmClient, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served.replica.otherwise = says("ok")
    status = client.get_engine_status

    async def unserved() -> tuple[str, dict[str, Any]]:
        phase, found = await status()
        return phase, {**found, "serving_replicas": 0}

    client.get_engine_status = unserved  # type: ignore[method-assign]
    await rolled(folder, client, served, agent=f"sh -c '{AGENT} x 1; exit 3'")
    assert_untrained(served, FailureKind.MODEL)
