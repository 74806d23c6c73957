"""The forms in which clients of Anthropic's API write a conversation, and what becomes of each."""

import json
from typing import Any

import pytest

from bombus.errors import Code, Refused
from bombus_gateway.anthropic.request import read_messages
from bombus_gateway.call.request import CompletionRequest, Demand, RequestedSampling
from bombus_gateway.decoding.json_body import BadParameter
from bombus_gateway.text.message import ChatMessage

HI: dict[str, Any] = {"role": "user", "content": "hi"}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"name": "weather", "description": "Look outside.", "input_schema": SCHEMA}
USE = {"type": "tool_use", "id": "call_1", "name": "weather", "input": {"city": "Paris"}}
EPHEMERAL = {"type": "ephemeral"}


def body(*messages: dict[str, Any], **more: Any) -> bytes:
    return json.dumps({"model": "policy", "max_tokens": 64, "messages": messages or [HI], **more}).encode()


def read(*messages: dict[str, Any], **more: Any) -> CompletionRequest:
    return read_messages(body(*messages, **more)).completion


def messages_of(*messages: dict[str, Any], **more: Any) -> list[ChatMessage]:
    return list(read(*messages, **more).messages)


def left_out(*messages: dict[str, Any], **more: Any) -> list[str]:
    return [each.field for each in read(*messages, **more).unsupported]


