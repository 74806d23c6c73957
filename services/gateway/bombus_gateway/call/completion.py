"""One completion while it is being generated: frames of tokens go in, deltas come out, and at the end a choice to
record."""

import logging
from collections import deque
from collections.abc import Sequence
from typing import Any

import msgspec

from bombus.hive.generation import Tokens
from bombus.hive.records import Choice, FinishReason, Span, add_span, unpack_logprobs, unpack_tokens
from bombus_gateway.call.request import CompletionRequest
from bombus_gateway.text.deltas import Delta, DeltaReader, PlainReader, ReasoningDelta, TextDelta, ToolCallDelta
from bombus_gateway.text.message import id_of_call
from bombus_gateway.text.rendering import TextModel
from bombus_gateway.text.stops import hidden_names, named_stops
from bombus_gateway.text.text_stream import TextStream, tokens_of_parts

log = logging.getLogger(__name__)

TOKEN_BYTES = 4  # size of a token id, and of a logprob


class TokenLogprob(msgspec.Struct, frozen=True, gc=False):
    """A token's logprob, as sent to clients. `start` is the offset of the token's text in characters, and `top`
    contains alternatives to the token."""

    token: int
    logprob: float
    start: int
    top: tuple[tuple[int, float], ...] = ()


class CompletionDelta(msgspec.Struct, frozen=True):
    """What a batch of tokens yields: texts, tool calls, and the logprobs of tokens whose text may now be sent."""

    deltas: list[Delta]
    logprobs: list[TokenLogprob]


class Usage(msgspec.Struct, frozen=True):
    """The numbers of a call's tokens. `completion` counts all choices; `cached` counts the cached part of the prompt.

    `reasoning` counts those tokens of `completion` that contain text from the model's reasoning.
    """

    prompt: int
    completion: int
    cached: int = 0
    reasoning: int = 0


class Completion:
    """Choice `index` of a call. It is `done` once it has a finish reason, and must not be fed after that."""

    def __init__(self, model: TextModel, request: CompletionRequest, prompt: bytes, call: str, index: int) -> None:
        self.index = index
        self.finish = ""
        self.sampled = 0  # number of sampled tokens
        self.reasoned = 0  # number of sampled tokens with reasoning text, counted when it is done
        self.misread = False  # true if the completion's tool calls and reasoning could not be parsed
        self.logprobs: list[TokenLogprob] = []  # logprobs of all tokens whose text has been sent
        self._call = call
        self._request = request
        self._pieces = model.tokenizer.pieces
        names = hidden_names(model.tokenizer, request.stops)
        self._stream = TextStream(self._pieces, request.stops, names)
        self._named_stops = named_stops(names, request.stops)
        tools = request.tools if request.parse_tool_calls else ()
        self._reader: DeltaReader = model.renderer.reader(prompt, tools) if request.chat else PlainReader()
        self._unread: list[str] = []  # texts received since the reader last returned a delta
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
    def versions(self) -> set[int]:
        """The policy versions that have sampled tokens of this completion so far."""
        return {span.version for span in self._spans}

    @property
    def stop(self) -> str:
        """The stop string that ended the completion, or "" if something else did."""
        last = unpack_tokens(self._tokens[-1])[-1:] if self._tokens else []
        return self._stream.stop or "".join(self._named_stops.get(token, "") for token in last)

    def feed(self, frame: Tokens) -> CompletionDelta:
        """Add tokens. A stop string ends the completion at the token that completes the string.

        If the request wants a single tool call, the first tool call ends the completion too.
        """
        if self._request.one_call and len(frame.tokens) > TOKEN_BYTES:
            return self._feed_singly(frame)
        tokens = unpack_tokens(frame.tokens)
        text, used = self._read(frame, tokens) if self._request.logprobs else self._stream.feed(tokens)
        self._keep(frame, used)
        deltas = self._feed_reader(text)
        if self._stream.stopped:
            return self._close(FinishReason.STOP, deltas)
        self._add(deltas)
        if self._request.one_call and len(self._calls) == 1:  # any text held back by the reader comes after the call
            self.finish = str(FinishReason.TOOL_CALLS)
        return CompletionDelta(deltas, self._released_logprobs())

    def end(self, reason: str) -> CompletionDelta:
        """End the completion for the reason that the replica gives."""
        text = self._stream.finish()
        deltas = self._feed_reader(text) if text else []
        return self._close(FinishReason.STOP if self._stream.stopped else reason, deltas)

    def replay(self, choice: Choice) -> list[CompletionDelta]:
        """Feed a recorded choice. The resulting deltas have the same text and tool calls, but no alternative tokens,
        since these are not recorded."""
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
        """Return the record of all sampled tokens, whether or not the completion is done."""
        return Choice(
            tokens=b"".join(self._tokens),
            logprobs=b"".join(self._packed_logprobs),
            spans=tuple(self._spans),
            finish=self.finish,
            message=self.message() if self._request.chat and self.done else None,
            reasoning_tokens=self.reasoned,
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
        """Return the tool calls so far, in the message's format."""
        return self._calls

    def _feed_singly(self, frame: Tokens) -> CompletionDelta:
        """Add tokens one by one, up to the token that ends the completion."""
        deltas: list[Delta] = []
        logprobs: list[TokenLogprob] = []
        for at in range(0, len(frame.tokens), TOKEN_BYTES):
            part, index = slice(at, at + TOKEN_BYTES), at // TOKEN_BYTES
            found = self.feed(
                Tokens(
                    version=frame.version,
                    tokens=frame.tokens[part],
                    logprobs=frame.logprobs[part],
                    top=frame.top[index : index + 1],
                )
            )
            deltas += found.deltas
            logprobs += found.logprobs
            if self.done:
                break
        return CompletionDelta(deltas, logprobs)

    def _read(self, frame: Tokens, tokens: list[int]) -> tuple[str, int]:
        """Decode token by token, to note where each token's text begins. Return the text that may be sent, and how many
        tokens were used."""
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
        self.sampled += used
        add_span(self._spans, frame.version, used)

    def _feed_reader(self, text: str, last: bool = False) -> list[Delta]:
        """Return the reader's deltas for a text. If the reader fails, return all the text that it was holding back.

        A bug in parsing some model's tool calls must not lose sampled text.
        """
        self._unread.append(text)
        try:
            deltas = self._reader.finish() if last else self._reader.feed(text)
        except Exception:  # whatever bug the reader has, the answer continues
            log.exception("an answer could not be parsed and continues as text", extra={"call": self._call})
            self.misread = True
            self._reader = PlainReader()
            deltas = self._reader.feed("".join(self._unread))
        if deltas:
            self._unread.clear()
        return deltas

    def _close(self, reason: str, deltas: list[Delta]) -> CompletionDelta:
        deltas = [*deltas, *self._feed_reader("", last=True)]
        self._add(deltas)
        if self._reasoning:
            pieces = [self._pieces[token] for packed in self._tokens for token in unpack_tokens(packed)]
            self.reasoned = tokens_of_parts(pieces, self._reasoning)
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
        call_id = id_of_call(self._call, self.index, len(self._calls), call.id)
        return {"id": call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}

    def _released_logprobs(self) -> list[TokenLogprob]:
        """Return the logprobs of tokens whose text has begun to be sent. Stop strings and stop tokens are left out."""
        released: list[TokenLogprob] = []
        while self._pending_logprobs and self._pending_logprobs[0].start < self._stream.released:
            released.append(self._pending_logprobs.popleft())
        self.logprobs += released
        return released
