"""The programs of docs/environments.md run as they are printed."""

import asyncio
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from bombus import Rollout, Task
from bombus.bus import Bus
from bombus.cli import main
from bombus.environments.budgets import RolloutBudgets
from tests.environments.scripted import CREDENTIALS, ScriptedModel, calls
from tests.environments.test_rollout_on_a_hive import JOB
from tests.gateway.openai_hive import gateway_hive, says
from tests.tasks.model_server import model_server

PAGE = (Path(__file__).parents[2] / "docs/environments.md").read_text()
TILL, TRAINING, PLAYED, DEBATE = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
TASK = Task(task_id="37", main_query="Tea or coffee?", metadata={"cents": 37})


def run(*programs: str) -> dict[str, Any]:
    """Run programs one after another, and return their names."""
    names: dict[str, Any] = {"__name__": "page"}
    for program in programs:
        exec(program, names)
    return names


async def test_the_class_of_the_page_is_played() -> None:
    model = ScriptedModel(calls(("insert", {"coin": 3})), calls(("insert", {"coin": 1, "count": 37})))
    output = await Rollout(run(TILL)["Till"], transport=model)(TASK, CREDENTIALS)
    assert output.reward == 1.0 - 0.1
    assert output.is_success is True
    assert model.shown(1) == ["<error>Tool failed: ValueError: there is no coin of 3 cents</error>"]


async def test_the_program_of_the_page_trains_it(bus: Bus) -> None:
    async with gateway_hive(bus, JOB) as served:
        call = {"name": "insert", "arguments": {"coin": 1, "count": 37}}
        served.replica.otherwise = says(f"<tool_call>\n{json.dumps(call)}\n</tool_call>")
        program = TRAINING.replace("http://127.0.0.1:10086", served.base_url)
        names = await asyncio.to_thread(run, TILL, program)
        assert [output.reward for output in names["outputs"]] == [1.0, 1.0]
        await served.until(lambda engine: len(engine.pool) == 2)


def test_the_program_of_the_page_plays_it_without_a_hive(capsys: pytest.CaptureFixture[str]) -> None:
    call = {"name": "insert", "arguments": '{"coin": 1, "count": 37}'}
    answer = {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": call}]}
    with model_server(lambda messages: answer) as server:
        run(TILL, PLAYED.replace("http://127.0.0.1:8000", server))
    assert capsys.readouterr().out.startswith("1.0 {")


async def test_the_agents_of_the_page_are_rewarded_by_role() -> None:
    model = ScriptedModel("Tea.", "Coffee.", "1")
    output = await Rollout(run(DEBATE)["Debate"], transport=model)(TASK, CREDENTIALS)
    assert output.reward == {"1": 0.0, "2": 1.0, "3": 1.0}


async def test_the_agents_of_the_page_are_scored_where_a_budget_ends_their_play() -> None:
    rollout = Rollout(run(DEBATE)["Debate"], RolloutBudgets(turns_max=2), transport=ScriptedModel("Tea.", "Coffee."))
    assert (await rollout(TASK, CREDENTIALS)).reward == 0.0


def test_the_class_of_the_page_passes_validation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_env.py").write_text(TILL)
    (tmp_path / "tasks.jsonl").write_text('{"cents": 37}\n{"cents": 4}\n')
    (command,) = re.findall(r"^bombus (env validate .*)$", PAGE, re.MULTILINE)
    assert main(command.split()) == 0, capsys.readouterr()
    assert "  gold         ok      reward 1" in capsys.readouterr().out
    sys.modules.pop("my_env")


def test_the_defaults_of_the_page_are_those_of_the_budgets() -> None:
    told = dict(re.findall(r"^\| `(\w+)` \| ([\d,]+) ", PAGE, re.MULTILINE))
    assert {name: float(value.replace(",", "")) for name, value in told.items()} == {
        name: float(value) for name, value in RolloutBudgets().model_dump().items()
    }
