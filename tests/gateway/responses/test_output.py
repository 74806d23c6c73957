"""The items of an answer."""

import json

from bombus_gateway.call.calls import AnswerHead
from bombus_gateway.call.completion import Completion, CompletionDelta, Usage
from bombus_gateway.call.request import CompletionRequest
from bombus_gateway.responses.output import AnswerItems
from bombus_gateway.responses.request import ResponsesRequest
from bombus_gateway.responses.response import ResponsesEncoder
from bombus_gateway.responses.tools import FREE_TEXT_PARAMETERS, ToolForm, forms_of, text_of_arguments
from bombus_gateway.text.deltas import Delta, ReasoningDelta, TextDelta
from tests.gateway.openai_hive import TEXT

CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def test_the_items_of_an_answer_are_reasoning_text_and_calls() -> None:
    message = {"role": "assistant", "content": "a", "reasoning_content": "hm", "tool_calls": [CALL]}
    items = AnswerItems("k", {}, encrypted=True).all(message, "tool_calls")
    assert [(item["id"], item["type"]) for item in items] == [
        ("rs_k_0", "reasoning"),
        ("msg_k_1", "message"),
        ("fc_k_2", "function_call"),
    ]
    assert items[0]["summary"] == [{"type": "summary_text", "text": "hm"}]
    assert items[0]["encrypted_content"] == "bombus:k"
    assert "encrypted_content" not in AnswerItems("k", {}).reasoning(0, "hm")


def test_an_answer_of_nothing_is_a_message_without_text() -> None:
    (item,) = AnswerItems("k", {}).all({"role": "assistant", "content": ""}, "stop")
    assert (item["type"], item["content"][0]["text"]) == ("message", "")


def test_a_call_has_the_form_of_its_tool() -> None:
    items = AnswerItems("k", {"f": ToolForm("inner", "space", is_custom=True)})
    call = {**CALL, "function": {"name": "f", "arguments": '{"input": "text"}'}}
    assert items.call(0, call, "completed") == {
        "id": "ctc_k_0", "type": "custom_tool_call", "status": "completed", "call_id": "c1", "name": "inner",
        "namespace": "space", "input": "text",
    }  # fmt: skip


def test_the_text_for_a_custom_tool_is_what_the_model_wrote_whatever_its_form() -> None:
    assert text_of_arguments('{"input": "a\\nb"}') == "a\nb"
    assert text_of_arguments('"a"') == "a"
    for other in ("plain", '{"code": "a"}', '{"input": 3}', "[1", ""):
        assert text_of_arguments(other) == other


def test_custom_tools_are_known_again_in_a_record() -> None:
    functions = [
        {"type": "function", "function": {"name": "patch", "parameters": FREE_TEXT_PARAMETERS}},
        {"type": "function", "function": {"name": "f", "parameters": {}}},
    ]
    assert forms_of(functions) == {"patch": ToolForm("patch", is_custom=True)}


def test_reasoning_is_an_item_of_its_own_that_ends_where_the_text_begins() -> None:
    completion = Completion(TEXT, CompletionRequest(chat=True), b"", "k", 0)
    encoder = ResponsesEncoder(
        ResponsesRequest(completion=CompletionRequest(chat=True), model="m"),
        AnswerHead("k", 0, bytes(12), 1, TEXT.tokenizer),
    )
    completion.end("length")
    parts: list[Delta] = [ReasoningDelta("hm"), ReasoningDelta("m"), TextDelta("a")]
    stream = encoder.opening() + encoder.progress(completion, CompletionDelta(parts, []))
    stream += encoder.closing(completion) + encoder.end(Usage(3, 4, 2))
    events = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith(b"data: ")]
    assert [event["type"].removeprefix("response.") for event in events] == [
        *["created", "in_progress"],
        *["output_item.added", "reasoning_summary_part.added"],
        *["reasoning_summary_text.delta", "reasoning_summary_text.delta", "reasoning_summary_text.done"],
        *["reasoning_summary_part.done", "output_item.done"],
        *["output_item.added", "content_part.added", "output_text.delta", "output_text.done", "content_part.done"],
        *["output_item.done", "incomplete"],
    ]
    response = events[-1]["response"]
    assert response["output"][0]["summary"] == [{"type": "summary_text", "text": "hmm"}]
    assert [item["id"] for item in response["output"]] == ["rs_k_0", "msg_k_1"]
    assert response["output"][1]["status"] == "incomplete"
    assert response["usage"]["total_tokens"] == 7
