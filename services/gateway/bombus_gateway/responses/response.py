"""The responses that OpenAI's SDK expects: bodies, and the events of a stream in OpenAI's order. Pure."""

from collections.abc import Sequence
from typing import Any

import msgspec

from bombus.machine.host_names import HeaderPair
from bombus_gateway.call.calls import AnswerHead
from bombus_gateway.call.completion import Completion, CompletionDelta, Usage
from bombus_gateway.responses.output import (
    COMPLETED,
    IN_PROGRESS,
    AnswerItems,
    Item,
    ResponseHead,
    response_body,
    status_of,
    summary_part,
    text_part,
)
from bombus_gateway.responses.request import ResponsesRequest
from bombus_gateway.text.deltas import ReasoningDelta, TextDelta

encode = msgspec.json.encode


def event(kind: str, fields: dict[str, Any]) -> bytes:
    """Return a server-sent event."""
    return b"event: " + kind.encode() + b"\ndata: " + encode({"type": kind, **fields}) + b"\n\n"


class ResponsesEncoder:
    """Encodes one answer. A stream has one open item at a time; the item ends when content of another kind arrives."""

    def __init__(self, request: ResponsesRequest, head: AnswerHead) -> None:
        self._head = ResponseHead(head.id, head.received_ns, request.model, request.echo)
        self._items = AnswerItems(head.id, request.forms, request.encrypted)
        self._done: list[Item] = []
        self._open: type[TextDelta | ReasoningDelta] | None = None
        self._item_id = ""  # id of the open item
        self._text: list[str] = []
        self._called = 0
        self._status = IN_PROGRESS
        self._sequence = 0

    @property
    def headers(self) -> Sequence[HeaderPair]:
        return ((b"x-request-id", self._head.call.encode()),)

    def whole(self, completions: Sequence[Completion], usage: Usage) -> bytes:
        completion = completions[0]
        items = self._items.all(completion.message(), completion.finish)
        return encode(self._body(status_of(completion.finish), items, usage))

    def opening(self) -> bytes:
        body = self._body(IN_PROGRESS)
        return self._event("response.created", response=body) + self._event("response.in_progress", response=body)

    def beat(self) -> bytes:
        return self._event("keepalive")

    def progress(self, completion: Completion, delta: CompletionDelta) -> bytes:
        out: list[bytes] = []
        for part in delta.deltas:
            if isinstance(part, TextDelta | ReasoningDelta):
                if self._open is not type(part):
                    out += [self._close(COMPLETED), self._begin(type(part))]
                self._text.append(part.text)
                out.append(self._portion(part.text))
            else:
                out += [self._close(COMPLETED), self._call(completion.calls()[self._called])]
                self._called += 1
        return b"".join(out)

    def closing(self, completion: Completion) -> bytes:
        """End the open item. An empty answer becomes a message without text."""
        self._status = status_of(completion.finish)
        begun = b"" if self._done or self._open else self._begin(TextDelta)
        return begun + self._close(self._status)

    def end(self, usage: Usage) -> bytes:
        return self._event(f"response.{self._status}", response=self._body(self._status, self._done, usage))

    # ---- items ----

    def _begin(self, kind: type[TextDelta | ReasoningDelta]) -> bytes:
        """Open an item of text or of reasoning."""
        is_text = kind is TextDelta
        index = self._index
        item = self._items.message(index, None, IN_PROGRESS) if is_text else self._items.reasoning(index, None)
        self._open, self._item_id, self._text = kind, item["id"], []
        added = self._added(item)
        if is_text:
            return added + self._of_part("response.content_part.added", part=text_part(""))
        return added + self._of_part("response.reasoning_summary_part.added", part=summary_part(""))

    def _portion(self, text: str) -> bytes:
        if self._open is TextDelta:
            return self._of_part("response.output_text.delta", delta=text, logprobs=[])
        return self._of_part("response.reasoning_summary_text.delta", delta=text)

    def _close(self, status: str) -> bytes:
        """End the open item, if there is one."""
        text = "".join(self._text)
        if self._open is None:
            return b""
        if self._open is TextDelta:
            out = self._of_part("response.output_text.done", text=text, logprobs=[])
            out += self._of_part("response.content_part.done", part=text_part(text))
            item = self._items.message(self._index, text, status)
        else:
            out = self._of_part("response.reasoning_summary_text.done", text=text)
            out += self._of_part("response.reasoning_summary_part.done", part=summary_part(text))
            item = self._items.reasoning(self._index, text)
        self._open = None
        return out + self._ended(item)

    def _call(self, call: dict[str, Any]) -> bytes:
        """Return all the events of a tool call at once, since calls are parsed only when they are complete."""
        item = self._items.call(self._index, call, COMPLETED)
        field, kind = (
            ("input", "custom_tool_call_input") if "input" in item else ("arguments", "function_call_arguments")
        )
        place = {"item_id": item["id"], "output_index": self._index}
        added = self._added({**item, field: "", "status": IN_PROGRESS})
        delta = self._event(f"response.{kind}.delta", **place, delta=item[field])
        named = {} if field == "input" else {"name": item["name"]}
        done = self._event(f"response.{kind}.done", **place, **named, **{field: item[field]})
        return added + delta + done + self._ended(item)

    # ---- events ----

    @property
    def _index(self) -> int:
        """The open item's place in the answer or, if no item is open, the next item's."""
        return len(self._done)

    def _added(self, item: Item) -> bytes:
        return self._event("response.output_item.added", output_index=self._index, item=item)

    def _ended(self, item: Item) -> bytes:
        out = self._event("response.output_item.done", output_index=self._index, item=item)
        self._done.append(item)
        return out

    def _of_part(self, kind: str, **fields: Any) -> bytes:
        """Return an event about the open item's only part."""
        place = {"content_index" if self._open is TextDelta else "summary_index": 0}
        return self._event(kind, item_id=self._item_id, output_index=self._index, **place, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        number, self._sequence = self._sequence, self._sequence + 1
        return event(kind, {"sequence_number": number, **fields})

    def _body(self, status: str, output: Sequence[Item] = (), usage: Usage | None = None) -> dict[str, Any]:
        return response_body(self._head, status, output, usage)
