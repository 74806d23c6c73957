"""Tests that bodies which would fail later are refused while they are read."""

import json
from typing import Any

import pytest

from bombus.errors import Code, Refused
from bombus_gateway.openai.request import BadParameter, read_chat, read_completion

DEEP = b"[" * 5000 + b"]" * 5000
USER = {"role": "user", "content": "hi"}


def calling(arguments: str) -> dict[str, Any]:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def chat(*messages: dict[str, Any], **more: Any) -> bytes:
    return json.dumps({"model": "m", "messages": [USER, *messages], **more}).encode()


@pytest.mark.parametrize("arguments", ['{"a": "\\ud800"}', "[" * 5000 + "]" * 5000, "[" * 200 + "]" * 200])
def test_arguments_with_half_a_character_or_nested_too_deeply_are_refused(arguments: str) -> None:
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
        chat(tools=[{"type": "function", "function": {"name": "f", "parameters": json.loads("[" * 200 + "]" * 200)}}]),
        chat().replace(b'"hi"', b'"\xed\xa0\x80"'),
        chat().replace(b'"hi"', b'"\\ud800"'),
    ],
)
def test_a_body_that_is_nested_too_deeply_or_is_not_unicode_is_refused(body: bytes) -> None:
    with pytest.raises(Refused) as refused:
        read_chat(body)
    assert refused.value.code == Code.MALFORMED


def test_a_prompt_that_is_nested_too_deeply_is_refused() -> None:
    with pytest.raises(Refused, match="nested too deeply"):
        read_completion(b'{"model": "m", "prompt": ' + DEEP + b"}")
