"""What no request for completions may lack, and the forms that are taken, whatever its dialect."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from bombus.errors import Code, Refused
from bombus_gateway.anthropic.request import read_messages
from bombus_gateway.openai.request import read_chat
from bombus_gateway.responses.request import read_response_request

USER: dict[str, Any] = {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    ("read", "body"),
    [
        (read_chat, {"messages": []}),
        (read_messages, {"messages": [], "system": "be kind"}),
        (read_response_request, {}),
        (read_response_request, {"input": [], "tools": []}),
        (read_response_request, {"input": [{"type": "web_search_call"}, {"type": "mcp_list_tools"}]}),
        (read_response_request, {"input": [{"type": "additional_tools", "tools": []}]}),
    ],
)
def test_a_conversation_without_a_message_is_refused(read: Callable[[bytes], object], body: dict[str, Any]) -> None:
    with pytest.raises(Refused) as refused:
        read(json.dumps({"model": "m", **body}).encode())
    assert refused.value.code == Code.MALFORMED


@pytest.mark.parametrize("body", [{"instructions": "say hi"}, {"instructions": "say hi", "input": []}, {"input": ""}])
def test_instructions_alone_and_an_empty_text_can_be_answered(body: dict[str, Any]) -> None:
    (message,) = read_response_request(json.dumps({"model": "m", **body}).encode()).completion.messages
    assert message["content"] in ("say hi", "")


def asked(**more: Any) -> dict[str, Any]:
    return {"messages": [USER], **more}


def calling(**more: Any) -> dict[str, Any]:
    return {"messages": [USER, {"role": "assistant", "tool_calls": [{"id": "c", **more}]}]}


def used(**more: Any) -> dict[str, Any]:
    return {
        "messages": [USER, {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", **more}]}]
    }


CALL_ITEM = {"type": "function_call", "call_id": "c", "name": "f"}


@pytest.mark.parametrize(
    ("read", "body", "arguments"),
    [
        (read_chat, calling(function={"name": "f", "arguments": None}), ""),
        (read_chat, calling(type=None, function={"name": "f", "arguments": "{}"}), "{}"),
        (read_chat, calling(type="custom", custom={"name": "f", "input": "x"}), '{"input":"x"}'),
        (read_chat, calling(type="custom", custom={"name": "f", "input": None}), '{"input":""}'),
        (read_messages, used(input=None), "{}"),
        (read_response_request, {"input": [{**CALL_ITEM, "arguments": None}]}, ""),
    ],
)
def test_a_call_of_another_form_is_a_call_and_null_is_nothing(
    read: Callable[[bytes], Any], body: dict[str, Any], arguments: str
) -> None:
    message = read(json.dumps({"model": "m", **body}).encode()).completion.messages[-1]
    assert message["tool_calls"] == [{"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}]


@pytest.mark.parametrize(
    ("read", "body"),
    [
        (read_chat, asked(top_p=0)),
        (read_messages, asked(top_p=0)),
        (read_response_request, {"input": "hi", "top_p": 0}),
    ],
)
def test_the_least_top_p_is_one_that_replicas_take(read: Callable[[bytes], Any], body: dict[str, Any]) -> None:
    assert 0 < read(json.dumps({"model": "m", **body}).encode()).completion.sampling.top_p < 0.001


@pytest.mark.parametrize(("stop", "stops"), [("", ()), ([""], ()), (["", "x"], ("x",))])
def test_an_empty_stop_text_ends_nothing(stop: Any, stops: tuple[str, ...]) -> None:
    assert read_chat(json.dumps({"model": "m", **asked(stop=stop)}).encode()).completion.stops == stops


@pytest.mark.parametrize(
    "more",
    [
        {"user": 7},
        {"metadata": [], "store": "yes", "prompt_cache_key": 1, "prompt_cache_retention": {}, "safety_identifier": 5},
        {"messages": [{"role": "assistant", "content": "a", "reasoning": {"text": "x"}, "annotations": {}}, USER]},
        {"messages": [{"role": "assistant", "tool_calls": [{"index": "0", "function": {"name": "f"}}]}, USER]},
    ],
)
def test_what_nobody_needs_may_have_any_value(more: dict[str, Any]) -> None:
    assert read_chat(json.dumps({"model": "m", **asked(**more)}).encode()).completion.unsupported == ()


@pytest.mark.parametrize("item", [{"content": {"a": 1}}, {"id": 5}, {"summary": "x"}, {"content": 3, "id": {}}])
def test_an_item_of_an_unknown_type_may_have_any_form(item: dict[str, Any]) -> None:
    body = {"model": "m", "input": [USER, {"type": "mystery", **item}]}
    (left_out,) = read_response_request(json.dumps(body).encode()).completion.unsupported
    assert left_out.field == "input.1"
