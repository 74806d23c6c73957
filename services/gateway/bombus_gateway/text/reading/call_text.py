"""Determines from a chat template how calls with JSON arguments are written, so that a call can be forced."""

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from bombus_gateway.text.deltas import ToolCallDelta
from bombus_gateway.text.message import ChatMessage
from bombus_gateway.text.reading.finding import PROBE_TOOLS, Reading, RenderText, turn_of

_NAMES = ("qxf_1", "qxg_2", "qxh_3")
_ARGUMENTS = {"qxk": "qxv"}
_ID_FORMS = ("callprob{index}", "functions.{name}:{index}")
_decoder = json.JSONDecoder()


@dataclass(frozen=True)
class CallText:
    """The text around calls: before the first name, after a name, between arguments and the next name, and at the end.

    If `between` is empty, only a single call can be written.
    """

    opens: str
    after_name: str
    between: str
    closes: str

    def head(self, name: str) -> str:
        """Return the text of a call from its name up to its arguments."""
        return f"{name}{self.after_name}"

    def write(self, calls: Sequence[tuple[str, str]]) -> str:
        """Return the text of the calls, each given as a name and its arguments."""
        return self.opens + self.between.join(self.head(name) + given for name, given in calls) + self.closes


def find_call_text(render: RenderText, reading: Reading, ends: Collection[str]) -> CallText | None:
    """Return how the template writes calls, or None if it does not write arguments as JSON or if it writes a call's id.

    `ends` are the names of the tokens that end a turn. A result is returned only if the model's own reader reads the
    calls back correctly.
    """
    if reading.syntax is None:
        return None
    for empty in ("", None):
        one = _gaps(render, 1, empty, ends)
        if one is None:
            continue
        opens, after_name, closes = one
        found = CallText(_without_reasoning(opens, reading), after_name, "", closes)
        if not _reads_back(reading, found, _NAMES[:1]):
            continue
        several = [_gaps(render, count, empty, ends) for count in (2, 3)]
        between = several[0][2] if several[0] else ""
        expected = [(opens, after_name, *[between, after_name] * more, closes) for more in (1, 2)]
        parallel = CallText(found.opens, after_name, between, closes)
        return parallel if several == expected and between and _reads_back(reading, parallel, _NAMES) else found
    return None


def calls_come_singly(render: RenderText, reading: Reading) -> bool:
    """Return whether each call can be read before the next one begins. In some syntaxes this is impossible, because
    calls form a list that can only be read as a whole."""
    if reading.syntax is not None and reading.syntax.unmarked is not None:
        return False  # the template never writes the mark, so calls with the mark may be a list
    for count, empty in product((2, 1), ("", None)):
        written = turn_of(render, _message(count, empty, _ID_FORMS[0]))
        if written is None:
            continue
        before, turn = written
        reader = reading.reader(before, PROBE_TOOLS)
        portions = (reader.feed(character) for character in turn)
        made = (sum(isinstance(delta, ToolCallDelta) for delta in portion) for portion in portions)
        return next(filter(None, made), 0) == 1
    return False


def _message(count: int, content: str | None, id_form: str) -> ChatMessage:
    calls: list[dict[str, Any]] = []
    for index, name in enumerate(_NAMES[:count]):
        function = {"name": name, "arguments": _ARGUMENTS}
        calls.append({"id": id_form.format(name=name, index=index), "type": "function", "function": function})
    return {"role": "assistant", "content": content, "tool_calls": calls}


def _gaps(render: RenderText, count: int, content: str | None, ends: Collection[str]) -> tuple[str, ...] | None:
    """Return the texts around the names and arguments in a turn with `count` calls.

    Returns None if the template refuses the calls, writes them in another form, or writes their ids.
    """
    turns = [turn_of(render, _message(count, content, id_form)) for id_form in _ID_FORMS]
    if turns[0] is None or turns[0] != turns[1]:
        return None
    text, at = turns[0][1], 0
    gaps: list[str] = []
    for name in _NAMES[:count]:
        start = text.find(name, at)
        span = _arguments(text, start + len(name)) if start >= 0 else None
        if span is None:
            return None
        gaps += [text[at:start], text[start + len(name) : span[0]]]
        at = span[1]
    places = [place for end in ends if (place := text.find(end, at)) >= 0]
    return (*gaps, text[at : min(places)]) if places else None


def _arguments(text: str, at: int) -> tuple[int, int] | None:
    """Return the start and end of the JSON arguments that follow a name, or None if there are none."""
    start = text.find("{", at)
    try:
        value, end = _decoder.raw_decode(text, start) if start >= 0 else (None, 0)
    except ValueError:
        return None
    return (start, end) if value == _ARGUMENTS else None


def _without_reasoning(opens: str, reading: Reading) -> str:
    """Return `opens` without the empty reasoning that the template writes before a call."""
    close = reading.thinking.close if reading.thinking else ""
    return opens.rpartition(close)[2].lstrip() if close and close in opens else opens


def _reads_back(reading: Reading, text: CallText, names: Sequence[str]) -> bool:
    """Return whether the model's reader, given calls written by `text`, reads back exactly these calls."""
    calls = [(f"{name}_x", '{"k": [1, {"l": "m\\"}"}]}') for name in names]
    reader = reading.reader("", PROBE_TOOLS)
    deltas = [*reader.feed(text.write(calls)), *reader.finish()]
    read = [(d.name, json.loads(d.arguments)) for d in deltas if isinstance(d, ToolCallDelta)]
    return len(deltas) == len(calls) and read == [(name, json.loads(arguments)) for name, arguments in calls]
