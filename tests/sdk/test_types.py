"""The types that a program makes: tasks and outcomes."""

import json
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from bombus import Task, WorkflowOutput
from bombus.environments.kinds import RolloutScores
from bombus.errors import Refused
from bombus.hive.episodes import reward_forms_of, reward_number
from bombus.sdk.errors import BadReward
from bombus.sdk.running import checked_output
from bombus_gateway.swarm.bodies import WorkflowOutputBody, parse


def test_a_field_that_a_task_or_an_outcome_does_not_have_is_refused_and_not_lost() -> None:
    with pytest.raises(ValidationError, match=r"prompt\s+Extra inputs are not permitted"):
        Task(prompt="2 plus 2 =")  # type: ignore[call-arg]
    with pytest.raises(ValidationError, match=r"success\s+Extra inputs are not permitted"):
        WorkflowOutput(reward=1.0, success=True)  # type: ignore[call-arg]
    assert Task(main_query="2 plus 2 =", metadata={"prompt": "?"}).metadata == {"prompt": "?"}


@pytest.mark.parametrize(
    "given", [0.5, True, np.float32(0.5), np.array([[0.5]]), torch.tensor(0.5), torch.tensor([0.5]), Fraction(1, 2)]
)
def test_a_number_is_one_whatever_library_it_is_of(given: Any) -> None:
    assert reward_number(given) in (0.5, 1.0)
    assert reward_forms_of(given) == reward_number(given)
    assert RolloutScores(reward=given, rewards={"a": given}).reward == WorkflowOutput(reward=given).reward


@pytest.mark.parametrize(
    "given", ["0.5", b"1", [0.5], {"a": 1}, np.array([0.5, 1]), torch.zeros(2), object(), 1j, None]
)
def test_what_is_not_one_number_is_refused_with_the_forms_that_are(given: Any) -> None:
    with pytest.raises(ValueError, match=r"a reward must be a number \(int, float or bool.* not"):
        reward_number(given)
    with pytest.raises(ValueError, match="a reward must be a number"):
        RolloutScores(reward=given)


def test_an_episode_may_have_a_reward_for_each_call() -> None:
    each = np.array([0.5, 1.0])
    assert [reward_forms_of(given) for given in ([0.5, 1], tuple(each), each)] == [[0.5, 1.0]] * 3
    assert reward_forms_of({"c1": np.float64(1)}) == {"c1": 1.0}


@pytest.mark.parametrize("given", ["0.5", ["0.5"], {"c1": "1"}, object()])
def test_an_outcome_of_another_form_is_refused_wherever_it_is_given(given: Any) -> None:
    with pytest.raises(ValidationError, match="a reward must be a number"):
        WorkflowOutput(reward=given)
    with pytest.raises(BadReward, match=r"neither an outcome nor a reward: a reward must be a number"):
        checked_output(given)
    if type(given) is not object:
        with pytest.raises(Refused, match="a reward must be a number"):
            parse(WorkflowOutputBody, json.dumps({"reward": given}).encode())
