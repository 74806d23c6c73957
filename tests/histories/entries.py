"""A conversation as a simulated harness keeps it, whatever its dialect. Pure."""

import random
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

MODELS_ID_MAX = 8  # characters of an id that the model writes
Visible = tuple[str, tuple[tuple[str, str], ...]]  # the text of an answer, and the names and arguments of its calls


def words_of(visible: Visible) -> Visible:
    """Return what an answer says without regard to its white space."""
    text, calls = visible
    return " ".join(text.split()), calls


@dataclass(frozen=True)
class SaidCall:
    """A call of the model as its client got it. `arguments` is text."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class Said:
    """An answer as its client got it. `call` is the id of the call; `parts` are what its dialect made it of."""

    call: str
    text: str = ""
    reasoning: str = ""
    calls: tuple[SaidCall, ...] = ()
    finish: str = ""
    parts: tuple[dict[str, Any], ...] = ()

    @property
    def visible(self) -> Visible:
        return self.text, tuple((call.name, call.arguments) for call in self.calls)

    @property
    def has_own_ids(self) -> bool:
        """Return whether it has calls, all with ids that no other answer has. Ids that a model writes are short."""
        return bool(self.calls) and all(len(call.id) > MODELS_ID_MAX for call in self.calls)

    @property
    def is_nothing(self) -> bool:
        return not self.text and not self.calls


@dataclass(frozen=True)
class Style:
    """How a harness writes an answer back.

    `split`: its calls are one message, or one each (`apart`), or one each with its result after it (`between`).
    `own_ids`: the harness has given the calls ids of its own. `fields` are added to messages. `parts`: texts are lists.
    """

    spaces: Literal["as it was", "stripped", "carriage returns", "wrapped", "stop put back"] = "as it was"
    arguments: Literal["as they were", "written anew", "whole numbers", "by a schema", "renamed"] = "as they were"
    beside: Literal["kept", "null", "empty", "absent"] = "kept"
    split: Literal["one", "apart", "between"] = "one"
    own_ids: bool = False
    reasoning: bool = True
    fields: bool = False
    parts: bool = False
    bare: bool = False  # without the ids of items, signatures and the like


VERBATIM = Style()


def any_style(chance: random.Random, said: Said, stops: bool = False, own_ids: bool | None = None) -> Style:
    """Return a way to write an answer back that says the same. `stops`: a stop string has ended it.

    `own_ids`: whether the harness has ids of its own for the calls, where that is decided already.
    """
    if own_ids is None:
        own_ids = bool(said.calls) and chance.random() < 0.1
    told = said.has_own_ids and not own_ids  # otherwise its words have to tell it
    spaces = ["as it was", "as it was", "stripped", "carriage returns", "wrapped"] + ["stop put back"] * 3 * stops
    arguments = ["as they were", "as they were", "written anew", "whole numbers"] + ["by a schema", "renamed"] * told
    return Style(
        spaces=chance.choice(spaces),  # type: ignore[arg-type]
        arguments=chance.choice(arguments),  # type: ignore[arg-type]
        beside=chance.choice(("kept", "kept", "null", "empty", "absent")) if told else "kept",
        split="one" if len(said.calls) < 2 or own_ids else chance.choice(("one", "apart", "between")),
        own_ids=own_ids,
        reasoning=said.is_nothing or chance.random() < 0.6,
        fields=chance.random() < 0.3,
        parts=chance.random() < 0.3,
        bare=chance.random() < 0.3,
    )


@dataclass(frozen=True)
class Entry:
    """One thing in a conversation. An answer and the results of its calls are entries of their own."""

    kind: Literal["system", "user", "answer", "results", "own"]
    text: str = ""
    said: Said | None = None
    style: Style = VERBATIM
    results: tuple[tuple[str, str], ...] = ()  # the id of each call, and its result

    @property
    def key(self) -> Hashable:
        """What makes two entries that are no answers the same one to the model."""
        return self.kind, self.text, tuple(text for _, text in self.results)


def system(text: str) -> Entry:
    return Entry("system", text)


def user(text: str) -> Entry:
    return Entry("user", text)


def own(text: str) -> Entry:
    """Return a message of the assistant that nobody has sampled."""
    return Entry("own", text)


def answer(said: Said, style: Style) -> Entry:
    return Entry("answer", said=said, style=style)


def results(answer: Entry, texts: Sequence[str]) -> Entry:
    """Return the results of an answer's calls, by the ids that the harness has for them."""
    assert answer.said is not None
    ids = [call_id(call, answer.style) for call in answer.said.calls]
    return Entry("results", results=tuple(zip(ids, texts, strict=True)))


def call_id(call: SaidCall, style: Style) -> str:
    return f"own-{call.id}" if style.own_ids else call.id
