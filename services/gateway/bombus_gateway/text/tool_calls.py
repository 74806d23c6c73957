"""Tool calls as text: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, parsed while they are generated."""

import json
from typing import Any

import msgspec

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class TextDelta(msgspec.Struct, frozen=True):
    """Text of the answer."""

    text: str


class ReasoningDelta(msgspec.Struct, frozen=True):
    """Text of the model's reasoning."""

    text: str


class ToolCallDelta(msgspec.Struct, frozen=True):
    """A whole tool call; `arguments` is JSON text."""

    name: str
    arguments: str
    id: str = ""  # where the model's format has one


Delta = TextDelta | ReasoningDelta | ToolCallDelta


class PlainReader:
    """Reads a completion as text alone."""

    def feed(self, text: str, tokens: list[int]) -> list[Delta]:
        return [TextDelta(text)] if text else []

    def finish(self) -> list[Delta]:
        return []


class ToolCallReader:
    """Splits a completion into text and tool calls.

    White space before a call belongs to the format and is dropped. A call that is not valid JSON, names no tool or is
    never closed does not count: it is returned as text, so that nothing that the model wrote is hidden.
    """

    def __init__(self) -> None:
        self._buffer = ""
        self._inside = False
        self._called = False

    def feed(self, text: str, tokens: list[int]) -> list[Delta]:
        self._buffer += text
        out: list[Delta] = []
        while self._take_call(out) if self._inside else self._take_text(out):
            pass
        return out

    def finish(self) -> list[Delta]:
        rest = OPEN + self._buffer if self._inside else self._buffer
        self._buffer, self._inside = "", False
        return [TextDelta(rest)] if rest and not (self._called and rest.isspace()) else []

    def _take_text(self, out: list[Delta]) -> bool:
        """Move text from the buffer to `out`. Returns whether a call begins after it."""
        place = self._buffer.find(OPEN)
        text = self._buffer[:place].rstrip() if place >= 0 else self._buffer[: self._settled()]
        self._buffer = self._buffer[place + len(OPEN) :] if place >= 0 else self._buffer[len(text) :]
        if text:
            out.append(TextDelta(text))
        self._inside = place >= 0
        return self._inside

    def _settled(self) -> int:
        """Return how much of the buffer is neither the beginning of a call nor white space before one."""
        end = len(self._buffer)
        for length in range(min(len(OPEN) - 1, end), 0, -1):
            if OPEN.startswith(self._buffer[end - length :]):
                end -= length
                break
        return len(self._buffer[:end].rstrip())

    def _take_call(self, out: list[Delta]) -> bool:
        """Move a closed call from the buffer to `out`. Returns whether there was one."""
        place = self._buffer.find(CLOSE)
        if place < 0:
            return False
        body, self._buffer = self._buffer[:place], self._buffer[place + len(CLOSE) :]
        call = read_call(body)
        self._called = self._called or call is not None
        out.append(call if call is not None else TextDelta(OPEN + body + CLOSE))
        self._inside = False
        return True


def read_call(body: str) -> ToolCallDelta | None:
    """Return the call that a JSON text stands for, or None if it is not a call."""
    try:
        found: Any = msgspec.json.decode(body.strip())
    except msgspec.DecodeError:
        return None
    if not isinstance(found, dict) or not isinstance(found.get("name"), str) or not found["name"]:
        return None
    arguments = found.get("arguments", found.get("parameters", {}))
    if isinstance(arguments, str):
        try:
            arguments = msgspec.json.decode(arguments)
        except msgspec.DecodeError:
            return None
    if not isinstance(arguments, dict):
        return None
    return ToolCallDelta(found["name"], json.dumps(arguments, ensure_ascii=False))
