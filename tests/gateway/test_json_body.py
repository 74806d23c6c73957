"""Bodies that JavaScript writes of texts that were cut inside a character, in each dialect."""

import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from bombus_gateway.anthropic.request import read_messages
from bombus_gateway.call.request import CompletionRequest
from bombus_gateway.decoding.json_body import decode_body
from bombus_gateway.openai.request import read_chat
from bombus_gateway.responses.request import read_response_request

# (as it stands in the body, what is read)
HALVES = [
    (r"cut here \ud83d", "cut here \ufffd"),
    (r"\udc1d the other half", "\ufffd the other half"),
    (r"\ud83d\ud83d\udc1d\uDC1D", "\ufffd\U0001f41d\ufffd"),
    (r"\\ud83d \\\ud83d", "\\ud83d \\\ufffd"),
    (r"\n\"\ud83d\"\n", '\n"\ufffd"\n'),
]


def chat(text: str, arguments: str) -> CompletionRequest:
    call = f'{{"id": "c", "function": {{"name": "f", "arguments": {json.dumps(arguments)}}}}}'
    said = f'{{"role": "user", "content": "{text}"}}, {{"role": "assistant", "tool_calls": [{call}]}}'
    return read_chat(f'{{"model": "m", "messages": [{said}]}}'.encode()).completion


def messages(text: str, arguments: str) -> CompletionRequest:
    call = f'{{"type": "tool_use", "id": "c", "name": "f", "input": {arguments}}}'
    said = f'{{"role": "user", "content": "{text}"}}, {{"role": "assistant", "content": [{call}]}}'
    return read_messages(f'{{"model": "m", "messages": [{said}]}}'.encode()).completion


def responses(text: str, arguments: str) -> CompletionRequest:
    call = f'{{"type": "function_call", "call_id": "c", "name": "f", "arguments": {json.dumps(arguments)}}}'
    said = f'{{"role": "user", "content": "{text}"}}, {call}'
    return read_response_request(f'{{"model": "m", "input": [{said}]}}'.encode()).completion


@pytest.mark.parametrize("read", [chat, messages, responses])
@pytest.mark.parametrize(("written", "text"), HALVES)
def test_half_of_a_character_is_read_as_a_replacement_character(
    read: Callable[[str, str], CompletionRequest], written: str, text: str
) -> None:
    found = read(written, f'{{"text": "{written}"}}').messages
    assert found[0]["content"] == text
    assert json.loads(found[1]["tool_calls"][0]["function"]["arguments"]) == {"text": text}


def test_half_of_a_character_in_a_field_that_nobody_knows_does_no_harm() -> None:
    body = rb'{"\ud83d": 1, "x": "\ud83d", "model": "m", "messages": [{"role": "user", "content": "hi"}]}'
    assert [each.field for each in read_chat(body).completion.unsupported] == ["\ufffd", "x"]


def test_other_bodies_are_read_as_they_are() -> None:
    anything: msgspec.json.Decoder[Any] = msgspec.json.Decoder(Any)
    assert decode_body(anything, rb'"\ud83d\udc1d \\ud83d"') == "\U0001f41d \\ud83d"
