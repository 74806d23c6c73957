"""What a client demands of an answer becomes the form that an engine can hold it to, in the words of its model."""

import json
from typing import Any

import pytest
from msgspec.structs import replace

from bombus.config.documents import parse_job
from bombus.config.job import RolloutConfig
from bombus.hive.events import EpisodeType
from bombus.hive.generation import CallShape, Constraint
from bombus.hive.records import pack_tokens
from bombus.hive.state import EngineState
from bombus_gateway.call.admission import Admitted
from bombus_gateway.call.constraining import constraint_of, why_not_held
from bombus_gateway.call.planning import answer_constraint
from bombus_gateway.call.policy import why_unconstrained
from bombus_gateway.call.request import CompletionRequest, Demand
from bombus_gateway.text.rendering import TextModel
from tests.gateway.openai_hive import FILES, MODEL, TEXT

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS: tuple[dict[str, Any], ...] = (
    {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "wait"}},
)
ANY_CALL = Demand("tool_choice", tools=("weather", "wait"))
AS_JSON = Demand("response_format", schema={"enum": [1]})
OPENS, AFTER_NAME, CLOSES = '<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>"
BETWEEN = f"{CLOSES}\n{OPENS}"
WEATHER = CallShape("weather" + AFTER_NAME, json.dumps(SCHEMA))
WAIT = CallShape("wait" + AFTER_NAME, '{"type": "object"}')
NO_CALLS = TextModel(FILES, MODEL)  # its template has no place for tools
THINKS = TextModel(
    {
        **FILES,
        "chat_template.jinja": (
            b"{% for m in messages %}<|im_start|>{{ m.role }}\n"
            b"{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
            b"{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
        ),
    },
    MODEL,
)


def request(*demands: Demand, **more: Any) -> CompletionRequest:
    return CompletionRequest(chat=True, demands=demands, **more)


def with_tools(*demands: Demand, **more: Any) -> CompletionRequest:
    return request(*demands, tools=TOOLS, parse_tool_calls=True, **more)


def prompt_of(text: str, model: TextModel = TEXT) -> bytes:
    return pack_tokens(model.tokenizer.encode(text))


def form(asked: CompletionRequest) -> Constraint:
    assert why_not_held(asked, TEXT.renderer) == ""
    return constraint_of(asked, TEXT.renderer, prompt_of("hi"))


def test_json_is_demanded_by_its_schema() -> None:
    assert form(request(AS_JSON)) == Constraint(schema='{"enum": [1]}')


def test_calls_are_demanded_in_the_syntax_of_the_model_with_the_schemas_of_their_tools() -> None:
    expected = Constraint(calls=(WEATHER, WAIT), opens=OPENS, between=BETWEEN, closes=CLOSES)
    assert form(with_tools(ANY_CALL)) == expected
    assert form(with_tools(ANY_CALL, AS_JSON)) == expected, "an answer that has to be a call is no other JSON"


def test_a_named_tool_is_the_only_one() -> None:
    found = form(with_tools(Demand("tool_choice", tools=("wait",), once=True)))
    assert (found.calls, found.between) == ((WAIT,), "")


def test_one_call_is_not_followed_by_another() -> None:
    assert form(with_tools(ANY_CALL, one_call="parallel_tool_calls")).between == ""


def test_json_may_be_a_call_where_tools_may_be_called() -> None:
    """Agents with tools and a schema for their last answer call first, and answer then."""
    found = form(with_tools(AS_JSON))
    assert (found.schema, found.calls) == ('{"enum": [1]}', (WEATHER, WAIT))
    never = form(request(AS_JSON, tools=TOOLS, parse_tool_calls=False))
    assert (never.schema, never.calls) == ('{"enum": [1]}', ())


@pytest.mark.parametrize(
    ("prompt", "marks"),
    [
        ("assistant\n", ("<think>", "</think>")),
        ("assistant\n<think>\n", ("", "</think>")),
        ("assistant\n<think>\n\n</think>\n\n", ("", "")),
    ],
)
def test_reasoning_may_come_first_unless_it_is_over(prompt: str, marks: tuple[str, str]) -> None:
    found = constraint_of(request(AS_JSON), THINKS.renderer, prompt_of(prompt, THINKS))
    assert (found.thinks, found.thought) == marks


def test_what_cannot_be_said_has_a_reason() -> None:
    assert "does not write its tool calls as JSON" in why_not_held(with_tools(ANY_CALL), NO_CALLS.renderer)
    assert why_not_held(request(AS_JSON), NO_CALLS.renderer) == ""
    endless = {**FILES, "tokenizer_config.json": b"{}", "chat_template.jinja": b"{{ messages[-1].content }}"}
    assert "no token that ends" in why_not_held(request(AS_JSON), TextModel(endless, MODEL).renderer)
    quoted = {"type": "function", "function": {"name": 'say "hi"'}}
    asked = request(Demand("tool_choice", tools=('say "hi"',)), tools=(quoted,), parse_tool_calls=True)
    assert """the tool name 'say "hi"' has characters""" in why_not_held(asked, TEXT.renderer)


# ---- who decides --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", ["override", "refuse", "obey"])
def test_an_evaluation_is_constrained_where_a_replica_can(sampling: Any) -> None:
    rollout = RolloutConfig(sampling=sampling)
    assert why_unconstrained(rollout, EpisodeType.EVAL, True) == ""
    assert "no replica of this engine" in why_unconstrained(rollout, EpisodeType.EVAL, False)


def test_training_is_constrained_where_the_job_obeys_what_biases() -> None:
    for sampling in ("override", "refuse"):
        found = why_unconstrained(RolloutConfig(sampling=sampling), EpisodeType.TRAIN, True)
        assert "drawn only from the policy" in found
    assert why_unconstrained(RolloutConfig(sampling="obey"), EpisodeType.TRAIN, True) == ""
    assert "no replica" in why_unconstrained(RolloutConfig(sampling="obey"), EpisodeType.TRAIN, False)


ADMITTED = Admitted(EngineState(name="main"), parse_job({}), TEXT, "main-1-1", EpisodeType.EVAL, constrains=True)


def test_a_demand_is_either_held_or_named_with_the_reason() -> None:
    constraint, unmet = answer_constraint(ADMITTED, request(AS_JSON), prompt_of("hi"))
    assert (constraint, unmet) == (Constraint(schema='{"enum": [1]}'), ())
    constraint, unmet = answer_constraint(
        replace(ADMITTED, constrains=False), with_tools(ANY_CALL, AS_JSON), prompt_of("hi")
    )
    assert constraint is None
    assert [each.field for each in unmet] == ["tool_choice", "response_format"]
    assert answer_constraint(ADMITTED, with_tools(), prompt_of("hi")) == (None, ())


def test_one_call_needs_no_engine_unless_calls_are_a_list() -> None:
    torch_engine = replace(ADMITTED, constrains=False)
    assert answer_constraint(torch_engine, with_tools(one_call="parallel_tool_calls"), b"") == (None, ())
    unread = replace(torch_engine, model=NO_CALLS)
    (unmet,) = answer_constraint(unread, with_tools(one_call="parallel_tool_calls"), b"")[1]
    assert unmet.field == "parallel_tool_calls"
    assert answer_constraint(unread, request(one_call="parallel_tool_calls"), b"") == (None, ()), (
        "without tools there is none"
    )
