"""Determines from a chat template how its model writes tool calls and reasoning.

Conversations with known calls are rendered, and the syntax found is the one whose reader reads the same calls back from
the rendering. So each syntax is verified with the template itself; the model's name is not used.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from bombus.text.chat_template import TemplateRefused
from bombus_gateway.text.deltas import TextDelta, ToolCallDelta
from bombus_gateway.text.forms import common_start
from bombus_gateway.text.message import ChatMessage
from bombus_gateway.text.reading.bodies import BodyEnd, BodyForm
from bombus_gateway.text.reading.channels import CHANNELS, ChannelForm, ChannelReader
from bombus_gateway.text.reading.json_calls import read_json
from bombus_gateway.text.reading.syntax import CallSyntax, Thinking, tokens_in
from bombus_gateway.text.reading.syntaxes import FRAMES, SYNTAXES, THINKING, json_between
from bombus_gateway.text.reading.turns import TurnReader

# (messages, tools, add_generation_prompt) -> the rendered text, in which special tokens are written as their names.
RenderText = Callable[[Sequence[ChatMessage], Sequence[Mapping[str, Any]], bool], str]


@dataclass(frozen=True)
class Reading:
    """How a model's turns are read. If both `syntax` and `channels` are None, calls are read as text.

    `frames` are marks that the model writes around the text of answers, and `lead` is a word with a colon that it
    writes before the text. Both are removed.
    """

    syntax: CallSyntax | None = None
    thinking: Thinking | None = None
    channels: ChannelForm | None = None
    frames: tuple[str, ...] = ()
    lead: str = ""

    @property
    def calls(self) -> str:
        """The name of the call syntax, or "" if the model has none or it is unknown."""
        return self.channels.name if self.channels else self.syntax.name if self.syntax else ""

    @property
    def reasoning(self) -> str:
        """The mark that opens reasoning, or the name of the channels, or "" if there is no reasoning."""
        if self.channels:
            return self.channels.name if self.channels.reasons else ""
        return self.thinking.open if self.thinking else ""

    @property
    def begins_in_prompt(self) -> bool:
        """Whether the turn may begin in the prompt, so that `reader` needs the end of the prompt."""
        return self.channels is not None or self.thinking is not None

    @property
    def markers(self) -> frozenset[str]:
        """Tokens whose text a reader must be given, even if they are special tokens."""
        parts = (self.syntax, self.thinking, self.channels)
        return tokens_in(*self.frames).union(*(part.markers for part in parts if part))

    def reader(self, prompt_end: str, tools: Sequence[Mapping[str, Any]]) -> TurnReader | ChannelReader:
        """Return a reader for one turn.

        `prompt_end` is the end of the prompt's text, which may have opened reasoning. Calls are read only if there are
        `tools`. In formats that write all values as strings, the tools' schemas determine the types of the values.
        """
        if self.channels:
            return ChannelReader(self.channels, prompt_end, tools)
        inside = self.thinking is not None and prompt_end.rstrip().endswith(self.thinking.open)
        return TurnReader(self.syntax if tools else None, self.thinking, tools, inside, self.frames, self.lead)


def find_reading(render: RenderText, switched: Iterable[RenderText] = ()) -> Reading:
    """Determine how the template's model writes calls and reasoning. What cannot be determined is read as text.

    `switched` are renderings with other values of the template's variables, since a request may turn reasoning on. They
    are searched for reasoning only if `render` shows none.
    """
    found = _find_shown(render)
    if found.thinking or found.channels:
        return found
    return replace(found, thinking=next(filter(None, map(_find_thinking, switched)), None))


def _find_shown(render: RenderText) -> Reading:
    plain = Reading(thinking=_find_thinking(render), frames=_find_frames(render), lead=_find_lead(render))
    for empty, call_ids in product(("", None), _CALL_IDS):
        probes = list(_call_probes(render, empty, call_ids))
        if not probes:
            continue
        candidates = [
            *(Reading(channels=form) for form in CHANNELS),
            *(replace(plain, syntax=syntax) for syntax in SYNTAXES),
        ]
        learned = (replace(plain, syntax=syntax) for syntax in _learned(render, probes[0], plain))
        if found := _best(candidates, probes) or _best(learned, probes):
            # Some templates describe a mark to the model but leave it out of the history, so the model may write calls
            # either with or without it.
            written = found.syntax
            announced = _announced(render) if written and written.bare else None
            syntax = announced.or_bare(written) if announced and written else written
            return replace(plain, syntax=syntax, channels=found.channels)
    return replace(plain, syntax=_announced(render))


# ---- probes ----

_TEXT, _REASONING = "Tqx", "Rqx"
_USER: ChatMessage = {"role": "user", "content": "Please go on."}
_PARAMETERS = {
    "type": "object",
    "properties": {
        "a": {"type": "integer", "description": "A number."},
        "b": {"type": "string", "description": "A text."},
        "c": {"type": "object", "description": "An object.", "properties": {}},
    },
    "required": ["a"],
}
PROBE_TOOLS: tuple[Mapping[str, Any], ...] = tuple(
    {"type": "function", "function": {"name": name, "description": "A function.", "parameters": _PARAMETERS}}
    for name in ("f", "g_2")
)
_Calls = tuple[tuple[str, dict[str, Any]], ...]
# A candidate syntax must read the first probe; each further probe that it reads adds to its score. Some templates
# cannot write all probes.
_CALLS: tuple[_Calls, ...] = (
    (("f", {"a": 1, "b": "x y"}),),
    (("f", {"a": 1, "c": {"k": [1, True, "z"], "l": {"m": 1.5}}}),),
    (("f", {"b": "q\"u'o\n<é> 1"}),),
    (("f", {}),),
    (("f", {"a": 1}), ("g_2", {"b": "x"})),
    (("f", {"a": 1}), ("f", {"a": 2}), ("g_2", {"b": "1"})),
)
# Some templates require ids of nine letters and digits; others take the function's name from the id.
_CALL_IDS = (lambda name, index: f"callprob{index}", lambda name, index: f"functions.{name}:{index}")


@dataclass(frozen=True)
class _Probe:
    """A turn as the template writes it: the text before the turn, the text of the turn, and the calls in it."""

    prompt_end: str
    turn: str
    calls: _Calls


def _call_probes(render: RenderText, empty: str | None, call_id: Callable[[str, int], str]) -> Iterator[_Probe]:
    """Render conversations with calls. Yields nothing if the template refuses the first conversation."""
    for calls in _CALLS:
        listed = [_call(name, arguments, call_id(name, index)) for index, (name, arguments) in enumerate(calls)]
        message = {"role": "assistant", "content": empty, "tool_calls": listed}
        turn = turn_of(render, message)
        if turn is not None:
            yield _Probe(*turn, calls)
        elif calls == _CALLS[0]:
            return


def _call(name: str, arguments: dict[str, Any], call_id: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


_PART_OF_TAG = re.compile(r"(?:<[^<>\s]*|\[[A-Z_/]*)\Z")


def turn_of(render: RenderText, message: ChatMessage) -> tuple[str, str] | None:
    """Return the text that a template writes before a turn, and the turn's text, or None if the template refuses the
    turn."""
    try:
        prompt, whole = render([_USER], PROBE_TOOLS, True), render([_USER, message], PROBE_TOOLS, False)
    except TemplateRefused:
        return None
    # The prompt may open something, such as reasoning, that this turn does not have. The two texts then diverge within
    # a tag.
    before = common_start(prompt, whole)
    before = before if before == prompt else _PART_OF_TAG.sub("", before)
    return before, whole[len(before) :]


# ---- calls ----


def _best(candidates: Iterable[Reading], probes: Sequence[_Probe]) -> Reading | None:
    """Return the candidate that reads the most probes. If several do, return the one that leaves the least text
    unread."""
    best, best_score = None, (0, 0)
    for candidate in candidates:
        results = [_left_over(candidate, probe) for probe in probes]
        left = [result for result in results if result is not None]
        score = (len(left), -sum(left))
        if results[0] is not None and (best is None or score > best_score):
            best, best_score = candidate, score
    return best


def _left_over(reading: Reading, probe: _Probe) -> int | None:
    """Return how many characters of a probe are read as text, or None if the calls that are read differ from the
    probe's."""
    reader = reading.reader(probe.prompt_end, PROBE_TOOLS)
    deltas = [*reader.feed(probe.turn), *reader.finish()]
    calls = tuple((call.name, json.loads(call.arguments)) for call in deltas if isinstance(call, ToolCallDelta))
    if calls != probe.calls:
        return None
    return len("".join(delta.text for delta in deltas if isinstance(delta, TextDelta)).strip())


