"""One completion in the making: frames of tokens go in, what may be sent comes out, at the end a record's choice."""

from collections import deque
from collections.abc import Sequence
from typing import Any

import msgspec

from bombus.hive.generation import Tokens
from bombus.hive.records import Choice, FinishReason, Span, unpack_logprobs, unpack_tokens
from bombus_gateway.call.request import CompletionRequest
from bombus_gateway.text.rendering import TextModel
from bombus_gateway.text.text_stream import TextStream
from bombus_gateway.text.tool_calls import Delta, PlainReader, ReasoningDelta, TextDelta, ToolCallDelta


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
    """Choice `index` of a call. `done` once it has a finish reason, after which nothing is taken any more."""

    def __init__(self, model: TextModel, request: CompletionRequest, prompt: bytes, call: str, index: int) -> None:
        self.index = index
        self.finish = ""
        self.sampled = 0  # tokens
        self.logprobs: list[TokenLogprob] = []  # of all tokens whose text has gone out
        self._call = call
        self._request = request
        self._stream = TextStream(model.tokenizer.pieces, request.stops)
        tools = request.tools if request.parse_tool_calls else ()
        self._reader = model.renderer.reader(prompt, tools, request.stops) if request.chat else PlainReader()
        self._tokens: list[bytes] = []
        self._packed_logprobs: list[bytes] = []
        self._spans: list[Span] = []
        self._said: list[str] = []
        self._thought: list[str] = []
        self._calls: list[dict[str, Any]] = []
        self._held: deque[TokenLogprob] = deque()

    @property
    def done(self) -> bool:
        return bool(self.finish)

    def feed(self, frame: Tokens) -> CompletionDelta:
        """Take tokens in. A stop string ends the completion with the token that completed it."""
        tokens = unpack_tokens(frame.tokens)
        text, used = self._read(frame, tokens) if self._request.logprobs else self._stream.feed(tokens)
        self._keep(frame, used)
        deltas = self._reader.feed(text, tokens[:used])
        if self._stream.stopped:
            return self._close(FinishReason.STOP, deltas)
        self._note(deltas)
        return CompletionDelta(deltas, self._shown())

    def end(self, reason: str) -> CompletionDelta:
        """The engine says that it is complete."""
        text = self._stream.finish()
        deltas = self._reader.feed(text, []) if text else []
        return self._close(FinishReason.STOP if self._stream.stopped else reason, deltas)

    def replay(self, choice: Choice) -> list[CompletionDelta]:
        """Take in what was recorded; the same text and calls come out of it. Alternatives were not recorded."""
        pieces: list[CompletionDelta] = []
        for span in choice.spans:
            part = slice(4 * span.start, 4 * span.end)
            pieces.append(
                self.feed(Tokens(version=span.version, tokens=choice.tokens[part], logprobs=choice.logprobs[part]))
            )
        if not self.done:
            ended = FinishReason.LENGTH if choice.finish == FinishReason.LENGTH else FinishReason.STOP
            pieces.append(self.end(ended))
        return pieces

    def choice(self) -> Choice:
        """For the record: all that was sampled, whether or not it was complete."""
        return Choice(
            tokens=b"".join(self._tokens),
            logprobs=b"".join(self._packed_logprobs),
            spans=tuple(self._spans),
            finish=self.finish,
            message=self.message() if self._request.chat and self.done else None,
        )

    def message(self) -> dict[str, Any]:
        """The assistant's message as it is returned."""
        content = "".join(self._said)
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if self._calls:
            message["content"] = content or None
            message["tool_calls"] = self._calls
        if self._thought:
            message["reasoning_content"] = "".join(self._thought)
        return message

    def text(self) -> str:
        return "".join(self._said)

    def calls(self) -> Sequence[dict[str, Any]]:
        """The tool calls that were made so far, as they are returned."""
        return self._calls

    def _read(self, frame: Tokens, tokens: list[int]) -> tuple[str, int]:
        """Feed token by token, to know where the text of each begins."""
        logprobs = unpack_logprobs(frame.logprobs)
        out: list[str] = []
        for index, token in enumerate(tokens):
            top = frame.top[index] if frame.top else ()
            self._held.append(TokenLogprob(token, logprobs[index], self._stream.decoded, top))
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
        self._note(deltas)
        made_calls = self._calls and reason == FinishReason.STOP
        self.finish = str(FinishReason.TOOL_CALLS if made_calls else reason)
        return CompletionDelta(deltas, self._shown())

    def _note(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            if isinstance(delta, TextDelta):
                self._said.append(delta.text)
            elif isinstance(delta, ReasoningDelta):
                self._thought.append(delta.text)
            else:
                self._calls.append(self._call_body(delta))

    def _call_body(self, call: ToolCallDelta) -> dict[str, Any]:
        name = call.id or f"call_{self._call[:20]}{self.index}_{len(self._calls)}"
        return {"id": name, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}

    def _shown(self) -> list[TokenLogprob]:
        """Logprobs of the tokens whose text has begun to go out: nothing of a stop string, nor of a stop token."""
        shown: list[TokenLogprob] = []
        while self._held and self._held[0].start < self._stream.released:
            shown.append(self._held.popleft())
        self.logprobs += shown
        return shown
