"""The responses that Anthropic's SDK expects: messages, events and errors. Pure."""

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from bombus.errors import Refused
from bombus.machine.host_names import HeaderPair
from bombus_gateway.anthropic.request import INVALID_JSON
from bombus_gateway.call.calls import AnswerHead
from bombus_gateway.call.completion import Completion, CompletionDelta, Usage
from bombus_gateway.call.request import PromptTooLong
from bombus_gateway.limits import in_short
from bombus_gateway.text.deltas import ReasoningDelta, TextDelta, ToolCallDelta
from bombus_gateway.text.losses import NotRendered

encode = msgspec.json.encode

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
_STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}
_PING = b'event: ping\ndata: {"type": "ping"}\n\n'


def error_body(error: Refused) -> bytes:
    """Return an error's body in Anthropic's format."""
    kind = _TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    why = error.why
    if isinstance(error, PromptTooLong):
        # Claude Code compacts the conversation when it finds this exact sentence. Other harnesses look for it too.
        why = f"prompt is too long: {error.tokens} tokens > {error.tokens_max} maximum"
    elif isinstance(error, NotRendered) and "system" in why.lower():
        # When Claude Code finds these words, it moves its system texts to user messages and retries.
        why = f"{why} At this place the role 'system' is not supported."
    return encode({"type": "error", "error": {"type": kind, "message": in_short(why)}})


def error_event(error: Refused) -> bytes:
    return b"event: error\ndata: " + error_body(error) + b"\n\n"


def count_body(tokens: int) -> bytes:
    """Return the body that reports a token count."""
    return encode({"input_tokens": tokens})


class MessagesEncoder:
    """Encodes one answer as a message, either in one piece or as a stream of events. In a stream, it tracks which block
    is open."""

    def __init__(self, model: str, head: AnswerHead) -> None:
        self._model = model
        self._head = head
        self._blocks = 0  # number of blocks begun
        self._calls = 0
        self._open: type[TextDelta | ReasoningDelta] | None = None  # type of the open block's deltas
        self._stop: dict[str, str | None] = {}

    @property
    def headers(self) -> Sequence[HeaderPair]:
        return ((b"request-id", self._head.id.encode()),)

    def whole(self, completions: Sequence[Completion], usage: Usage) -> bytes:
        (completion,) = completions
        return encode(self._message([*self._content(completion)], _stop(completion), _usage(usage)))

    def opening(self) -> bytes:
        usage = _usage(Usage(self._head.prompt_tokens, 0))
        message = self._message([], {"stop_reason": None, "stop_sequence": None}, usage)
        return _event("message_start", {"message": message})

    def beat(self) -> bytes:
        return _PING

    def progress(self, completion: Completion, delta: CompletionDelta) -> bytes:
        events: list[bytes] = []
        for part in delta.deltas:
            if isinstance(part, ToolCallDelta):
                call = completion.calls()[self._calls]
                self._calls += 1
                events += self._tool_use(call)
            else:
                events += self._piece(part)
        return b"".join(events)

    def closing(self, completion: Completion) -> bytes:
        """Close the last block. The stop reason is sent later, together with the usage."""
        self._stop = _stop(completion)
        return b"".join(self._close())

    def end(self, usage: Usage) -> bytes:
        return _event("message_delta", {"delta": self._stop, "usage": _usage(usage)}) + _event("message_stop", {})

    def _message(
        self, content: list[dict[str, Any]], stop: dict[str, str | None], usage: dict[str, int]
    ) -> dict[str, Any]:
        return {
            "id": f"msg_{self._head.id}",
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            **stop,
            "usage": usage,
        }

    def _content(self, completion: Completion) -> Iterator[dict[str, Any]]:
        """Yield the blocks of a whole message."""
        message = completion.message()
        if message.get("reasoning_content"):
            yield {"type": "thinking", "thinking": message["reasoning_content"], "signature": self._signature}
        if message["content"]:
            yield {"type": "text", "text": message["content"]}
        for call in completion.calls():
            yield {**_tool_use(call), "input": msgspec.Raw(_input(call))}

    def _piece(self, part: TextDelta | ReasoningDelta) -> Iterator[bytes]:
        """Yield the events for a piece of text. The text begins a new block, unless a block of the same kind is
        open."""
        thinking = isinstance(part, ReasoningDelta)
        if self._open is not type(part):
            yield from self._close()
            self._open = type(part)
            # The signature may be sent only in an event of its own.
            yield self._begin({"type": "thinking", "thinking": ""} if thinking else {"type": "text", "text": ""})
        if thinking:
            yield self._delta({"type": "thinking_delta", "thinking": part.text})
        else:
            yield self._delta({"type": "text_delta", "text": part.text})

    def _tool_use(self, call: dict[str, Any]) -> Iterator[bytes]:
        """Yield the events for a whole tool call, as a separate block."""
        yield from self._close()
        yield self._begin({**_tool_use(call), "input": {}})
        yield self._delta({"type": "input_json_delta", "partial_json": _input(call).decode()})
        yield self._end_of_block()

    def _close(self) -> Iterator[bytes]:
        if self._open is ReasoningDelta:
            yield self._delta({"type": "signature_delta", "signature": self._signature})
        if self._open is not None:
            yield self._end_of_block()
        self._open = None

    @property
    def _signature(self) -> str:
        """The signature that clients return with the thinking. Some clients turn unsigned thinking into a user
        message."""
        return self._head.id

    def _begin(self, block: dict[str, Any]) -> bytes:
        self._blocks += 1
        return _event("content_block_start", {"index": self._blocks - 1, "content_block": block})

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", {"index": self._blocks - 1, "delta": delta})

    def _end_of_block(self) -> bytes:
        return _event("content_block_stop", {"index": self._blocks - 1})


def _event(kind: str, fields: dict[str, Any]) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + encode({"type": kind, **fields}) + b"\n\n"


def _tool_use(call: dict[str, Any]) -> dict[str, Any]:
    return {"type": "tool_use", "id": call["id"], "name": call["function"]["name"]}


def _input(call: dict[str, Any]) -> bytes:
    """Return the input of a call as JSON: the sampled text, wrapped in an object if it is not a JSON object.

    Anthropic's SDK fails on input that is not JSON, so the whole answer would be lost.
    """
    text: str = call["function"]["arguments"]
    if not text.strip() or text.strip() == "null":
        return b"{}"
    try:
        is_object = isinstance(msgspec.json.decode(text), dict)
    except (msgspec.DecodeError, RecursionError):
        is_object = False
    return text.encode() if is_object else encode({INVALID_JSON: text})


def _stop(completion: Completion) -> dict[str, str | None]:
    if completion.finish == "stop" and completion.stop:
        return {"stop_reason": "stop_sequence", "stop_sequence": completion.stop}
    return {"stop_reason": _STOP_REASONS.get(completion.finish, "end_turn"), "stop_sequence": None}


def _usage(usage: Usage) -> dict[str, int]:
    """Return the usage. `input_tokens` does not include cached tokens."""
    return {
        "input_tokens": usage.prompt - usage.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached,
        "output_tokens": usage.completion,
    }
