"""`bombus env validate`: what is wrong with a class is found before it is trained on."""

import asyncio
import itertools
import subprocess
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest

from bombus import Task
from bombus.cli import main
from bombus.environments.loading import load_class, read_environment_tasks
from bombus.environments.plain.description import describe
from bombus.environments.plain.marks import reward, success
from bombus.environments.plain.play import AgentCall, PlayAgents
from bombus.environments.plain.validation import ClassValidation
from bombus.errors import Refused
from tests.environments.small_environments import Counter

TASK = Task(task_id="t1", metadata={"goal": 3})


async def problems(kind: type, *, needs_gold: bool = False) -> dict[str, tuple[str, ...]]:
    """Return what each check finds wrong with a class."""
    found = await ClassValidation(kind, describe(kind), needs_gold=needs_gold).check(TASK)
    return {checked.check: checked.problems for checked in found if checked.problems}


async def test_a_sound_class_passes_every_check() -> None:
    assert await problems(Counter, needs_gold=True) == {}
    checked = await ClassValidation(Counter, describe(Counter)).check(TASK)
    assert [one.check for one in checked] == ["plays", "gold", "range", "determinism", "isolation", "leaks"]
    assert [one.detail for one in checked[:2]] == ["reward -0.5 for doing nothing", "reward 1.5"]


class Shared(Counter):
    """Keeps its count in the class."""

    everybody: dict[str, Any] = {}  # noqa: RUF012 - that is what is wrong with it

    def reset(self, task: Task) -> str:
        first = super().reset(task)
        Shared.everybody["count"] = 0
        self.state = Shared.everybody
        return first


class Unjudged:
    """Says nothing of success, and opens in another way each time."""

    openings = 0

    def reset(self, task: Task) -> str:
        Unjudged.openings += 1
        self.state = 0
        return f"This is opening {Unjudged.openings}."

    def raise_it(self) -> None:
        """Raise the state."""
        self.state = 1

    @reward
    def raised(self, state: int) -> float:
        return float(state)

    def gold(self, task: Task) -> list[object]:
        return [("raise_it", {}), "done"]


async def test_other_first_messages_are_found_and_no_success_has_to_be_told() -> None:
    found = await problems(Unjudged, needs_gold=True)
    assert found["determinism"] == ("On a second run, it began with different messages.",)
    assert "gold" not in found


async def test_instances_that_share_something_are_found() -> None:
    assert await problems(Shared) == {
        "isolation": (
            "While another instance was being played, the reward `reached` was 1 instead of 0.",
            "While another instance was being played, its success was True instead of False.",
        )
    }


class Leaky(Counter):
    """Leaves everything behind."""

    _numbers = itertools.count()
    _stop = threading.Event()
    _kept: list[Any] = []  # noqa: RUF012 - so that nothing is collected

    async def reset(self, task: Task) -> str:  # type: ignore[override]
        number = next(Leaky._numbers)
        thread = threading.Thread(target=Leaky._stop.wait, name=f"leaky-{number}", daemon=True)
        thread.start()
        waiting = asyncio.create_task(asyncio.Event().wait(), name=f"waiting-{number}")
        handle, _ = tempfile.mkstemp(prefix="leaky-")
        process = subprocess.Popen(["sleep", "1000"])  # noqa: ASYNC220 - it is to be left behind
        Leaky._kept += [thread, waiting, handle, process]
        return super().reset(task)


async def test_threads_tasks_files_and_processes_that_are_left_are_named() -> None:
    try:
        found = await problems(Leaky)
    finally:
        Leaky._stop.set()
        for each in Leaky._kept:
            if isinstance(each, subprocess.Popen):
                each.kill()
                each.wait()
            elif isinstance(each, asyncio.Task):
                each.cancel()
    assert list(found) == ["leaks"]
    said = " ".join(found["leaks"])
    kinds = (
        "threads (leaky-",
        "tasks of the loop (waiting-",
        "open files (/",
        "processes (sleep ",
        "files on the disk (/",
    )
    for what in (*kinds, "files on the disk (/"):
        assert f"After `close`, it leaves behind 1 {what}" in said


class Chance(Counter):
    _numbers = itertools.count()

    @reward
    def luck(self) -> float:
        return float(next(Chance._numbers))


class Generous(Counter):
    @reward
    def much(self) -> float:
        return 1.01


async def test_rewards_by_chance_and_rewards_out_of_their_range_are_found() -> None:
    # nothing, then gold, then gold once more
    assert (await problems(Chance))["determinism"] == ("On a second run, the reward `luck` was 2 instead of 1.",)
    assert await problems(Generous) == {"range": ("The reward `much` was 1.01, but its declared range is 0 to 1.",)}


class Unsolved(Counter):
    def gold(self, task: Task) -> list[object]:
        return [("add", {"amount": "much"}), ("add", {"amount": 1})]


class NoSolution(Counter):
    def gold(self, task: Task) -> list[object]:
        return [{"name": "add"}]


class Broken(Counter):
    def reset(self, task: Task) -> str:
        raise OSError("no simulator")


