"""One completion while it is generated: frames of tokens go in, deltas come out, and at the end a record's choice."""

from collections import deque
from collections.abc import Sequence
from typing import Any

import msgspec

from bombus.hive.generation import Tokens
from bombus.hive.records import Choice, FinishReason, Span, unpack_logprobs, unpack_tokens
from bombus_gateway.call.request import CompletionRequest
from bombus_gateway.text.deltas import Delta, PlainReader, ReasoningDelta, TextDelta, ToolCallDelta
from bombus_gateway.text.rendering import TextModel
from bombus_gateway.text.text_stream import TextStream

CALL_ID_CHARACTERS_MAX = 64  # of an id that the model wrote


class TokenLogprob(msgspec.Struct, frozen=True, gc=False):
    """A token's logprob as it is returned. `start` is where its text begins, in characters; `top` has alternatives."""

    token: int
    logprob: float
    start: int
    top: tuple[tuple[int, float], ...] = ()


class CompletionDelta(msgspec.Struct, frozen=True):
    """What a portion of tokens adds: texts and tool calls, and the logprobs of tokens whose text may now go out."""

    deltas: list[Delta]
    logprobs: list[TokenLogprob]


class Usage(msgspec.Struct, frozen=True):
    """The tokens of a call; `completion` counts all choices, `cached` is the part of the prompt that was cached."""

    prompt: int
    completion: int
    cached: int = 0


class Completion:
    """Choice `index` of a call. It is `done` once it has a finish reason; it must not be fed after that."""

    def __init__(self, model: TextModel, request: CompletionRequest, prompt: bytes, call: str, index: int) -> None:
        self.index = index
        self.finish = ""
        self.sampled = 0  # tokens
        self.logprobs: list[TokenLogprob] = []  # of all tokens whose text has gone out
        self._call = call
        self._request = request
        self._stream = TextStream(model.tokenizer.pieces, request.stops)
        tools = request.tools if request.parse_tool_calls else ()
        self._reader = model.renderer.reader(prompt, tools) if request.chat else PlainReader()
        self._tokens: list[bytes] = []
        self._packed_logprobs: list[bytes] = []
        self._spans: list[Span] = []
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[dict[str, Any]] = []
        self._pending_logprobs: deque[TokenLogprob] = deque()

    @property
    def done(self) -> bool:
        return bool(self.finish)

    @property
    def stop(self) -> str:
        """The stop string that ended the completion; empty when something else did."""
        return self._stream.stop

    def feed(self, frame: Tokens) -> CompletionDelta:
        """Add tokens. A stop string ends the completion with the token that completes it."""
        tokens = unpack_tokens(frame.tokens)
        text, used = self._read(frame, tokens) if self._request.logprobs else self._stream.feed(tokens)
        self._keep(frame, used)
        deltas = self._reader.feed(text)
        if self._stream.stopped:
            return self._close(FinishReason.STOP, deltas)
        self._add(deltas)
        return CompletionDelta(deltas, self._released_logprobs())

    def end(self, reason: str) -> CompletionDelta:
        """End the completion for the reason that the replica gives."""
        text = self._stream.finish()
        deltas = self._reader.feed(text) if text else []
        return self._close(FinishReason.STOP if self._stream.stopped else reason, deltas)

    def replay(self, choice: Choice) -> list[CompletionDelta]:
        """Feed a recorded choice: its deltas have the same text and calls. Alternative tokens were not recorded."""
        deltas: list[CompletionDelta] = []
        for span in choice.spans:
            part = slice(4 * span.start, 4 * span.end)
            deltas.append(
                self.feed(Tokens(version=span.version, tokens=choice.tokens[part], logprobs=choice.logprobs[part]))
            )
        if not self.done:
            ended = FinishReason.LENGTH if choice.finish == FinishReason.LENGTH else FinishReason.STOP
            deltas.append(self.end(ended))
        return deltas

    def choice(self) -> Choice:
        """Return the record of all that was sampled, whether or not it is complete."""
        return Choice(
            tokens=b"".join(self._tokens),
            logprobs=b"".join(self._packed_logprobs),
            spans=tuple(self._spans),
            finish=self.finish,
            message=self.message() if self._request.chat and self.done else None,
        )

    def message(self) -> dict[str, Any]:
        """Return the assistant's message."""
        content = self.text()
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if self._calls:
            message["content"] = content or None
            message["tool_calls"] = self._calls
        if self._reasoning:
            message["reasoning_content"] = "".join(self._reasoning)
        return message

    def text(self) -> str:
        return "".join(self._text)

    def calls(self) -> Sequence[dict[str, Any]]:
        """Return the tool calls that were made so far, as they are in the message."""
        return self._calls

    def _read(self, frame: Tokens, tokens: list[int]) -> tuple[str, int]:
        """Decode token by token, to know where the text of each begins: (text that may go out, tokens used)."""
        logprobs = unpack_logprobs(frame.logprobs)
        out: list[str] = []
        for index, token in enumerate(tokens):
            top = frame.top[index] if frame.top else ()
            self._pending_logprobs.append(TokenLogprob(token, logprobs[index], self._stream.decoded, top))
            out.append(self._stream.feed((token,))[0])
            if self._stream.stopped:
                return "".join(out), index + 1
        return "".join(out), len(tokens)

    def _keep(self, frame: Tokens, used: int) -> None:
        self._tokens.append(frame.tokens[: 4 * used])
        self._packed_logprobs.append(frame.logprobs[: 4 * used])
        start, self.sampled = self.sampled, self.sampled + used
        if self._spans and self._spans[-1].version == frame.version:
            start = self._spans.pop().start
        if self.sampled > start:
            self._spans.append(Span(frame.version, start, self.sampled))

    def _close(self, reason: str, deltas: list[Delta]) -> CompletionDelta:
        deltas = [*deltas, *self._reader.finish()]
        self._add(deltas)
        made_calls = self._calls and reason == FinishReason.STOP
        self.finish = str(FinishReason.TOOL_CALLS if made_calls else reason)
        return CompletionDelta(deltas, self._released_logprobs())

    def _add(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            if isinstance(delta, TextDelta):
                self._text.append(delta.text)
            elif isinstance(delta, ReasoningDelta):
                self._reasoning.append(delta.text)
            else:
                self._calls.append(self._call_body(delta))

    def _call_body(self, call: ToolCallDelta) -> dict[str, Any]:
        call_id = call.id
        if not 0 < len(call_id) <= CALL_ID_CHARACTERS_MAX or any(made["id"] == call_id for made in self._calls):
            call_id = f"call_{self._call[:20]}{self.index}_{len(self._calls)}"
        return {"id": call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}

    def _released_logprobs(self) -> list[TokenLogprob]:
        """Return the logprobs of tokens whose text has begun to go out, and none of stop strings and stop tokens."""
        released: list[TokenLogprob] = []
        while self._pending_logprobs and self._pending_logprobs[0].start < self._stream.released:
            released.append(self._pending_logprobs.popleft())
        self.logprobs += released
        return released
