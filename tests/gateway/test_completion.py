"""A completion while it is generated: what is read in it, and what is left when it cannot be read."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import pytest

from bombus.hive.generation import Tokens
from bombus.hive.records import FinishReason, Span, pack_logprobs, pack_tokens
from bombus_gateway.call.completion import Completion
from bombus_gateway.call.request import CompletionRequest
from bombus_gateway.text.deltas import Delta, DeltaReader, TextDelta
from bombus_gateway.text.rendering import TextModel
from tests.gateway.openai_hive import TEXT, tokens_of
from tests.gateway.test_renderer import REASONING, model, user


@dataclass
class FailingReader:
    """Holds back the text from `at` on, and fails when it has read so many letters, or at the end."""

    at: int
    fails_at: int
    read: str = ""

    def feed(self, text: str) -> list[Delta]:
        before, self.read = len(self.read), self.read + text
        if len(self.read) >= self.fails_at:
            raise IndexError("a bug")
        return [TextDelta(self.read[before : self.at])] if before < self.at else []

    def finish(self) -> list[Delta]:
        raise IndexError("a bug")


@dataclass
class FailingModel:
    """The text model of the tests with that reader."""

    read: FailingReader

    @property
    def tokenizer(self) -> Any:
        return TEXT.tokenizer

    @property
    def renderer(self) -> "FailingModel":
        return self

    def reader(self, prompt: bytes, tools: Sequence[Any]) -> DeltaReader:
        return self.read


@pytest.mark.parametrize("fails_at", [5, 9, 1000])
def test_an_answer_that_cannot_be_read_is_its_text(fails_at: int, caplog: pytest.LogCaptureFixture) -> None:
    """A bug in the reading of calls must not lose what was sampled, nor what the client pays for."""
    model = cast(TextModel, FailingModel(FailingReader(at=3, fails_at=fails_at)))
    completion = Completion(model, CompletionRequest(chat=True), b"", "call", 0)
    tokens = tokens_of("the quick fox", end=False)
    for token in tokens:
        completion.feed(Tokens(version=0, tokens=pack_tokens([token]), logprobs=pack_logprobs([-1.0])))
    completion.end(FinishReason.STOP)
    assert completion.text() == "the quick fox"
    assert completion.misread
    assert "could not be parsed" in caplog.text
    choice = completion.choice()
    assert choice.token_ids() == tokens
    assert choice.message == {"role": "assistant", "content": "the quick fox"}


TWO_CALLS = "\n".join(f'<tool_call>\n{{"name": "{name}", "arguments": {{}}}}\n</tool_call>' for name in ("f", "g"))
TOOLS = tuple({"type": "function", "function": {"name": name}} for name in ("f", "g"))


@pytest.mark.parametrize("logprobs", [False, True])
@pytest.mark.parametrize("portion", [1, 7, 1000])
def test_where_one_call_is_asked_for_an_answer_ends_with_the_token_that_closes_the_first(
    portion: int, logprobs: bool
) -> None:
    tokens = tokens_of(TWO_CALLS)
    request = CompletionRequest(
        chat=True, tools=TOOLS, parse_tool_calls=True, one_call="parallel_tool_calls", logprobs=logprobs
    )
    completion = Completion(TEXT, request, b"", "call", 0)
    for at in range(0, len(tokens), portion):
        part = tokens[at : at + portion]
        if not completion.done:
            completion.feed(
                Tokens(version=3, tokens=pack_tokens(part), logprobs=pack_logprobs([-token / 1000 for token in part]))
            )
    choice = completion.choice()
    assert choice.finish == FinishReason.TOOL_CALLS
    assert [call["function"]["name"] for call in completion.calls()] == ["f"]
    assert TEXT.tokenizer.decode(choice.token_ids()).strip() == TWO_CALLS[: TWO_CALLS.index("</tool_call>") + 12]
    assert choice.spans == (Span(3, 0, len(choice.token_ids())),)
    again = Completion(TEXT, request, b"", "call", 0)
    again.replay(choice)
    assert again.choice() == choice


def test_an_answer_without_a_call_goes_on_where_one_call_is_asked_for() -> None:
    request = CompletionRequest(chat=True, tools=TOOLS, parse_tool_calls=True, one_call="parallel_tool_calls")
    completion = Completion(TEXT, request, b"", "call", 0)
    tokens = tokens_of("the quick fox", end=False)
    completion.feed(Tokens(version=0, tokens=pack_tokens(tokens), logprobs=pack_logprobs([-1.0] * len(tokens))))
    completion.end(FinishReason.STOP)
    assert (completion.text(), completion.finish) == ("the quick fox", "stop")


@pytest.mark.parametrize("portion", [1, 3, 100])
def test_the_tokens_of_reasoning_are_those_with_its_text(portion: int) -> None:
    made = model(REASONING)
    prompt = pack_tokens(made.renderer.render([user("the")], []))
    completion = Completion(made, CompletionRequest(chat=True), prompt, "call", 0)
    tokens = made.tokenizer.encode("\njumps over</think>the dog<|end|>")
    for start in range(0, len(tokens), portion):
        part = tokens[start : start + portion]
        completion.feed(Tokens(version=0, tokens=pack_tokens(part), logprobs=pack_logprobs([-1.0] * len(part))))
    completion.end(FinishReason.STOP)
    assert completion.message() == {"role": "assistant", "content": "the dog", "reasoning_content": "jumps over"}
    assert completion.choice().reasoning_tokens == completion.reasoned == len(made.tokenizer.encode("jumps over"))