def _learned(render: RenderText, probe: _Probe, plain: Reading) -> Iterator[CallSyntax]:
    """Yield JSON syntaxes with the marks that this template writes around a call, even if these marks are not in the
    table."""
    thinking, reader = plain.thinking, plain.reader(probe.prompt_end, ())
    deltas = [*reader.feed(probe.turn), *reader.finish()]
    text = "".join(delta.text for delta in deltas if isinstance(delta, TextDelta)).strip()
    said = turn_of(render, {"role": "assistant", "content": _TEXT})
    end_of_turn = said[1].rpartition(_TEXT)[2].lstrip() if said else ""
    for bracket in sorted(set("[{") & set(text), key=text.index):
        start = text.index(bracket)
        end, _ = BodyEnd(BodyForm(strings="json", bracket=bracket)).take(text, start)
        opens, close = text[:start].strip(), _FIRST_TAG.match(text, end)
        if not opens or len(opens) > _MARK_MAX or "\n" in opens or (thinking and thinking.open in opens):
            continue
        if close and not end_of_turn.startswith(close[1]):
            yield json_between(f"json between {opens} and {close[1]}", opens, close[1])
        alone = BodyForm(strings="json", bracket=bracket)
        yield CallSyntax(f"json after {opens}", (opens,), alone, read_json)


