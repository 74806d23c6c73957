"""Reading requests of the Responses API, in the forms in which harnesses send them."""

import json
from typing import Any

import pytest

from bombus.errors import Code
from bombus_gateway.call.request import Demand
from bombus_gateway.decoding.json_body import BadParameter
from bombus_gateway.responses.request import ResponsesRequest, read_response_request

CALL_ID = "0123456789abcdef" * 2
USER = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]}
CALLED = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
DONE = {"type": "function_call_output", "call_id": "c1", "output": "ok"}


def read(*items: Any, **more: Any) -> ResponsesRequest:
    return read_response_request(json.dumps({"model": "m", "input": [*items], **more}).encode())


def messages(*items: Any, **more: Any) -> list[Any]:
    return list(read(*items, **more).completion.messages)


def said(text: str, **more: Any) -> dict[str, Any]:
    return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}], **more}


def test_a_text_is_a_message_of_the_user_after_the_instructions() -> None:
    request = read_response_request(b'{"model": "m", "input": "hi", "instructions": "be kind"}')
    assert request.completion.messages == (
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "hi"},
    )


@pytest.mark.parametrize("role", ["system", "developer"])
def test_system_and_developer_items_are_the_developers(role: str) -> None:
    assert messages({"role": role, "content": "rules"}) == [{"role": "developer", "content": "rules"}]


def test_items_of_one_answer_are_one_message() -> None:
    """Codex sends reasoning with nulls filled in; litellm sends further fields; all of them are the same answer."""
    reasoning = {
        "type": "reasoning", "id": f"rs_{CALL_ID}_0", "summary": [{"type": "summary_text", "text": "hm"}],
        "content": None, "encrypted_content": None,
    }  # fmt: skip
    spoken = said("let me see", id=f"msg_{CALL_ID}_1", phase=None, caller=None, namespace=None)
    second = {**CALLED, "call_id": "c2", "id": f"fc_{CALL_ID}_3", "status": "completed"}
    found = messages(USER, reasoning, spoken, CALLED, second, DONE, said("done"), USER)
    assert found == [
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "answer_of": (CALL_ID, 0),
            "content": "let me see",
            "reasoning_content": "hm",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}},
                {"id": "c2", "type": "function", "function": {"name": "f", "arguments": "{}"}},
            ],
        },
        {"role": "tool", "content": "ok", "tool_call_id": "c1"},
        {"role": "assistant", "content": "done"},
        {"role": "user", "content": "hi"},
    ]


def test_the_content_of_an_answer_is_null_only_beside_calls() -> None:
    assert [message["content"] for message in messages(USER, CALLED, DONE, said(""))] == ["hi", None, "ok", ""]


def test_answers_of_two_calls_without_anything_between_stay_two() -> None:
    other = CALL_ID[::-1]
    found = messages(USER, said("one", id=f"msg_{CALL_ID}_0"), said("two", id=f"msg_{other}_0"), CALLED)
    assert [message["content"] for message in found] == ["hi", "one", "two"]
    assert "tool_calls" in found[2]


def test_custom_calls_and_namespaces_are_the_models_functions() -> None:
    custom = {"type": "custom_tool_call", "call_id": "c1", "name": "patch", "input": "+a", "namespace": None}
    inner = {**CALLED, "namespace": "agents", "call_id": "c2"}
    (answer,) = messages(custom, inner)
    assert [call["function"] for call in answer["tool_calls"]] == [
        {"name": "patch", "arguments": '{"input":"+a"}'},
        {"name": "agents__f", "arguments": "{}"},
    ]


def test_tools_are_shown_to_the_model_as_functions() -> None:
    function = {"type": "function", "name": "f", "description": "d", "parameters": {}, "strict": True}
    grammar = {"type": "grammar", "syntax": "lark", "definition": "start: A"}
    request = read(
        USER,
        {"type": "additional_tools", "role": "developer", "tools": [{**function, "name": "late"}]},
        tools=[
            function,
            {"type": "custom", "name": "patch", "description": "edits", "format": grammar},
            {"type": "namespace", "name": "agents", "tools": [function, {"type": "custom", "name": "say"}]},
            {"type": "web_search"},
            {"type": "tool_search", "execution": "client"},
        ],
    )
    functions = {tool["function"]["name"]: tool["function"] for tool in request.completion.tools}
    assert list(functions) == ["f", "patch", "agents__f", "agents__say", "late"]
    assert functions["f"] == {"name": "f", "description": "d", "parameters": {}}
    assert functions["patch"]["description"] == "edits\n\nThe input follows this lark grammar:\nstart: A"
    assert functions["patch"]["parameters"]["required"] == ["input"]
    assert [(form.namespace, form.name, form.is_custom) for form in request.forms.values()] == [
        ("", "patch", True),
        ("agents", "f", False),
        ("agents", "say", True),
    ]
    assert [each.field for each in request.completion.unsupported] == [
        "tools.strict", "tools.strict", "tools.3.type", "tools.4.type", "tools.strict",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("more", "fields"),
    [
        ({"text": {"format": {"type": "grammar"}}}, ["text.format"]),
        ({"text": {"format": {}}}, []),
        ({"text": {"format": {"type": "text"}, "verbosity": "low"}}, ["text.verbosity"]),
        ({"tool_choice": "required"}, ["tool_choice"]),
        ({"tool_choice": {"type": "function", "name": "f"}}, ["tool_choice"]),
        ({"tool_choice": "auto", "parallel_tool_calls": True}, []),
        ({"truncation": "auto"}, ["truncation"]),
        ({"include": ["message.output_text.logprobs"]}, ["top_logprobs"]),
        ({"novelty": 1, "nothing": None}, ["novelty"]),
        ({"reasoning": {"effort": "high", "summary": "auto"}, "store": False, "metadata": {"a": "b"}}, []),
        ({"client_metadata": {"a": 1}, "prompt_cache_key": "k", "service_tier": "auto", "user": "u"}, []),
    ],
)
def test_what_would_change_the_answer_is_unsupported_and_the_rest_is_taken(more: Any, fields: list[str]) -> None:
    assert [each.field for each in read(USER, **more).completion.unsupported] == fields


