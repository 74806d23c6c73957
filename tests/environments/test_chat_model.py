"""What a model is asked, and how often: fields of a program's own, limits of tokens, answers that cannot be read."""

import httpx
import pytest

from bombus import Rollout, RolloutBudgets, Task
from tests.environments.scripted import CREDENTIALS, ScriptedModel
from tests.environments.worlds import Counter


@pytest.mark.parametrize(("own", "asked"), [(None, 1000), (64, 64), (5000, 1000)])
async def test_an_answer_is_as_long_as_the_program_and_the_budget_both_allow(own: int | None, asked: int) -> None:
    model = ScriptedModel()
    sampling = {"temperature": 0.5} if own is None else {"temperature": 0.5, "max_tokens": own}
    rollout = Rollout(Counter, RolloutBudgets(tokens_max=1000 + 2), sampling=sampling, transport=model)
    await rollout(Task(main_query="three", metadata={"goal": 3}), CREDENTIALS)
    assert model.requests[0]["max_tokens"] == asked
    assert model.requests[0]["temperature"] == 0.5


async def test_an_answer_that_cannot_be_unpacked_is_asked_for_again() -> None:
    packed = httpx.Response(200, headers={"content-encoding": "gzip"}, stream=httpx.ByteStream(b"this is not gzip"))
    model = ScriptedModel(packed)
    result = await Rollout(Counter, transport=model)(Task(main_query="three", metadata={"goal": 3}), CREDENTIALS)
    assert len(model.requests) == 2
    assert result.reward is not None
