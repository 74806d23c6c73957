"""What OpenAI's SDK expects back: bodies, chunks and errors. Pure."""

from collections.abc import Sequence
from typing import Any

import msgspec

from bombus.errors import Code, Refused
from bombus_gateway.call.completion import Completion, Entry, Piece
from bombus_gateway.openai.request import BadParameter
from bombus_gateway.text.tokenizer import Tokenizer
from bombus_gateway.text.tool_calls import Called, Thought

encode = msgspec.json.encode

DONE = b"data: [DONE]\n\n"
_CODES = {
    Code.BAD_KEY: "invalid_api_key",
    Code.KEY_EXPIRED: "invalid_api_key",
    Code.PROMPT_TOO_LONG: "context_length_exceeded",
    Code.UNKNOWN_MODEL: "model_not_found",
}
_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error"}


class Header(msgspec.Struct, frozen=True):
    """What every body of one answer begins with. `created` is in seconds since the epoch."""

    id: str
    created: int
    model: str
    chat: bool

    @property
    def name(self) -> str:
        return f"chatcmpl-{self.id}" if self.chat else f"cmpl-{self.id}"


class Usage(msgspec.Struct, frozen=True):
    """In tokens; `completion` over all choices."""

    prompt: int
    completion: int
    cached: int = 0

    def body(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }


def error_body(error: Refused) -> bytes:
    kind = _TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
    param = error.param if isinstance(error, BadParameter) else None
    code = _CODES.get(error.code, str(error.code))
    return encode({"error": {"message": error.why, "type": kind, "param": param or None, "code": code}})


def event(body: bytes) -> bytes:
    return b"data: " + body + b"\n\n"


class Answers:
    """Bodies of one answer. `tokenizer` is None unless logprobs were asked for."""

    def __init__(self, header: Header, tokenizer: Tokenizer | None) -> None:
        self._header = header
        self._tokenizer = tokenizer

    def whole(self, completions: Sequence[Completion], usage: Usage) -> bytes:
        kind = "chat.completion" if self._header.chat else "text_completion"
        return encode(
            {**self._head(kind), "choices": [self._choice(each) for each in completions], "usage": usage.body()}
        )

    def opening(self, count: int) -> bytes:
        """The first chunks of a chat's stream: whose message it is."""
        if not self._header.chat:
            return b""
        delta = {"role": "assistant", "content": ""}
        return b"".join(self._chunk(index, delta, None, None) for index in range(count))

    def progress(self, completion: Completion, piece: Piece) -> bytes:
        """Chunks for what a portion of tokens brought; empty when nothing may go out yet."""
        entries = piece.entries
        if not piece.deltas and not entries:
            return b""
        logprobs = self._logprobs(entries)
        if not self._header.chat:
            text = "".join(delta.text for delta in piece.deltas if not isinstance(delta, Called))
            return self._text_chunk(completion.index, text, logprobs, None)
        out: list[bytes] = []
        for delta in _joined(completion, piece):
            out.append(self._chunk(completion.index, delta, logprobs, None))
            logprobs = None
        return b"".join(out)

    def closing(self, completion: Completion) -> bytes:
        """The chunk with a choice's finish reason."""
        if not self._header.chat:
            return self._text_chunk(completion.index, "", None, completion.finish)
        return self._chunk(completion.index, {}, None, completion.finish)

    def usage(self, usage: Usage) -> bytes:
        kind = "chat.completion.chunk" if self._header.chat else "text_completion"
        return event(encode({**self._head(kind), "choices": [], "usage": usage.body()}))

    def _head(self, kind: str) -> dict[str, Any]:
        header = self._header
        return {"id": header.name, "object": kind, "created": header.created, "model": header.model}

    def _choice(self, completion: Completion) -> dict[str, Any]:
        logprobs = self._logprobs(completion.entries)
        found: dict[str, Any] = {"index": completion.index, "finish_reason": completion.finish, "logprobs": logprobs}
        if self._header.chat:
            found["message"] = {**completion.message(), "refusal": None}
        else:
            found["text"] = completion.text()
        return found

    def _chunk(self, index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None, finish: str | None) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        return event(encode({**self._head("chat.completion.chunk"), "choices": [choice]}))

    def _text_chunk(self, index: int, text: str, logprobs: dict[str, Any] | None, finish: str | None) -> bytes:
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}
        return event(encode({**self._head("text_completion"), "choices": [choice]}))

    def _logprobs(self, entries: Sequence[Entry]) -> dict[str, Any] | None:
        if self._tokenizer is None:
            return None
        if self._header.chat:
            return {"content": [self._shown(entry) for entry in entries], "refusal": None}
        return {
            "tokens": [self._text(entry.token) for entry in entries],
            "token_logprobs": [entry.logprob for entry in entries],
            "top_logprobs": [{self._text(token): value for token, value in entry.top} for entry in entries] or None,
            "text_offset": [entry.start for entry in entries],
        }

    def _shown(self, entry: Entry) -> dict[str, Any]:
        top = [self._token(token, logprob) for token, logprob in entry.top]
        return {**self._token(entry.token, entry.logprob), "top_logprobs": top}

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        piece = self._piece(token)
        return {"token": piece.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(piece)}

    def _text(self, token: int) -> str:
        return self._piece(token).decode("utf-8", "replace")

    def _piece(self, token: int) -> bytes:
        """A special token shows its name: it has no text."""
        tokenizer = self._tokenizer
        assert tokenizer is not None
        name = tokenizer.specials.get(token)
        return name.encode() if name is not None else tokenizer.bytes_of((token,))


def _joined(completion: Completion, piece: Piece) -> list[dict[str, Any]]:
    """Deltas as a stream has them; neighbouring texts in one, and an empty one when there are only logprobs."""
    out: list[dict[str, Any]] = []
    calls = completion.calls()
    number = len(calls) - sum(isinstance(delta, Called) for delta in piece.deltas)
    for delta in piece.deltas:
        if isinstance(delta, Called):
            out.append({"tool_calls": [{"index": number, **calls[number]}]})
            number += 1
            continue
        key = "reasoning_content" if isinstance(delta, Thought) else "content"
        if out and key in out[-1]:
            out[-1][key] += delta.text
        else:
            out.append({key: delta.text})
    return out or [{"content": ""}]
