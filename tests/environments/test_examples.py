"""The example of several agents, with a scripted model and values by hand."""

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

from bombus import RolloutBudgets, Task
from bombus.environments.rollout import Rollout
from tests.environments.scripted import CREDENTIALS, ScriptedModel

EXAMPLES = Path(__file__).parents[2] / "examples"
TASK = Task(task_id="2+3", main_query="What is 2 plus 3?", metadata={"answer": "5"})


@pytest.fixture
def kind(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(EXAMPLES)
    yield importlib.import_module("solve_rewrite_select").SolveRewriteSelect
    for name in ("solve_rewrite_select", "common"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("said", "rewards", "is_success"),
    [
        # two solvers and one rewriter are right, and the selector takes the right rewrite: 1.2 times each
        (["5", "6", "It is 5", "none", "so 5", "7", "0"], [1.2, 0, 1.2, 0, 1.2, 0, 1.2], True),
        # it takes the wrong one: 0.8 times each, and nothing for itself
        (["5", "6", "It is 5", "none", "so 5", "7", "1"], [0.8, 0, 0.8, 0, 0.8, 0, 0], False),
        # it takes one that is not there
        (["5", "6", "It is 5", "none", "so 5", "7", "Answer 9"], [0.8, 0, 0.8, 0, 0.8, 0, 0], False),
        # it says nothing of use
        (["5", "6", "It is 5", "none", "so 5", "7", "?"], [0.8, 0, 0.8, 0, 0.8, 0, 0], False),
        # no rewrite is valid, so that nobody is asked to select
        (["5", "6", "It is 5", "none", "", "?"], [0.8, 0, 0.8, 0, 0, 0], False),
    ],
)
async def test_everybody_gains_from_a_right_choice(
    kind: Any, said: list[str], rewards: list[float], is_success: bool
) -> None:
    model = ScriptedModel(*said)
    output = await Rollout(kind, RolloutBudgets(turns_max=7), transport=model)(TASK, CREDENTIALS)
    roles = [headers["x-bombus-role"] for headers in model.headers]
    assert roles == ["solver"] * 3 + ["rewriter"] * 3 + ["selector"] * (len(said) - 6)
    assert isinstance(output.reward, dict)
    assert list(output.reward.values()) == pytest.approx(rewards)
    assert output.is_success is is_success


async def test_nothing_right_is_no_reward_and_no_crash(kind: Any) -> None:
    output = await Rollout(kind, transport=ScriptedModel(otherwise=""))(TASK, CREDENTIALS)
    assert (output.reward, output.is_success) == (0.0, False)
