"""The items of an answer, and the body of a response. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from bombus.hive.records import CallRecord, FinishReason
from bombus_gateway.call.completion import Usage
from bombus_gateway.responses.request import ECHO_DEFAULTS, RESPONSE_ID
from bombus_gateway.responses.tools import ToolForm, forms_of, text_of_arguments
from bombus_gateway.text.message import ChatMessage

Item = dict[str, Any]
COMPLETED, INCOMPLETE, IN_PROGRESS = "completed", "incomplete", "in_progress"
_FUNCTION = ToolForm("")


class AnswerItems:
    """Builds the items of one answer. Each item's id contains the call's id and the item's place in the answer.

    `forms` are the tools that are not plain functions. `encrypted` says whether reasoning items have
    `encrypted_content` for the client to send back. That content holds no secret, only the call's id.
    """

    def __init__(self, call: str, forms: Mapping[str, ToolForm], encrypted: bool = False) -> None:
        self._call = call
        self._forms = forms
        self._encrypted = f"bombus:{call}" if encrypted else None

    def message(self, index: int, text: str | None, status: str) -> Item:
        """Return a message item, which has no content yet if `text` is None."""
        content = [] if text is None else [text_part(text)]
        return {
            "id": self._id("msg", index), "type": "message", "status": status, "role": "assistant", "content": content,
        }  # fmt: skip

    def reasoning(self, index: int, text: str | None) -> Item:
        summary = [] if text is None else [summary_part(text)]
        item: Item = {"id": self._id("rs", index), "type": "reasoning", "summary": summary}
        return {**item, "encrypted_content": self._encrypted} if self._encrypted else item

    def call(self, index: int, call: Mapping[str, Any], status: str) -> Item:
        """Return the item of a tool call, in the form of its tool."""
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        form = self._forms.get(name, _FUNCTION)
        item: Item = {"status": status, "call_id": call["id"], "name": form.name or name}
        if form.namespace:
            item["namespace"] = form.namespace
        if form.is_custom:
            text = text_of_arguments(arguments)
            return {"id": self._id("ctc", index), "type": "custom_tool_call", **item, "input": text}
        return {"id": self._id("fc", index), "type": "function_call", **item, "arguments": arguments}

    def all(self, message: ChatMessage, finish: str) -> list[Item]:
        """Return the items of a whole answer."""
        status, items = status_of(finish), list[Item]()
        if message.get("reasoning_content"):
            items.append(self.reasoning(0, message["reasoning_content"]))
        if message.get("content"):
            items.append(self.message(len(items), message["content"], status))
        for call in message.get("tool_calls") or ():
            items.append(self.call(len(items), call, COMPLETED))
        return items or [self.message(0, "", status)]

    def _id(self, kind: str, index: int) -> str:
        return f"{kind}_{self._call}_{index}"


def text_part(text: str) -> Item:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def summary_part(text: str) -> Item:
    return {"type": "summary_text", "text": text}


def status_of(finish: str) -> str:
    return INCOMPLETE if finish == FinishReason.LENGTH else COMPLETED


class ResponseHead(NamedTuple):
    """The fields of a response that are known from the beginning. `echo` contains fields of its request."""

    call: str
    received_ns: int
    model: str
    echo: Mapping[str, Any]


def response_body(
    head: ResponseHead, status: str, output: Sequence[Item] = (), usage: Usage | None = None
) -> dict[str, Any]:
    """Return the body of a response."""
    return {
        "id": RESPONSE_ID + head.call,
        "object": "response",
        "created_at": head.received_ns // 1_000_000_000,
        "status": status,
        "background": False,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if status == INCOMPLETE else None,
        "instructions": None,
        "max_output_tokens": None,
        "previous_response_id": None,
        "temperature": None,
        "top_p": None,
        **head.echo,
        "model": head.model,
        "output": output,
        "parallel_tool_calls": True,
        "usage": _usage_body(usage) if usage is not None else None,
    }


def stored_body(records: Sequence[CallRecord], model: str) -> dict[str, Any]:
    """Return the response for the last record of a chain in which each record continues the one before it."""
    record, functions = records[-1], records[0].tools
    choice = record.choices[0]
    items = AnswerItems(record.id, forms_of(functions)).all(choice.message or {}, choice.finish)
    first = next((message for each in records for message in each.messages), {})
    echo = {
        **ECHO_DEFAULTS,
        "instructions": first.get("content") if first.get("role") == "system" else None,
        "max_output_tokens": record.sampling.max_tokens,
        "temperature": record.sampling.temperature,
        "top_p": record.sampling.top_p,
        "tools": [{"type": "function", "strict": False, **tool["function"]} for tool in functions],
    }
    usage = Usage(record.prompt_tokens, record.completion_tokens(), reasoning=record.reasoning_tokens())
    head = ResponseHead(record.id, record.timings.received_ns, model, echo)
    return response_body(head, status_of(choice.finish), items, usage)


def _usage_body(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
        "output_tokens": usage.completion,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning},
        "total_tokens": usage.prompt + usage.completion,
    }