def result(content: Any, **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": "call_1", "content": content, **more}


def text(words: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": words, **more}


def user(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": [*blocks]}


def assistant(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": [*blocks]}


# ---- messages -----------------------------------------------------------------------------------------------------


def test_text_and_one_block_of_it_are_the_same_message_whatever_is_cached() -> None:
    written = messages_of(HI, system="be a bee")
    assert written == [{"role": "system", "content": "be a bee"}, {"role": "user", "content": "hi"}]
    blocks = messages_of(user(text("hi", cache_control=EPHEMERAL)), system=[text("be a bee", cache_control=EPHEMERAL)])
    assert blocks == written


def test_blocks_of_a_users_text_are_on_lines_of_their_own() -> None:
    assert messages_of(user(text("<system-reminder>x</system-reminder>"), text(""), text("do it"))) == [
        {"role": "user", "content": "<system-reminder>x</system-reminder>\ndo it"}
    ]


def test_a_system_message_may_be_anywhere_and_joins_the_system_prompt_at_the_beginning() -> None:
    late = {"role": "system", "content": [text("a user has written", cache_control=EPHEMERAL)]}
    assert messages_of({"role": "system", "content": "more"}, HI, late, system="be a bee") == [
        {"role": "system", "content": "be a bee\nmore"},
        {"role": "user", "content": "hi"},
        {"role": "system", "content": "a user has written"},
    ]


def test_consecutive_messages_of_one_role_are_one_turn_with_the_results_before_the_text() -> None:
    assert messages_of(
        HI,
        assistant(text("let me ")),
        assistant(text("look"), USE),
        user(text("a reminder"), result("sunny")),
        user({**result("rain"), "tool_use_id": "call_2"}, text("go on")),
    ) == [
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "content": "let me look",
            "tool_calls": [
                {
                    "id": "call_1",
                    "type": "function",
                    "function": {"name": "weather", "arguments": '{"city": "Paris"}'},
                }
            ],
        },
        {"role": "tool", "content": "sunny", "tool_call_id": "call_1"},
        {"role": "tool", "content": "rain", "tool_call_id": "call_2"},
        {"role": "user", "content": "a reminder\ngo on"},
    ]


@pytest.mark.parametrize(
    ("content", "is_error", "shown"),
    [
        ("sunny", None, "sunny"),
        (None, False, ""),
        ([text("sun"), text("wind", cache_control=EPHEMERAL)], False, "sun\nwind"),
        ("no such city", True, "Error: no such city"),
        ("", True, "Error"),
        ("<tool_use_error>No such tool</tool_use_error>", True, "<tool_use_error>No such tool</tool_use_error>"),
        ([text("Error: exit code 1\nls: x")], True, "Error: exit code 1\nls: x"),
        ([{"type": "tool_reference", "tool_name": "WebFetch"}], None, "The tool WebFetch can be called now."),
    ],
)
def test_a_result_is_the_message_of_a_tool_and_says_that_it_is_an_error(
    content: Any, is_error: bool | None, shown: str
) -> None:
    (_, _, found) = messages_of(HI, assistant(USE), user(result(content, is_error=is_error)))
    assert found == {"role": "tool", "content": shown, "tool_call_id": "call_1"}


def test_thinking_is_the_reasoning_of_its_message_and_what_is_redacted_is_passed_over() -> None:
    thought = {"type": "thinking", "thinking": "hm", "signature": "x"}
    redacted = {"type": "redacted_thinking", "data": "secret"}
    (_, found, _) = messages_of(HI, assistant(thought, redacted, text("yes")), HI)
    assert found == {"role": "assistant", "content": "yes", "reasoning_content": "hm"}
    assert left_out(HI, assistant(thought, redacted, text("yes")), HI) == []


def test_calls_without_text_have_no_content_and_keep_the_spelling_of_their_numbers() -> None:
    raw = body(HI, assistant(USE), HI).replace(b'{"city": "Paris"}', b'{"n" : 5.0, "m": 12345678901234567890123}')
    (_, found, _) = read_messages(raw).completion.messages
    assert found["content"] is None
    assert found["tool_calls"][0]["function"]["arguments"] == '{"n" : 5.0, "m": 12345678901234567890123}'


def test_arguments_that_an_answer_has_wrapped_are_unwrapped() -> None:
    (_, found, _) = messages_of(HI, assistant({**USE, "input": {"INVALID_JSON": '{"city": '}}), HI)
    assert found["tool_calls"][0]["function"]["arguments"] == '{"city": '


def test_an_assistants_message_without_anything_is_an_empty_text() -> None:
    contents: tuple[Any, ...] = ("", [], None)
    for empty in contents:
        assert messages_of(HI, {"role": "assistant", "content": empty}, HI)[1] == {"role": "assistant", "content": ""}


# ---- tools --------------------------------------------------------------------------------------------------------


def test_tools_are_functions_as_templates_know_them() -> None:
    found = read(tools=[{**WEATHER, "type": "custom", "cache_control": EPHEMERAL}, {"name": "wait"}])
    assert found.tools == (
        {"type": "function", "function": {"name": "weather", "description": "Look outside.", "parameters": SCHEMA}},
        {"type": "function", "function": {"name": "wait"}},
    )
    assert found.parse_tool_calls
    assert found.unsupported == ()


def test_tools_of_the_server_are_named_as_unsupported() -> None:
    found = read(tools=[{"type": "web_search_20250305", "name": "web_search", "max_uses": 8}])
    assert (found.tools, found.parse_tool_calls) == ((), False)
    assert [each.field for each in found.unsupported] == ["tools.0.type"]
    assert "web_search_20250305" in found.unsupported[0].why


@pytest.mark.parametrize(
    ("kind", "name", "takes"),
    [
        ("bash_20250124", "bash", ["command", "restart"]),
        ("text_editor_20250728", "str_replace_based_edit_tool", ["command", "path", "view_range", "file_text"]),
    ],
)
def test_tools_that_the_client_runs_are_functions_with_their_schema(kind: str, name: str, takes: list[str]) -> None:
    request = read_messages(body(tools=[{"type": kind, "name": name}, {"type": "computer_20250124", "name": "screen"}]))
    (tool,) = request.completion.tools
    assert tool["function"]["name"] == name
    assert [*tool["function"]["parameters"]["properties"]][: len(takes)] == takes
    assert request.completion.parse_tool_calls
    assert [each.field for each in request.completion.unsupported] == ["tools.1.type"]
    assert request.server_tools == ("computer_20250124",)


def test_a_deferred_tool_is_left_out_until_a_reference_names_it() -> None:
    deferred = {**WEATHER, "name": "fetch", "defer_loading": True}
    found = read(tools=[deferred, WEATHER])
    assert [tool["function"]["name"] for tool in found.tools] == ["weather"]
    reference = user(result([{"type": "tool_reference", "tool_name": "fetch"}]))
    later = read(HI, assistant(USE), reference, tools=[deferred, WEATHER])
    assert [tool["function"]["name"] for tool in later.tools] == ["fetch", "weather"]
    assert found.unsupported == later.unsupported == ()


WAIT: dict[str, Any] = {"name": "wait", "input_schema": SCHEMA}


@pytest.mark.parametrize(
    ("choice", "is_read", "demanded"),
    [
        ({"type": "auto"}, True, []),
        ({"type": "none"}, False, []),
        ({"type": "any"}, True, [Demand("tool_choice", tools=("weather", "wait"))]),
        ({"type": "tool", "name": "wait"}, True, [Demand("tool_choice", tools=("wait",))]),
    ],
)
def test_a_choice_of_tools_may_demand_a_call(choice: dict[str, Any], is_read: bool, demanded: list[Demand]) -> None:
    found = read(tools=[WEATHER, WAIT], tool_choice=choice)
    assert found.parse_tool_calls is is_read
    assert list(found.demands) == demanded
    assert (found.unsupported, found.one_call) == ((), "")


def test_one_call_may_be_asked_for() -> None:
    found = read(tools=[WEATHER], tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert found.one_call == "tool_choice.disable_parallel_tool_use"
    assert (found.demands, found.unsupported) == ((), ())


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
def test_a_call_of_a_tool_that_is_not_there_is_unsupported(choice: dict[str, Any]) -> None:
    assert left_out(tool_choice=choice) == ["tool_choice"]


@pytest.mark.parametrize("field", ["output_config.format", "output_format"])
def test_an_answer_may_have_a_schema(field: str) -> None:
    form = {"type": "json_schema", "schema": SCHEMA}
    more: dict[str, Any] = {"output_format": form} if field == "output_format" else {"output_config": {"format": form}}
    assert read(**more).demands == (Demand(field, schema=SCHEMA),)
    with pytest.raises(BadParameter, match="needs a JSON schema, which must be an object"):
        read(output_format={"type": "json_schema", "schema": []})
    assert left_out(output_config={"format": {"type": "yaml"}}) == ["output_config.format"]
    assert left_out(output_config={"format": {}, "effort": "high"}) == []


# ---- parameters ---------------------------------------------------------------------------------------------------


def test_sampling_is_a_wish_and_max_tokens_may_be_missing() -> None:
    found = read(temperature=0, top_p=0.9, top_k=5, stop_sequences=["x"], stream=True)
    assert found.sampling == RequestedSampling(temperature=0, top_p=0.9, top_k=5, max_tokens=64)
    assert (found.stops, found.stream) == (("x",), True)
    assert read(max_tokens=None).sampling == RequestedSampling()


def test_what_claude_code_sends_beside_the_conversation_says_nothing() -> None:
    keeps = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
    assert (
        left_out(
            thinking={"type": "adaptive", "display": "omitted"},
            context_management=keeps,
            output_config={"effort": "high"},
            metadata={"user_id": "{}"},
            cache_control=EPHEMERAL,
            service_tier="auto",
            speed=None,
        )
        == []
    )


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({"output_format": {"type": "json_schema"}}, "output_format"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management"),
        ({"mcp_servers": [{"type": "url"}]}, "mcp_servers"),
        ({"container": "c1"}, "container"),
        ({"colour": "red"}, "colour"),
    ],
)
def test_what_would_change_the_answer_is_named(asked: dict[str, Any], named: str) -> None:
    assert left_out(**asked) == [named]


def test_blocks_that_are_not_text_are_named_and_left_out() -> None:
    image = {"type": "image", "source": {"type": "base64", "data": "x"}}
    document = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "x"}}
    search = {"type": "web_search_tool_result", "tool_use_id": "s", "content": {"type": "error"}}
    server = {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}}
    conversation = (user(image, text("what is it?"), document), assistant(server, search, USE), user(result([image])))
    assert left_out(*conversation) == [
        "messages.0.content.0",
        "messages.0.content.2",
        "messages.1.content.0",
        "messages.1.content.1",
        "messages.2.content.0.content.0",
    ]
    assert all(each.is_content for each in read(*conversation).unsupported), "a training episode is refused them"
    assert messages_of(*conversation)[0] == {"role": "user", "content": "what is it?"}


