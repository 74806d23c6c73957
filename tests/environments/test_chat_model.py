"""What a model is asked, and how often: fields of a program's own, limits of tokens, answers that cannot be read."""

import json

import httpx
import pytest

from bombus import InfraError, Rollout, RolloutBudgets, Task
from bombus.environments.chat_model import NoModelAnswer, OutageWarnings, answer_of
from tests.environments.scripted import CREDENTIALS, ScriptedModel
from tests.environments.small_environments import Counter


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


PARTS = [{"type": "thinking", "thinking": [{"type": "text", "text": "4?"}]}, {"type": "text", "text": "<answer>4"}]


def answered(**body: object) -> bytes:
    whole = {"choices": [{"message": {"role": "assistant", "content": "4"}}], **body}
    return json.dumps({"usage": {"prompt_tokens": 1, "completion_tokens": 1}, **whole}).encode()


def test_an_answer_in_parts_is_the_text_of_those_that_are_text() -> None:
    parts = [*PARTS, {"type": "text", "text": "</answer>"}, {"type": "image_url"}, "odd"]
    answer = answer_of(answered(choices=[{"message": {"role": "assistant", "content": parts}}]))
    assert answer.text == "<answer>4</answer>"
    assert answer.message == {"role": "assistant", "content": "<answer>4</answer>"}


@pytest.mark.parametrize("odd", [None, 7, ["x"]])
def test_an_answer_needs_neither_an_id_nor_a_fingerprint_of_any_form(odd: object) -> None:
    answer = answer_of(answered(id=odd, system_fingerprint=odd))
    assert (answer.text, answer.call, answer.versions) == ("4", "", ())


@pytest.mark.parametrize(
    ("error", "said"),
    [
        ({"message": "the provider is\noverloaded", "code": 502}, ": the provider is overloaded"),
        ("overloaded", ": overloaded"),
        ({"code": 7}, ": {'code': 7}"),
        (None, ""),
    ],
)
def test_an_error_that_comes_as_an_answer_is_told(error: object, said: str) -> None:
    for body in ({"error": error}, {"error": error, "choices": []}, {"error": error, "choices": None}):
        with pytest.raises(NoModelAnswer) as raised:
            answer_of(json.dumps(body).encode())
        assert str(raised.value) == f"the server's answer has no choice{said}"


async def test_a_server_that_does_not_answer_is_warned_of_while_it_is_asked_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = ScriptedModel(otherwise=httpx.ConnectError("refused"))
    budgets = RolloutBudgets(tool_s=4, turn_s=4, episode_s=4)
    with pytest.raises(InfraError):
        await Rollout(Counter, budgets, transport=model)(Task(metadata={"goal": 3}), CREDENTIALS)
    (warning,) = caplog.messages
    assert warning.startswith("the model's server is not answering; retrying: http://model.test/v1/: ")


def test_a_server_is_warned_of_once_until_it_answers(caplog: pytest.LogCaptureFixture) -> None:
    warnings = OutageWarnings(clock=iter([0.0, 0.5, 1.0, 2.0, 10.0, 10.5, 11.0]).__next__)
    for _ in range(4):
        warnings.asked_again("refused")
    assert len(caplog.messages) == 1
    warnings.answered()
    for _ in range(3):
        warnings.asked_again("refused")
    assert len(caplog.messages) == 2