_MARK_MAX = 40  # characters
_FIRST_TAG = re.compile(r"\s*(<[^<>\s]+>|\[/?[A-Z_]+\])")


def _announced(render: RenderText) -> CallSyntax | None:
    """Return the syntax that the template describes to the model, or the syntax whose mark it writes around the
    tools."""
    try:
        without, tools = render([_USER], (), False), render([_USER], PROBE_TOOLS, False)
    except TemplateRefused:
        return None
    marks = ((syntax, syntax.announced_by) for syntax in SYNTAXES if syntax.announced_by)
    return next((syntax for syntax, mark in marks if mark in tools and mark not in without), None)


# ---- texts and reasoning ----


def _find_frames(render: RenderText) -> tuple[str, ...]:
    said = turn_of(render, {"role": "assistant", "content": _TEXT})
    framed = (frames for frames in FRAMES if said and f"{frames[0]}{_TEXT}{frames[1]}" in said[1])
    return next(framed, ())


_LEAD = re.compile(r"\w[\w ]*[:：]")


def _find_lead(render: RenderText) -> str:
    said = turn_of(render, {"role": "assistant", "content": _TEXT})
    found = _LEAD.fullmatch(said[1].partition(_TEXT)[0].strip()) if said else None
    return found[0] if found else ""


def _find_thinking(render: RenderText) -> Thinking | None:
    return _written_thinking(render) or _prompted_thinking(render) or _dropped_thinking(render)


def _written_thinking(render: RenderText) -> Thinking | None:
    """Find the marks around a message's reasoning. Which field a template reads the reasoning from varies."""
    calls = {"tool_calls": [_call("f", {"a": 1}, "callprob0")]}
    for fields, more in product((("reasoning_content",), ("thinking",), ("reasoning",)), ({}, calls)):
        message = {"role": "assistant", "content": _TEXT, **dict.fromkeys(fields, _REASONING), **more}
        try:
            before, found, after = render([_USER, message], PROBE_TOOLS if more else (), False).partition(_REASONING)
        except TemplateRefused:
            continue
        thinking = _marks_around(before.rstrip(), after.lstrip()) if found else None
        if thinking is not None:
            return thinking
    return None


_LAST_TAG = re.compile(r"[<\[]([^<>\[\]\s/]+)[>\]]\Z")


def _marks_around(before: str, after: str) -> Thinking | None:
    for thinking in THINKING:
        if before.endswith(thinking.open) and after.startswith(thinking.close):
            return thinking
    tag = _LAST_TAG.search(before)
    close = f"{tag[0][0]}/{tag[0][1:]}" if tag else ""
    return Thinking(tag[0], close) if tag and after.startswith(close) else None


def _prompted_thinking(render: RenderText) -> Thinking | None:
    """Find marks that the template writes at the start of a turn, or that it describes to the model."""
    try:
        texts = [render([_USER], (), True), render([_USER, {"role": "assistant", "content": _TEXT}], (), False)]
    except TemplateRefused:
        return None
    found = (thinking for thinking in THINKING for text in texts if thinking.open in text or thinking.close in text)
    return next(found, None)


def _dropped_thinking(render: RenderText) -> Thinking | None:
    """Find the marks by which the template recognizes the reasoning that it drops from earlier answers."""
    for thinking in THINKING:
        content = f"{thinking.open}\n{_REASONING}\n{thinking.close}\n\n{_TEXT}"
        try:
            text = render([_USER, {"role": "assistant", "content": content}, _USER], (), False)
        except TemplateRefused:
            return None
        if _TEXT in text and _REASONING not in text:
            return thinking
    return None