TEXT = {"type": "text", "media_type": "text/plain", "data": "bees dance"}
FOUND = {"type": "search_result", "source": "https://bees", "title": "Bees", "content": [text("they"), text("dance")]}


@pytest.mark.parametrize(
    ("block", "read_as"),
    [
        ({"type": "document", "source": TEXT}, "bees dance"),
        ({"type": "document", "source": TEXT, "title": "Bees", "citations": {"enabled": True}}, "Bees\nbees dance"),
        ({"type": "document", "source": {"type": "content", "content": "bees"}}, "bees"),
        ({"type": "document", "source": {"type": "content", "content": [text("bees"), text("dance")]}}, "bees\ndance"),
        (FOUND, "Bees\nhttps://bees\nthey\ndance"),
    ],
)
def test_documents_and_search_results_of_text_are_read_as_text(block: dict[str, Any], read_as: str) -> None:
    assert messages_of(user(block, text("what?"))) == [{"role": "user", "content": f"{read_as}\nwhat?"}]
    assert messages_of(user(result([block]))) == [{"role": "tool", "content": read_as, "tool_call_id": "call_1"}]
    assert left_out(user(block)) == left_out(user(result([block]))) == []


@pytest.mark.parametrize(
    "block",
    [
        {"type": "document"},
        {"type": "document", "source": {"type": "url", "url": "https://bees"}},
        {"type": "document", "source": {"type": "content", "content": [text("see"), {"type": "image"}]}},
        {**FOUND, "content": []},
    ],
)
def test_a_document_whose_text_is_not_there_is_named(block: dict[str, Any]) -> None:
    assert left_out(user(block, text("what?"))) == ["messages.0.content.0"]


