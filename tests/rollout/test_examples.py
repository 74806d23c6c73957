"""The agents and rewards of `examples/`, as files: what they train is in docs/rollout.md."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from bombus import AsyncSwarmClient
from bombus.config.documents import parse_job
from bombus.rollout.tasks import AgentTask, read_tasks
from tests.gateway.openai_hive import GatewayHive, says
from tests.rollout.hive import Rolled, write_tasks

EXAMPLES = Path(__file__).parents[2] / "examples"
SHELL, NOTES, CLAUDE = EXAMPLES / "shell", EXAMPLES / "notes", EXAMPLES / "claude"
COMMANDS = {"first": "head", "last": "tail"}

with_curl = pytest.mark.skipif(shutil.which("curl") is None, reason="the agents of the examples use curl")


@pytest.mark.parametrize("example", [SHELL, NOTES, CLAUDE], ids=lambda path: path.name)
def test_the_job_and_the_tasks_of_an_example_are_read(example: Path) -> None:
    parse_job((example / "job.yaml").read_text())
    assert read_tasks(example / "tasks.jsonl")


@with_curl
async def test_the_shell_agent_is_rewarded_for_digits(
    served: GatewayHive, client: AsyncSwarmClient, tmp_path: Path
) -> None:
    served.replica.scripts.extend([says("12 is"), says("no")] * 2)
    rolled = Rolled(
        tmp_path,
        client,
        task=SHELL / "tasks.jsonl",
        workspace=SHELL,
        agent="./agent.sh",
        reward="./reward.sh",
        concurrency=1,
    )
    assert (await rolled.run()).rewards == [0.25, 0.0, 0.25, 0.0]


@with_curl
async def test_the_shell_agent_can_send_any_prompt(
    served: GatewayHive, client: AsyncSwarmClient, tmp_path: Path
) -> None:
    write_tasks(tmp_path, {"prompt": 'say "hi"\nand \\ bye'})
    rolled = Rolled(tmp_path, client, workspace=SHELL, agent="./agent.sh", reward="true")
    assert (await rolled.run()).rewards == [1.0]
    assert len(served.replica.requests) == 1


# ---- notes ----------------------------------------------------------------------------------------------------------


def notes_tasks() -> list[AgentTask]:
    return [task for name in ("tasks", "held_out") for task in read_tasks(NOTES / f"{name}.jsonl")]


@pytest.mark.parametrize("task", notes_tasks(), ids=lambda task: task.task_id)
def test_a_command_prints_the_answer_of_each_task(task: AgentTask) -> None:
    file, kind = task.task_id.split("-")
    printed = subprocess.run(
        [COMMANDS[kind], "-n", "1", f"{file}.txt"], cwd=NOTES / "workspace", capture_output=True, text=True, check=True
    ).stdout
    assert printed == task.fields["answer"] + "\n"
    assert task.prompt == f"Print the {kind} line of {file}.txt."


def test_no_file_is_both_trained_and_held_out() -> None:
    trained, held_out = (
        {task.task_id.split("-")[0] for task in read_tasks(NOTES / f"{name}.jsonl")} for name in ("tasks", "held_out")
    )
    assert not trained & held_out
    assert {f"{name}.txt" for name in trained | held_out} == {path.name for path in NOTES.rglob("*.txt")}


@with_curl
@pytest.mark.parametrize(
    ("reply", "reward", "answer"),
    [
        ("head -n 1 birds.txt", 1.0, "robin\n"),
        ("tail -n 1 birds.txt", 0.0, "osprey\n"),
        ("head -n 2 birds.txt", 0.0, ""),
        ("head -n 1 owls.txt", 0.0, ""),
        ("The first line is robin.", 0.0, ""),
        ('head -n 1 birds.txt\nas "you" said', 0.0, ""),
    ],
)
async def test_the_agent_of_the_notes_runs_a_command_and_is_rewarded_for_what_it_prints(
    client: AsyncSwarmClient, served: GatewayHive, tmp_path: Path, reply: str, reward: float, answer: str
) -> None:
    served.replica.scripts.append(says(reply))
    judge = f"sh -c 'touch answer.txt; cp answer.txt {tmp_path}; ./reward.sh robin'"
    assert await play_notes(client, tmp_path, reward=judge) == [reward]
    assert (tmp_path / "answer.txt").read_text() == answer


@with_curl
@pytest.mark.parametrize(
    "reply",
    [
        "touch here",
        "head -n 1 ../other.txt",
        "head -n 1 birds.txt; touch here",
        "head -n 1 $(touch here)",
        "head -n 1 birds.txt\ntouch here",
        "head -n 1 *.txt",
    ],
)
async def test_the_agent_of_the_notes_runs_nothing_else(
    client: AsyncSwarmClient, served: GatewayHive, tmp_path: Path, reply: str
) -> None:
    served.replica.scripts.append(says(reply))
    judge = "sh -c 'test ! -e here && test ! -e answer.txt && echo 0.25'"
    assert await play_notes(client, tmp_path, reward=judge) == [0.25]


async def play_notes(client: AsyncSwarmClient, folder: Path, **options: Any) -> list[float]:
    """Play one episode of the question for the first line of birds.txt."""
    task = {"prompt": "Print the first line of birds.txt.", "answer": "robin"}
    (folder / "tasks.jsonl").write_text(json.dumps(task))
    given = {"workspace": NOTES / "workspace", "agent": "./agent.sh", "reward": "./reward.sh {answer}", **options}
    return (await Rolled(folder, client, **given).run()).rewards