FUNCTION: dict[str, Any] = {"type": "function", "name": "f", "parameters": {}}
PATCH: dict[str, Any] = {"type": "custom", "name": "patch"}
SAY: dict[str, Any] = {"type": "function", "name": "say", "parameters": {}}
AGENTS: dict[str, Any] = {"type": "namespace", "name": "agents", "tools": [FUNCTION, SAY]}


@pytest.mark.parametrize(
    ("choice", "tools", "once"),
    [
        ("required", ("f", "patch", "agents__f", "agents__say"), False),
        ({"type": "custom", "name": "patch"}, ("patch",), True),
        ({"type": "function", "name": "f"}, ("f",), True),
        ({"type": "function", "name": "say"}, ("agents__say",), True),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "custom", "name": "patch"}]},
            ("patch",),
            False,
        ),
    ],
)
def test_a_choice_of_tools_may_demand_a_call(choice: Any, tools: tuple[str, ...], once: bool) -> None:
    completion = read(USER, tools=[FUNCTION, PATCH, AGENTS], tool_choice=choice).completion
    assert completion.demands == (Demand("tool_choice", tools=tools, once=once),)
    assert completion.unsupported == ()


def test_an_answer_may_have_a_schema_and_one_call() -> None:
    form = {"type": "json_schema", "name": "n", "schema": {"type": "integer"}}
    completion = read(USER, text={"format": form}, parallel_tool_calls=False).completion
    assert completion.demands == (Demand("text.format", schema={"type": "integer"}),)
    assert (completion.one_call, completion.unsupported) == ("parallel_tool_calls", ())
    either = read(USER, text={"format": {"type": "json_object"}}).completion
    assert either.demands == (Demand("text.format", schema={"type": "object"}),)


def test_images_and_items_of_a_server_are_unsupported_by_their_place() -> None:
    image = {"type": "input_image", "image_url": "data:"}
    search = {"type": "web_search_call", "id": "ws_1", "action": {}, "arguments": {"a": 1}}
    request = read({**USER, "content": [*USER["content"], image]}, search, {**DONE, "output": [image]})
    assert [each.field for each in request.completion.unsupported] == [
        "input.0.content.1",
        "input.1",
        "input.2.output.0",
    ]
    assert all(each.is_content for each in request.completion.unsupported), "a training episode is refused them"
    assert [message["content"] for message in request.completion.messages] == ["hi", ""]


@pytest.mark.parametrize(
    ("item", "place"),
    [
        ({"role": "tool", "content": "x"}, "input.0.role"),
        ({**CALLED, "call_id": None}, "input.0.call_id"),
        ({**CALLED, "arguments": {"a": 1}}, "input.0.arguments"),
        ({**CALLED, "arguments": "[" * 200 + "]" * 200}, "input.0.arguments"),
        ({**DONE, "output": 3}, "input.0.output"),
        ({"type": "custom_tool_call", "call_id": "c", "name": "n"}, "input.0.input"),
        ({"role": "user", "content": [{"type": "input_text"}]}, "input.0.content.0"),
        ({"type": "item_reference", "id": "msg_1"}, "input.0"),
        ({"role": "user", "content": 3}, "input.0.content"),
    ],
)
def test_an_item_of_a_wrong_form_is_refused_with_its_place(item: Any, place: str) -> None:
    with pytest.raises(BadParameter) as refused:
        read(item)
    assert refused.value.param == place


def test_items_of_ours_that_are_referred_to_are_one_answer_of_their_call() -> None:
    """The provider for OpenAI of Vercel's AI SDK sends these, for it takes what it was sent as stored."""
    other = "f" * 32
    refer = [{"type": "item_reference", "id": f"{kind}_{CALL_ID}_{at}"} for at, kind in enumerate(("rs", "msg", "fc"))]
    request = read(USER, *refer, DONE, refer[2], DONE, {"id": f"msg_{other}_0"}, USER, instructions="be kind")
    roles = [message["role"] for message in request.completion.messages]
    assert roles == ["system", "user", "assistant", "tool", "tool", "assistant", "user"]
    assert request.completion.answers == {2: CALL_ID, 5: other}


def test_an_answer_that_is_referred_to_twice_stands_twice() -> None:
    reference = {"type": "item_reference", "id": f"msg_{CALL_ID}_0"}
    assert read(USER, reference, USER, reference, USER).completion.answers == {1: CALL_ID, 3: CALL_ID}
    assert read(USER, reference, said("and"), reference).completion.answers == {1: CALL_ID}


def test_an_earlier_response_is_named_by_its_call() -> None:
    assert read(USER, previous_response_id=f"resp_{CALL_ID}").completion.continues == CALL_ID
    assert read(previous_response_id=f"resp_{CALL_ID}").completion.messages == ()
    with pytest.raises(BadParameter) as refused:
        read(USER, previous_response_id="resp_1")
    assert refused.value.code == Code.UNKNOWN_CALL
