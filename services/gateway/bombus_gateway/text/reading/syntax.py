"""The syntax in which a model writes tool calls, and the marks around its reasoning."""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from bombus_gateway.text.deltas import ToolCallDelta
from bombus_gateway.text.reading.bodies import BodyForm
from bombus_gateway.text.reading.values import Schemas

# Reads the text between a call's marks. Raises `ValueError` if the text is not a call.
ReadBody = Callable[[str, Schemas], list[ToolCallDelta]]

_TAG = re.compile(r"\]<\]\w+\[>\[|<[^<>\s]+>|\[/?[A-Z_]+\]")


@dataclass(frozen=True)
class CallSyntax:
    """How tool calls are written: the marks that open a body, how the body's end is found, and how the body is read.

    A body contains all calls between the same two marks. `bare` is a bracket that may begin a body without a mark, at
    the beginning of an answer or after a call; `unmarked` is the syntax of such a body if it differs. `ends_with_turn`
    says whether the end of the answer also ends a body. `inner` are marks within bodies. `announced_by` is text with
    which a template describes the syntax to the model; it identifies the syntax if the template leaves calls out of the
    history.
    """

    name: str
    opens: tuple[str, ...]
    form: BodyForm
    read: ReadBody
    bare: str = ""
    ends_with_turn: bool = False
    inner: tuple[str, ...] = ()
    announced_by: str = ""
    unmarked: "CallSyntax | None" = None

    def or_bare(self, other: "CallSyntax") -> "CallSyntax":
        """Return a syntax that reads calls with marks as this syntax does, and calls without marks as `other` does."""
        return replace(self, bare=other.bare, unmarked=other)

    @property
    def markers(self) -> frozenset[str]:
        return tokens_in(*self.opens, self.form.close, *self.inner)


@dataclass(frozen=True)
class Thinking:
    """The marks around reasoning."""

    open: str
    close: str

    @property
    def markers(self) -> frozenset[str]:
        return tokens_in(self.open, self.close)


def tokens_in(*marks: str) -> frozenset[str]:
    """Return the parts of `marks` that may each be a single special token."""
    return frozenset(token for mark in marks for token in (_TAG.findall(mark) or [mark]) if token)
