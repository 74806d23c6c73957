"""Reads a turn as it arrives: text, reasoning between marks, and calls between marks."""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache, cached_property, lru_cache, partial
from typing import Any

from bombus_gateway import limits
from bombus_gateway.text.deltas import Delta, ReasoningDelta, TextDelta, ToolCallDelta
from bombus_gateway.text.reading.bodies import BodyEnd, BodyForm, alternatives, held_back
from bombus_gateway.text.reading.syntax import CallSyntax, Thinking
from bombus_gateway.text.reading.values import Schemas, schemas_of

_SPACE = re.compile(r"\s*")
_BETWEEN_CALLS = re.compile(r"[\s;,]*")
_NEVER = re.compile(r"(?!)")
_NO_BODY = BodyEnd(BodyForm())


@lru_cache(256)
def _opening_of(marks: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile(alternatives(marks))


class TurnReader:
    """Splits a turn into text, reasoning and calls.

    Text is returned as soon as it cannot be the beginning of a mark, and a call once it is closed. Invalid calls, and
    calls beyond an answer's limit, are returned verbatim as text. White space before a call and around reasoning is
    part of the format and is dropped, as are the marks `frames` around text and the `lead` before the first text. A
    mark that closes reasoning is also dropped at the start of a turn: some models write it there to say that there is
    no reasoning.
    """

    def __init__(  # noqa: PLR0913 - the parts that a turn may have
        self,
        syntax: CallSyntax | None,
        thinking: Thinking | None,
        tools: Sequence[Mapping[str, Any]],
        inside_reasoning: bool = False,
        frames: Sequence[str] = (),
        lead: str = "",
    ) -> None:
        self._syntax = syntax
        self._thinking = thinking
        self._tools = tools
        self._frames = frames
        around_reasoning = (thinking.open, thinking.close) if thinking else ()
        self._lead = lead
        self._marks = (*(syntax.opens if syntax else ()), *around_reasoning, *frames, *((lead,) if lead else ()))
        self._opening = _opening_of(self._marks) if self._marks else _NEVER
        self._rest = ""
        self._held: list[str] = []  # white space, dropped if a mark follows
        self._opened = ""
        self._body: list[str] = []
        self._body_syntax: CallSyntax | None = None
        self._end = _NO_BODY
        self._calls = 0
        self._at_start = True  # whether a call without a mark may begin here
        self._said_text = False
        self._thought = False
        self._thought_space: list[str] = []
        self._after: Thinking | CallSyntax | None = None  # the reasoning or call that ended since the last text
        # A method of the class: a reader with a bound method refers to itself, so only the garbage collector frees it.
        self._take: Callable[[TurnReader, str, int, list[Delta]], int] = (
            TurnReader._take_reasoning if inside_reasoning and thinking else TurnReader._take_text
        )

    def feed(self, text: str) -> list[Delta]:
        """Read new text. Return the deltas that can no longer change."""
        text = self._rest + text
        out: list[Delta] = []
        at = 0
        while True:
            before = self._take
            end = before(self, text, at, out)
            if end == at and self._take is before:
                break
            at = end
        self._rest = text[at:]
        return out

    def finish(self) -> list[Delta]:
        """End the turn. Return the deltas that were held back."""
        out: list[Delta] = []
        rest, self._rest = self._rest, ""
        if self._take is TurnReader._take_call:
            self._end_call(rest, out, self._body_syntax is not None and self._body_syntax.ends_with_turn)
        elif self._take is TurnReader._take_reasoning:
            self._say_reasoning(rest, out)
            self._end_reasoning()
        else:
            self._say(rest, out)
        if self._held and self._after is None:
            out.append(TextDelta("".join(self._held)))
        self._held = []
        return out

    # ---- text ----

    def _take_text(self, text: str, at: int, out: list[Delta]) -> int:
        if self._at_start and self._syntax and self._syntax.bare:
            at = self._hold_space(text, at)
            if text.startswith(self._syntax.bare, at):
                self._begin_call("", self._syntax.unmarked or self._syntax)
                return at
        found = self._opening.search(text, at)
        end = found.start() if found else len(text) - held_back(text, at, self._marks)
        self._say(text[at:end], out)
        if found is None:
            return end
        if self._thinking and found[0] == self._thinking.open:
            self._begin_reasoning()
        elif self._thinking and found[0] == self._thinking.close:
            self._close_unopened(out)
        elif found[0] == self._lead:
            self._say(self._lead if self._said_text else "", out)
        elif self._syntax and found[0] not in self._frames:
            self._begin_call(found[0], self._syntax)
        return found.end()

    def _hold_space(self, text: str, at: int) -> int:
        """Hold back white space, or separators after a call, that may precede a call without a mark.

        Returns the offset after the text held back.
        """
        pattern = _BETWEEN_CALLS if isinstance(self._after, CallSyntax) else _SPACE
        found = pattern.match(text, at)
        end = found.end() if found else at
        if end > at and not isinstance(self._after, Thinking):
            self._held.append(text[at:end])
        return end

    def _say(self, text: str, out: list[Delta]) -> None:
        """Add text to `out`, holding back white space at its end."""
        if isinstance(self._after, Thinking):
            text = text.lstrip()
        body = text.rstrip() if self._opening is not _NEVER else text
        if body:
            out.append(TextDelta("".join([*self._held, body])))
            self._held = []
            self._said_text, self._at_start, self._after = True, False, None
        if len(text) > len(body):
            self._held.append(text[len(body) :])

    # ---- reasoning ----

    def _begin_reasoning(self) -> None:
        if not self._said_text:
            self._held = []
        self._thought = False
        self._take = TurnReader._take_reasoning

    def _close_unopened(self, out: list[Delta]) -> None:
        if self._said_text or self._after is not None:
            self._say(self._thinking.close if self._thinking else "", out)
            return
        self._held = []
        self._end_reasoning()

    def _take_reasoning(self, text: str, at: int, out: list[Delta]) -> int:
        close = self._thinking.close if self._thinking else ""
        place = text.find(close, at)
        self._say_reasoning(text[at : place if place >= 0 else len(text) - held_back(text, at, (close,))], out)
        if place < 0:
            return len(text) - held_back(text, at, (close,))
        self._end_reasoning()
        return place + len(close)

    def _say_reasoning(self, text: str, out: list[Delta]) -> None:
        text = text if self._thought else text.lstrip()
        body = text.rstrip()
        if body:
            out.append(ReasoningDelta("".join([*self._thought_space, body])))
            self._thought_space = []
            self._thought = True
        if len(text) > len(body):
            self._thought_space.append(text[len(body) :])

    def _end_reasoning(self) -> None:
        self._thought_space = []
        self._after = self._thinking
        self._at_start = True
        self._take = TurnReader._take_text

    # ---- calls ----

    @cached_property
    def _schemas(self) -> Schemas:
        return cache(partial(schemas_of, self._tools))

    def _begin_call(self, mark: str, syntax: CallSyntax) -> None:
        self._opened, self._body, self._body_syntax, self._end = mark, [], syntax, BodyEnd(syntax.form)
        self._take = TurnReader._take_call

    def _take_call(self, text: str, at: int, out: list[Delta]) -> int:
        end, ended = self._end.take(text, at)
        self._body.append(text[at:end])
        if ended:
            self._end_call("", out, True)
        return end

    def _end_call(self, rest: str, out: list[Delta], complete: bool) -> None:
        body = "".join([*self._body, rest])
        self._body = []
        self._take = TurnReader._take_text
        calls = self._read(body) if complete else []
        if not calls or self._calls + len(calls) > limits.CALLS_IN_ANSWER:
            self._say(self._opened + body, out)
            return
        out += calls
        self._calls += len(calls)
        self._held = []
        self._after = self._syntax
        self._at_start = True

    def _read(self, body: str) -> list[ToolCallDelta]:
        syntax = self._body_syntax
        if syntax is None:
            return []
        try:
            return syntax.read(body.removesuffix(syntax.form.close), self._schemas)
        except ValueError:  # not a call, so it is text
            return []
