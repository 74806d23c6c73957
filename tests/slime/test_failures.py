"""What slime's hooks raise has its kind on the log, and nothing of it is trained."""

from pathlib import Path
from typing import Any

import pytest

from bombus.errors import BombusError
from bombus.hive.failures import FailureKind
from tests.gateway.openai_hive import GatewayHive, says
from tests.slime.test_driver import ANSWER, HOOKS, JOB, imports, model, options_of, played

__all__ = ["JOB", "imports", "model"]  # the job of `served`, and fixtures


@pytest.mark.parametrize(
    ("hooks", "kind"),
    [
        ({"custom_generate_function_path": "raises"}, FailureKind.CLIENT),
        ({"custom_generate_function_path": "raises_after_an_answer"}, FailureKind.CLIENT),
        ({"custom_generate_function_path": "generate_and_give_up"}, FailureKind.ENVIRONMENT),
        ({"custom_rm_path": "reward_that_raises"}, FailureKind.GRADER),
        ({"custom_rm_path": "reward_of_a_judge_that_is_away"}, FailureKind.GRADER),
        ({"custom_rm_path": "group_reward_that_raises", "group_rm": True}, FailureKind.GRADER),
        ({"custom_rm_path": "reward_of_nonsense"}, FailureKind.GRADER),
        ({"custom_rm_path": "no_reward"}, FailureKind.GRADER),
    ],
)
async def test_a_hook_that_fails_is_aborted_with_its_kind(
    served: GatewayHive, model: str, tmp_path: Path, hooks: dict[str, Any], kind: FailureKind
) -> None:
    served.replica.otherwise = says(ANSWER)
    named = {name: f"{HOOKS}:{value}" if name.endswith("_path") else value for name, value in hooks.items()}
    with pytest.raises(BombusError, match="8 groups in a row were lost"):
        await played(options_of(served, model, tmp_path, **named))
    await served.until(lambda engine: not engine.open)
    counters = served.engine.counters
    assert counters.aborted_by[kind] >= 8
    assert (counters.ended, counters.ended_by, counters.trained, served.engine.pool) == (0, {}, 0, {})
    assert set(counters.aborted_by) == {kind}


async def test_a_sample_that_was_cut_has_the_budget_beside_its_reward(
    served: GatewayHive, model: str, tmp_path: Path
) -> None:
    served.replica.otherwise = says(ANSWER)
    await played(options_of(served, model, tmp_path, custom_generate_function_path=f"{HOOKS}:is_cut"))
    await served.until(lambda engine: len(engine.pool) == 2)
    assert served.engine.counters.ended_by == {FailureKind.TOKENS: 2}
