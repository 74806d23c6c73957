"""One completion in the making: frames of tokens go in, what may be sent comes out, at the end a record's choice."""

from collections import deque
from collections.abc import Sequence
from typing import Any

import msgspec

from bombus.hive.generation import Tokens
from bombus.hive.records import Choice, FinishReason, Span, unpack_logprobs, unpack_tokens
from bombus_gateway.openai.request import Ask
from bombus_gateway.text.rendering import TextModel
from bombus_gateway.text.text_stream import TextStream
from bombus_gateway.text.tool_calls import Called, Delta, PlainReader, Said, Thought


class Entry(msgspec.Struct, frozen=True, gc=False):
    """A token's logprob as it is shown; `start` is where its text begins, in characters."""

    token: int
    logprob: float
    start: int
    top: tuple[tuple[int, float], ...] = ()


class Piece(msgspec.Struct, frozen=True):
    """What one portion of tokens brought: texts and calls, and the logprobs of tokens whose text has gone out."""

    deltas: list[Delta]
    entries: list[Entry]


class Completion:
    """Choice `index` of a call. `done` once it has a finish reason, after which nothing is taken any more."""

    def __init__(self, model: TextModel, ask: Ask, prompt: bytes, call: str, index: int) -> None:
        self.index = index
        self.finish = ""
        self.sampled = 0  # tokens
        self.entries: list[Entry] = []  # all that were shown
        self._call = call
        self._ask = ask
        self._stream = TextStream(model.tokenizer.pieces, ask.stops)
        self._reader = (
            model.renderer.reader(prompt, ask.tools if ask.may_call else (), ask.stops) if ask.chat else PlainReader()
        )
        self._tokens: list[bytes] = []
        self._logprobs: list[bytes] = []
        self._spans: list[Span] = []
        self._said: list[str] = []
        self._thought: list[str] = []
        self._calls: list[dict[str, Any]] = []
        self._held: deque[Entry] = deque()

    @property
    def done(self) -> bool:
        return bool(self.finish)

    def feed(self, frame: Tokens) -> Piece:
        """Take tokens in. A stop string ends the completion with the token that completed it."""
        tokens = unpack_tokens(frame.tokens)
        text, used = self._read(frame, tokens) if self._ask.logprobs else self._stream.feed(tokens)
        self._keep(frame, used)
        deltas = self._reader.feed(text, tokens[:used])
        if self._stream.stopped:
            return self._close(FinishReason.STOP, deltas)
        self._note(deltas)
        return Piece(deltas, self._shown())

    def end(self, reason: str) -> Piece:
        """The engine says that it is complete."""
        text = self._stream.finish()
        deltas = self._reader.feed(text, []) if text else []
        return self._close(FinishReason.STOP if self._stream.stopped else reason, deltas)

    def replay(self, choice: Choice) -> list[Piece]:
        """Take in what was recorded; the same text and calls come out of it. Alternatives were not recorded."""
        pieces: list[Piece] = []
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
            logprobs=b"".join(self._logprobs),
            spans=tuple(self._spans),
            finish=self.finish,
            message=self.message() if self._ask.chat and self.done else None,
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
            self._held.append(Entry(token, logprobs[index], self._stream.decoded, top))
            out.append(self._stream.feed((token,))[0])
            if self._stream.stopped:
                return "".join(out), index + 1
        return "".join(out), len(tokens)

    def _keep(self, frame: Tokens, used: int) -> None:
        self._tokens.append(frame.tokens[: 4 * used])
        self._logprobs.append(frame.logprobs[: 4 * used])
        start, self.sampled = self.sampled, self.sampled + used
        if self._spans and self._spans[-1].version == frame.version:
            start = self._spans.pop().start
        if self.sampled > start:
            self._spans.append(Span(frame.version, start, self.sampled))

    def _close(self, reason: str, deltas: list[Delta]) -> Piece:
        deltas = [*deltas, *self._reader.finish()]
        self._note(deltas)
        made_calls = self._calls and reason == FinishReason.STOP
        self.finish = str(FinishReason.TOOL_CALLS if made_calls else reason)
        return Piece(deltas, self._shown())

    def _note(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            if isinstance(delta, Said):
                self._said.append(delta.text)
            elif isinstance(delta, Thought):
                self._thought.append(delta.text)
            else:
                self._calls.append(self._call_body(delta))

    def _call_body(self, call: Called) -> dict[str, Any]:
        name = call.id or f"call_{self._call[:20]}{self.index}_{len(self._calls)}"
        return {"id": name, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}

    def _shown(self) -> list[Entry]:
        """Logprobs of the tokens whose text has begun to go out: nothing of a stop string, nor of a stop token."""
        shown: list[Entry] = []
        while self._held and self._held[0].start < self._stream.released:
            shown.append(self._held.popleft())
        self.entries += shown
        return shown
