"""Jobs in real sandboxes: each begins undone, and is done by its gold command and by nothing that only looks so."""

import json
import shlex
from pathlib import Path

import pytest

from bombus.cli import main
from bombus.environments.backends.shell import ShellResult, ShellSandbox
from bombus.environments.kinds import ResetFailed, SandboxLost, Transcript
from bombus.environments.plain.environment import PlainEnvironment
from bombus.errors import Refused
from bombus.hive.failures import FailureKind
from bombus.sdk.types import Task
from bombus.tasks.kinds import TaskDraw, TaskSplit
from bombus.tasks.shell import JOBS, ShellEnvironment, ShellTasks, job_of
from tests.effort import effort
from tests.tasks.model_server import Conversation, model_server

DRAWN = ShellTasks().draw(TaskDraw(size=2 * len(JOBS)))
DONE = DRAWN[: effort(1, 2) * len(JOBS)]


@pytest.fixture
async def sandboxes() -> None:
    sandbox = ShellSandbox()
    try:
        await sandbox.start()
    except Refused as refused:
        pytest.skip(refused.why)
    finally:
        await sandbox.stop()


@pytest.mark.usefixtures("sandboxes")
@pytest.mark.parametrize("task", DONE, ids=lambda task: f"{task.metadata['job']}-{task.task_id[-1]}")
async def test_a_job_is_done_by_its_gold_command_alone(task: Task) -> None:
    environment = ShellEnvironment()
    try:
        await environment.reset(task)
        assert (await environment.is_left_so(), await environment.is_done()) == (0.0, False)
        await environment.run("echo wrong > answer.txt; echo wrong > sorted.txt")
        assert await environment.is_left_so() == 0.0
        await environment.run("rm answer.txt sorted.txt")
        ((_, arguments), _) = environment.gold(task)  # type: ignore[misc]
        await environment.run(arguments["command"])  # type: ignore[has-type]
        assert (await environment.is_left_so(), await environment.is_done()) == (1.0, True)
    finally:
        await environment.close()


@pytest.mark.usefixtures("sandboxes")
@pytest.mark.parametrize(
    ("job", "line"),
    [
        ("remove-empty", "find . -type f -empty -delete; for file in *; do : > $file; done"),
        ("remove-empty", "find . -type f -empty -delete; for file in *; do echo >> $file; done"),
        ("remove-empty", "find . -type f -empty -delete; touch new"),
        ("rename", "{gold}; for file in *.sh; do echo x > $file; done"),
        ("rename", "{gold}; mkdir more"),
        (
            "rename",
            'text=$(for file in *; do printf "%s=" "$file"; cat "$file"; echo; done); {gold}; rm *; echo > "$text"',
        ),
        ("count-lines", "{gold}; rm log.txt"),
        ("count-lines", "{gold}; sort -o log.txt log.txt"),
        ("count-lines", "{gold}; echo 1 >> answer.txt"),
        ("sum-column", "{gold}; : > table.csv"),
        ("largest", "{gold}; rm -r data"),
        ("largest", "{gold}; sed -i s,^,data/, answer.txt"),
        ("unique", "{gold}; mv sorted.txt words.txt; cp words.txt sorted.txt"),
        ("unique", "sort words.txt > sorted.txt"),
    ],
)
async def test_a_folder_that_only_looks_so_or_lost_what_it_had_is_not_paid(job: str, line: str) -> None:
    task = next(each for each in DRAWN if each.metadata["job"] == job)
    environment = ShellEnvironment()
    try:
        await environment.reset(task)
        await environment.run(line.replace("{gold}", job_of(task).gold))
        assert await environment.is_left_so() == 0.0
    finally:
        await environment.close()


@pytest.mark.usefixtures("sandboxes")
async def test_a_sandbox_that_runs_nothing_any_more_has_judged_nothing() -> None:
    class Breaking(ShellSandbox):
        is_broken = False

        async def run(self, command: str, timeout_s: float = 1.0) -> ShellResult:
            if self.is_broken:  # as where the kernel has no processes left
                return ShellResult(output="unshare: fork failed", code=1)
            return await super().run(command, timeout_s)

    sandbox = Breaking()
    await sandbox.start()
    try:
        environment = PlainEnvironment(ShellEnvironment(sandbox))
        await environment.open(next(each for each in DRAWN if each.metadata["job"] == "count-lines"))
        await sandbox.run("rm -f log.txt; mkfifo log.txt")  # the check hangs at what the model has left
        assert (await environment.score(Transcript())).reward == 0.0
        sandbox.is_broken = True
        with pytest.raises(SandboxLost, match="no longer runs commands: unshare: fork failed") as lost:
            await environment.score(Transcript())
        assert lost.value.failure == FailureKind.SANDBOX
    finally:
        await sandbox.stop()


@pytest.mark.usefixtures("sandboxes")
async def test_space_around_an_answer_and_files_beside_it_do_not_matter() -> None:
    task = next(each for each in DRAWN if each.metadata["job"] == "count-lines")
    environment = ShellEnvironment()
    try:
        await environment.reset(task)
        await environment.run(f"printf ' %s \\n\\n' {job_of(task).expected} > answer.txt; touch notes; mkdir more")
        assert await environment.is_left_so() == 1.0
    finally:
        await environment.close()


@pytest.mark.usefixtures("sandboxes")
async def test_what_a_command_prints_and_its_code_are_shown() -> None:
    environment = ShellEnvironment()
    await environment.reset(DRAWN[0])
    assert await environment.run("echo a; false") == "a\n(exit code 1)"
    assert await environment.run("true") == "(done, without output)"
    assert environment.failed_commands() == 1.0
    await environment.close()
    with pytest.raises(ResetFailed, match="was not set up"):
        await environment.run("true")


def test_jobs_are_made_from_seed_and_split() -> None:
    tasks = ShellTasks()
    assert tasks.draw(TaskDraw(size=12)) == DRAWN
    drawn = [
        {str(job_of(task)) for task in tasks.draw(TaskDraw(size=60, seed=seed, split=split))}
        for seed in (0, 1)
        for split in TaskSplit
    ]
    assert all(not one & other for at, one in enumerate(drawn) for other in drawn[:at])
    with pytest.raises(ResetFailed, match="must be one of count-lines"):
        job_of(Task(metadata={"job": "dance"}))


@pytest.mark.usefixtures("sandboxes")
def test_a_run_is_scored_by_what_is_left_in_the_folders(tmp_path: Path) -> None:
    gold = {task.main_query: job_of(task).gold for task in DRAWN}

    def works(messages: Conversation) -> dict[str, object]:
        if messages[-1]["role"] == "tool":
            return {"role": "assistant", "content": "Done."}
        function = {"name": "run", "arguments": json.dumps({"command": gold[messages[1]["content"]]})}
        call = {"id": "c", "type": "function", "function": function}
        return {"role": "assistant", "content": None, "tool_calls": [call]}

    out = tmp_path / "out"
    with model_server(works) as url:
        assert main(shlex.split(f"run --task shell --engine {url} -n 6 --at-once 2 --out {shlex.quote(str(out))}")) == 0
    scores = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(score["reward"], score["turns"]) for score in scores] == [(1.0, 2)] * 6