async def test_a_gold_solution_that_solves_nothing_is_found() -> None:
    first, second, third = (await problems(Unsolved))["gold"]
    assert first.startswith("A call of the gold solution failed: the arguments are wrong: amount: ")
    assert second == "The gold solution does not count as a success."
    assert third == ("The gold solution earns -0.5, but doing nothing earns -0.5, so there is nothing to learn.")
    assert (await problems(NoSolution))["plays"][0].startswith(
        "It cannot be played: NoSolution.gold returned a list that is not a solution: it must return a list of "
    )
    place = f"test_validation.py, line {Broken.reset.__code__.co_firstlineno + 1}"
    assert await problems(Broken) == {
        "plays": (f"It cannot be played: Broken.reset failed: OSError: no simulator ({place}).",)
    }


class Quiz:
    """Asks one agent, and is solved by `5`."""

    async def play(self, task: Task, agents: PlayAgents) -> None:
        self.text = (await agents["solver"].ask("2+3?")).text

    @reward(role="solver")
    def right(self) -> float:
        return float(self.text == "5")

    @success
    def solved(self) -> bool:
        return self.text == "5"

    def gold(self, task: Task) -> list[str]:
        return ["5"]


class WrongQuiz(Quiz):
    def gold(self, task: Task) -> list[str]:
        return ["6"]


async def test_a_class_with_play_is_answered_by_its_gold_solution() -> None:
    assert await problems(Quiz, needs_gold=True) == {}
    assert (await problems(WrongQuiz))["gold"][0] == "The gold solution does not count as a success."


class Uneven(Quiz):
    """Rewards two calls with 2 and 0, which is 1 on average."""

    async def play(self, task: Task, agents: PlayAgents) -> None:
        await super().play(task, agents)
        await agents["solver"].ask("and 3+2?")

    @reward(role="solver")
    def uneven(self, calls: list[AgentCall]) -> list[float]:
        return [2.0, 0.0]


async def test_the_range_of_a_reward_holds_for_each_call() -> None:
    assert (await problems(Uneven))["range"] == ("The reward `uneven` was 2, but its declared range is 0 to 1.",)


# ---- the command ----


def test_the_command_prints_a_table_and_fails_with_a_sentence_for_each_problem(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text('{"task_id": "three", "goal": 3}\n\n{"prompt": "Count.", "metadata": {"goal": 5}}\n')
    name = f"{__name__}:Unsolved"
    assert main(["env", "validate", f"{Counter.__module__}:Counter", "--task", str(tasks), "--gold"]) == 0
    assert capsys.readouterr().out.splitlines()[:3] == [
        "tests.environments.small_environments:Counter: tools 3, rewards 2, metrics 1, tasks 2 of 2",
        "  plays        ok      reward -0.5 for doing nothing",
        "  gold         ok      reward 1.5",
    ]
    assert main(["env", "validate", name, "--task", str(tasks)]) == 1
    printed = capsys.readouterr()
    assert "  gold         FAILED  for 2 of 2 tasks" in printed.out
    assert "three: The gold solution does not count as a success." in printed.err
    assert "tasks-3: The gold solution does not count as a success." in printed.err
    tasks.write_text('{"task_id": "one"}\n{"task_id": "one", "goal": 3}\n')
    assert main(["env", "validate", f"{Counter.__module__}:Counter", "--task", str(tasks), "--gold"]) == 1
    printed = capsys.readouterr()
    assert "  plays        FAILED  for 1 of 2 tasks" in printed.out
    assert "one (task 1 of the file): It cannot be played: " in printed.err
    assert main(["env", "validate", f"{__name__}:Path"]) == 1
    assert "Path cannot be used as an environment:" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("Counter", "write module:Class"),
        ("nowhere:Counter", "nowhere:Counter cannot be imported: ModuleNotFoundError"),
        ("tests.environments.small_environments:Nothing", "cannot be imported: AttributeError"),
        ("tests.environments.small_environments:asyncio", "is of type module, not a class"),
    ],
)
def test_what_is_not_a_class_is_refused(name: str, why: str) -> None:
    with pytest.raises(Refused, match=why):
        load_class(name)


def test_tasks_are_read_line_by_line(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text('{"prompt": "go", "goal": 3, "metadata": {"a": 1}}\n')
    assert read_environment_tasks(path) == [Task(task_id="tasks-1", main_query="go", metadata={"a": 1, "goal": 3})]
    for text, why in (("", "has no task"), ("[1]", "line 1 is not a task"), ('{"task_id": 5}', "line 1 is not a task")):
        path.write_text(text)
        with pytest.raises(Refused, match=why):
            read_environment_tasks(path)


async def test_a_class_that_rewards_doing_nothing_passes_with_a_warning() -> None:
    class Generous(Counter):
        @reward
        def came(self) -> float:
            return 1.0

    checked = await ClassValidation(Generous, describe(Generous)).check(TASK)
    assert [one.check for one in checked if one.warning] == ["plays"]
    assert checked[0].warning.startswith("Doing nothing earns a reward of ")
    assert not checked[0].problems
