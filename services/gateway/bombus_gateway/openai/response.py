"""The responses that OpenAI's SDK expects: bodies and chunks. Pure."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any

import msgspec

from bombus.machine.host_names import HeaderPair
from bombus_gateway.call.calls import AnswerHead
from bombus_gateway.call.completion import Completion, CompletionDelta, TokenLogprob, Usage
from bombus_gateway.openai.request import OpenAIRequest
from bombus_gateway.text.deltas import ReasoningDelta, ToolCallDelta

encode = msgspec.json.encode

DONE = b"data: [DONE]\n\n"


def event(body: bytes) -> bytes:
    """Return a server-sent event."""
    return b"data: " + body + b"\n\n"


class OpenAIEncoder:
    """Encodes one answer as a chat completion or a plain completion, depending on the request."""

    def __init__(self, request: OpenAIRequest, head: AnswerHead) -> None:
        self._request = request
        self._head = head
        self._chat = request.completion.chat
        self._logprobs_wanted = request.completion.logprobs
        self._numbers = defaultdict[int, Iterator[int]](count)  # by choice: the numbers for its next calls in a stream

    @property
    def headers(self) -> Sequence[HeaderPair]:
        return ((b"x-request-id", self._head.id.encode()),)

    def whole(self, completions: Sequence[Completion], usage: Usage) -> bytes:
        body = self._body("chat.completion" if self._chat else "text_completion")
        choices = [self._choice(each) for each in completions]
        sampled_by = _fingerprint(completions)
        return encode({**body, "choices": choices, "usage": _usage_body(usage), "system_fingerprint": sampled_by})

    def opening(self) -> bytes:
        """Return the first chunks of a chat's stream, one per choice, each with the message's role."""
        if not self._chat:
            return b""
        delta = {"role": "assistant", "content": ""}
        return b"".join(self._chunk(index, delta, None, None) for index in range(self._head.choices))

    def beat(self) -> bytes:
        body = self._body("chat.completion.chunk" if self._chat else "text_completion")
        return event(encode({**body, "choices": []}))

    def progress(self, completion: Completion, delta: CompletionDelta) -> bytes:
        if not delta.deltas and not delta.logprobs:
            return b""
        logprobs = self._logprobs(delta.logprobs)
        if not self._chat:
            text = "".join(part.text for part in delta.deltas if not isinstance(part, ToolCallDelta))
            return self._text_chunk(completion.index, text, logprobs, None)
        out: list[bytes] = []
        for part in _joined(completion, delta, self._numbers[completion.index]):
            out.append(self._chunk(completion.index, part, logprobs, None))
            logprobs = None
        return b"".join(out)

    def closing(self, completion: Completion) -> bytes:
        """Return the last chunk of a choice, with its finish reason."""
        if not self._chat:
            return self._text_chunk(completion.index, "", None, completion.finish)
        return self._chunk(completion.index, {}, None, completion.finish)

    def end(self, usage: Usage) -> bytes:
        if not self._request.include_usage:
            return DONE
        body = self._body("chat.completion.chunk" if self._chat else "text_completion")
        return event(encode({**body, "choices": [], "usage": _usage_body(usage)})) + DONE

    def _body(self, kind: str) -> dict[str, Any]:
        """Return the fields that every body and chunk begins with."""
        head = self._head
        return {
            "id": f"chatcmpl-{head.id}" if self._chat else f"cmpl-{head.id}",
            "object": kind,
            "created": head.received_ns // 1_000_000_000,
            "model": self._request.model,
        }

    def _choice(self, completion: Completion) -> dict[str, Any]:
        logprobs = self._logprobs(completion.logprobs)
        choice: dict[str, Any] = {"index": completion.index, "finish_reason": completion.finish, "logprobs": logprobs}
        if self._chat:
            choice["message"] = {**completion.message(), "refusal": None}
        else:
            choice["text"] = completion.text()
        return choice

    def _chunk(self, index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None, finish: str | None) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        return event(encode({**self._body("chat.completion.chunk"), "choices": [choice]}))

    def _text_chunk(self, index: int, text: str, logprobs: dict[str, Any] | None, finish: str | None) -> bytes:
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}
        return event(encode({**self._body("text_completion"), "choices": [choice]}))

    def _logprobs(self, logprobs: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        if not self._logprobs_wanted:
            return None
        if self._chat:
            return {"content": [self._token_logprob(each) for each in logprobs], "refusal": None}
        return {
            "tokens": [self._text(each.token) for each in logprobs],
            "token_logprobs": [each.logprob for each in logprobs],
            "top_logprobs": [{self._text(token): value for token, value in each.top} for each in logprobs] or None,
            "text_offset": [each.start for each in logprobs],
        }

    def _token_logprob(self, found: TokenLogprob) -> dict[str, Any]:
        top = [self._token(token, logprob) for token, logprob in found.top]
        return {**self._token(found.token, found.logprob), "top_logprobs": top}

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        piece = self._piece(token)
        return {"token": piece.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(piece)}

    def _text(self, token: int) -> str:
        return self._piece(token).decode("utf-8", "replace")

    def _piece(self, token: int) -> bytes:
        """Return the bytes of a token, or the name of a special token, which has no text."""
        tokenizer = self._head.tokenizer
        name = tokenizer.specials.get(token)
        return name.encode() if name is not None else tokenizer.bytes_of((token,))


def _fingerprint(completions: Sequence[Completion]) -> str | None:
    """Return a text with the oldest and newest policy versions that sampled an answer, or with just one number if the
    two are equal."""
    versions = set[int]().union(*(completion.versions for completion in completions))
    return "-".join(["bombus", *map(str, sorted({min(versions), max(versions)}))]) if versions else None


def _usage_body(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "total_tokens": usage.prompt + usage.completion,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning},
    }


def _joined(completion: Completion, delta: CompletionDelta, numbers: Iterator[int]) -> list[dict[str, Any]]:
    """Return the deltas for a stream, with adjacent texts joined. If there are only logprobs, return one empty text.

    `numbers` yields the numbers of the next calls. The completion cannot give them, because a replayed completion
    already contains all its calls.
    """
    out: list[dict[str, Any]] = []
    for part in delta.deltas:
        if isinstance(part, ToolCallDelta):
            number = next(numbers)
            out.append({"tool_calls": [{"index": number, **completion.calls()[number]}]})
            continue
        key = "reasoning_content" if isinstance(part, ReasoningDelta) else "content"
        if out and key in out[-1]:
            out[-1][key] += part.text
        else:
            out.append({key: part.text})
    return out or [{"content": ""}]