def test_an_answer_that_the_client_began_is_named() -> None:
    assert left_out(HI, assistant(text("The answer is ("))) == ["messages"]


@pytest.mark.parametrize(
    ("wrong", "place"),
    [
        (body(user({"type": "text"})), "messages.0.content.0.text"),
        (body(HI, assistant({"type": "tool_use", "id": "x", "input": {}})), "messages.1.content.0.name"),
        (body(HI, assistant({**USE, "input": [1]})), "messages.1.content.0.input"),
        (body(user({"type": "tool_result", "content": "x"})), "messages.0.content.0.tool_use_id"),
        (body(user(result({"a": 1}))), "messages.0.content.0.content"),
        (body({"role": "robot", "content": "x"}), "messages[0].role"),
        (body(max_tokens=0), "max_tokens"),
        (body(tools=[{"name": ""}]), "tools.0.name"),
        (body(stop_sequences=[""]), "stop_sequences"),
        (body(HI, assistant(USE)).replace(b"Paris", b"\xff"), "messages.1.content.0.input"),
    ],
)
def test_what_is_wrong_is_refused_with_its_place(wrong: bytes, place: str) -> None:
    with pytest.raises(BadParameter) as refused:
        read_messages(wrong)
    assert (refused.value.code, refused.value.param) == (Code.MALFORMED, place)


def test_a_body_without_messages_is_refused() -> None:
    for wrong in (
        b"",
        b"[]",
        b'{"model": "x"}',
        b'{"model": "x", "messages": []}',
        b'{"messages": [{"role": "user"}]}',
    ):
        with pytest.raises(Refused):
            read_messages(wrong)
