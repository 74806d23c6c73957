"""Tests that bodies which would fail later are refused while they are read."""

import json
from typing import Any

import pytest

from bombus.errors import Code, Refused
from bombus_gateway.call.request import Demand
from bombus_gateway.decoding.json_body import BadParameter
from bombus_gateway.openai.request import read_chat, read_completion

DEEP = b"[" * 5000 + b"]" * 5000
USER = {"role": "user", "content": "hi"}


def calling(arguments: str) -> dict[str, Any]:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def chat(*messages: dict[str, Any], **more: Any) -> bytes:
    return json.dumps({"model": "m", "messages": [USER, *messages], **more}).encode()


@pytest.mark.parametrize("arguments", ["[" * 5000 + "]" * 5000, "[" * 200 + "]" * 200])
def test_arguments_that_are_nested_too_deeply_are_refused(arguments: str) -> None:
    with pytest.raises(BadParameter) as refused:
        read_chat(chat(calling(arguments)))
    assert refused.value.code == Code.MALFORMED
    assert refused.value.param == "messages.1.tool_calls.0.function.arguments"


@pytest.mark.parametrize("arguments", ['{"a": "\\ud83d\\ude00"}', '{"a": "\\ud800', "no JSON " + "[" * 200])
def test_arguments_with_whole_characters_or_that_are_not_json_are_taken(arguments: str) -> None:
    (_, message) = read_chat(chat(calling(arguments))).completion.messages
    assert message["tool_calls"][0]["function"]["arguments"] == arguments


@pytest.mark.parametrize(
    "body",
    [
        chat()[:-1] + b', "metadata": {"a": ' + DEEP + b"}}",
        chat()[:-1] + b', "tools": [{"type": "function", "function": {"name": "f", "parameters": ' + DEEP + b"}}]}",
        chat().replace(b'"hi"', b'"\xed\xa0\x80"'),
        chat()[:-1] + b', "a\xffb": 1}',
    ],
)
def test_a_body_that_is_nested_too_deeply_or_is_not_unicode_is_refused(body: bytes) -> None:
    with pytest.raises(Refused) as refused:
        read_chat(body)
    assert refused.value.code == Code.MALFORMED


def test_a_prompt_that_is_nested_too_deeply_is_refused() -> None:
    with pytest.raises(Refused, match="nested deeper"):
        read_completion(b'{"model": "m", "prompt": ' + DEEP + b"}")


# ---- the form of an answer ----------------------------------------------------------------------------------------

TWO: list[dict[str, Any]] = [{"type": "function", "function": {"name": name}} for name in ("f", "g")]
ALLOWED = {"mode": "required", "tools": [{"type": "function", "function": {"name": "g"}}, {"type": "web_search"}]}
OBJECT = {"type": "object"}


@pytest.mark.parametrize(
    ("more", "demanded"),
    [
        ({"tools": TWO, "tool_choice": "auto"}, []),
        ({"tools": TWO, "tool_choice": "none"}, []),
        ({"tools": TWO, "tool_choice": "required"}, [Demand("tool_choice", tools=("f", "g"))]),
        (
            {"tools": TWO, "tool_choice": {"type": "function", "function": {"name": "g"}}},
            [Demand("tool_choice", tools=("g",), once=True)],
        ),
        (
            {"tools": TWO, "tool_choice": {"type": "allowed_tools", "allowed_tools": ALLOWED}},
            [Demand("tool_choice", tools=("g",))],
        ),
        ({"response_format": {"type": "text"}}, []),
        ({"response_format": {"type": "json_object"}}, [Demand("response_format", schema=OBJECT)]),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"enum": [1]}}}},
            [Demand("response_format", schema={"enum": [1]})],
        ),
    ],
)
def test_what_is_demanded_of_an_answer_is_read(more: dict[str, Any], demanded: list[Demand]) -> None:
    completion = read_chat(chat(**more)).completion
    assert list(completion.demands) == demanded
    assert completion.unsupported == ()


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TWO, "tool_choice": {"type": "function", "function": {"name": "h"}}}, "tool_choice"),
        ({"tools": TWO, "tool_choice": {"type": "custom"}}, "tool_choice"),
        ({"tools": TWO, "tool_choice": "sometimes"}, "tool_choice"),
        ({"response_format": {"type": "grammar"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
    ],
)
def test_a_demand_that_makes_no_sense_is_unsupported(more: dict[str, Any], field: str) -> None:
    completion = read_chat(chat(**more)).completion
    assert [each.field for each in completion.unsupported] == [field]
    assert completion.demands == ()


def test_a_schema_is_an_object() -> None:
    schemas: list[Any] = [[], "x"]
    for schema in schemas:
        form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
        with pytest.raises(BadParameter, match="JSON schema"):
            read_chat(chat(response_format=form))


def test_one_call_is_asked_for_by_name() -> None:
    assert read_chat(chat(tools=TWO, parallel_tool_calls=False)).completion.one_call == "parallel_tool_calls"
    assert read_chat(chat(tools=TWO, parallel_tool_calls=True)).completion.one_call == ""
