"""Reads turns that consist of messages with headers: gpt-oss's channels, and similar formats that name recipients."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache, partial
from typing import Any

from bombus_gateway import limits
from bombus_gateway.text.deltas import Delta, ReasoningDelta, TextDelta, ToolCallDelta
from bombus_gateway.text.reading.bodies import alternatives, held_back
from bombus_gateway.text.reading.syntax import ReadBody, tokens_in
from bombus_gateway.text.reading.tagged_calls import invoke_tags, tagged
from bombus_gateway.text.reading.values import Schemas, json_object, make_call, schemas_of


class MessageKind(Enum):
    TEXT = "text"
    REASONING = "reasoning"
    CALL = "call"
    UNKNOWN = "unknown"  # a message of this kind is returned as text, including its header


@dataclass(frozen=True)
class ChannelForm:
    """The marks of messages. `kinds` are patterns for headers; the first that matches determines a message's kind.

    `header` matches a valid header. If a model wrote other text in place of a header, the message is returned as text
    so that it is not lost. The pattern for a call has the group `name`, since the header names the tool; `read` reads
    the arguments.
    """

    name: str
    start: str
    message: str
    ends: tuple[str, ...]
    header: re.Pattern[str]
    kinds: tuple[tuple[re.Pattern[str], MessageKind], ...]
    read: ReadBody | None = None
    inner: tuple[str, ...] = ()

    @property
    def markers(self) -> frozenset[str]:
        return tokens_in(self.start, self.message, *self.ends, *self.inner)

    @property
    def reasons(self) -> bool:
        return any(kind is MessageKind.REASONING for _, kind in self.kinds)

    def kind(self, header: str) -> tuple[MessageKind, str]:
        """Return the kind of a message with this header, and the name of the tool that it calls, or "" if it calls
        none."""
        if self.header.fullmatch(header) is None:
            return MessageKind.UNKNOWN, ""
        for pattern, kind in self.kinds:
            if found := pattern.search(header):
                return kind, found["name"] if kind is MessageKind.CALL else ""
        return MessageKind.TEXT, ""


_ROLE_AND_RECIPIENT = r"\s|<\|start\|>|\b(?:assistant|developer|system|tool|user)\b|\bto=[^\s<]++"
_CHANNEL = r"<\|channel\|>\s*+(?:analysis|commentary|final)\b|<\|constrain\|>\s*+\w++|\b(?:code|json)\b"
CHANNELS = (
    ChannelForm(
        name="channels",
        start="<|start|>",
        message="<|message|>",
        ends=("<|end|>", "<|return|>", "<|call|>"),
        header=re.compile(rf"(?:{_ROLE_AND_RECIPIENT}|{_CHANNEL})*+"),
        kinds=(
            (re.compile(r"\bto=functions\.(?P<name>[^\s<]+)"), MessageKind.CALL),
            (re.compile(r"\bto="), MessageKind.UNKNOWN),
            (re.compile(r"<\|channel\|>analysis\b"), MessageKind.REASONING),
        ),
        inner=("<|channel|>", "<|constrain|>"),
    ),
    ChannelForm(
        name="recipients",
        start="<|start|>",
        message="<|message|>",
        ends=("<|eom|>", "<|eot|>"),
        header=re.compile(rf"(?:{_ROLE_AND_RECIPIENT})*+"),
        kinds=(
            (re.compile(r"\bto=self\b"), MessageKind.REASONING),
            (re.compile(r"\bto=user\b"), MessageKind.TEXT),
            (re.compile(r"\bto=(?P<name>[^\s<]+)"), MessageKind.CALL),
        ),
        read=tagged(invoke_tags("atem:", "function_calls")),
    ),
    ChannelForm(
        name="recipients in lines",
        start=">>>",
        message="\n",
        ends=("<|eot_id|>",),
        header=re.compile(r"(?:>>>)?[\w.-]+"),
        kinds=(
            (re.compile(r"(?<![\w.-])all\Z"), MessageKind.TEXT),
            (re.compile(r"(?P<name>[\w.-]+)"), MessageKind.CALL),
        ),
    ),
)
# A header consists of a few words. Anything else in its place is text and is returned immediately.
_NOT_IN_HEADERS = r"[^\w.\-=: <|>]"


class ChannelReader:
    """Splits a turn into messages, and returns their contents as text, reasoning and calls.

    The turn begins within a header, or within a message that was begun in `prompt_end`, the end of the prompt. Invalid
    calls, calls beyond an answer's limit, and text outside of messages are returned verbatim as text.
    """

    def __init__(self, form: ChannelForm, prompt_end: str, tools: Sequence[Mapping[str, Any]]) -> None:
        self._form = form
        self._tools = bool(tools)
        self._schemas: Schemas = cache(partial(schemas_of, tools))
        self._marks = (form.start, form.message, *form.ends)
        self._in_header = re.compile(f"{alternatives(self._marks)}|{_NOT_IN_HEADERS}")
        self._in_body = re.compile(alternatives((form.start, *form.ends)))
        self._rest = ""
        self._kept: list[str] = []  # a header, or a header and body, that may turn out to be text
        self._body_at = 0  # where the body begins in `_kept`
        self._tool = ""
        self._calls = 0
        self._kind: MessageKind | None = None  # None while in a header
        _, started, header = prompt_end.rpartition(form.start)
        if started:
            self.feed(header)
            # The part of a message that is in the prompt is never returned as text.
            self._kept = self._kept[self._body_at :] if self._kind is MessageKind.CALL else []
            self._body_at = 0

    def feed(self, text: str) -> list[Delta]:
        """Read new text. Return the deltas that can no longer change."""
        text = self._rest + text
        out: list[Delta] = []
        at = 0
        while True:
            pattern = self._in_header if self._kind is None else self._in_body
            found = pattern.search(text, at)
            end = found.start() if found else len(text) - held_back(text, at, self._marks)
            self._add(text[at:end], out)
            at = end
            if found is None:
                break
            at = found.end() if found[0] in self._marks else at
            self._pass(found[0], out)
        self._rest = text[at:]
        return out

    def finish(self) -> list[Delta]:
        """End the turn, and return the remaining deltas.

        A complete call counts even without its closing mark, which may be a token that decodes to no text.
        """
        out: list[Delta] = []
        rest, self._rest = self._rest, ""
        self._add(rest, out)
        self._end_message("", out)
        return out

    def _add(self, text: str, out: list[Delta]) -> None:
        if not text:
            return
        if self._kind is MessageKind.TEXT:
            out.append(TextDelta(text))
        elif self._kind is MessageKind.REASONING:
            out.append(ReasoningDelta(text))
        else:
            self._kept.append(text)

    def _pass(self, mark: str, out: list[Delta]) -> None:
        """Handle a mark, or a character that cannot be in a header."""
        form = self._form
        if mark == form.message:
            self._begin_message("".join(self._kept))
        elif mark == form.start:
            self._end_message("", out)
            self._kind, self._kept = None, [mark]
        else:
            self._end_message(mark if mark in form.ends else "", out)
            self._kind = MessageKind.TEXT

    def _begin_message(self, header: str) -> None:
        self._kind, self._tool = self._form.kind(header)
        if self._kind is MessageKind.CALL and not self._tools:
            self._kind = MessageKind.UNKNOWN
        if self._kind in (MessageKind.CALL, MessageKind.UNKNOWN):
            self._kept.append(self._form.message)
            self._body_at = len(self._kept)
        else:
            self._kept = []

    def _end_message(self, mark: str, out: list[Delta]) -> None:
        kept, self._kept = self._kept, []
        if self._kind is MessageKind.CALL:
            call = self._read("".join(kept[self._body_at :]))
            if call is not None and self._calls < limits.CALLS_IN_ANSWER:
                out.append(call)
                self._calls += 1
                return
        if kept:
            out.append(TextDelta("".join([*kept, mark])))

    def _read(self, body: str) -> ToolCallDelta | None:
        try:
            if self._form.read is None:
                return make_call(self._tool, json_object(body))
            (call,) = self._form.read(body, self._schemas)
        except ValueError:  # not a call, so it is text
            return None
        return call if call.name == self._tool else None
