"""What a harness knows of its own history: which answer each request continues. Pure.

It knows that by what it did, and not by comparing messages: an answer that it wrote back in other letters is the same
answer, and one that it put behind other messages is not.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

from tests.histories.dialect import Ask
from tests.histories.entries import Entry, Said, Style, Visible, words_of

Place = int  # stands for a conversation; those that are equal but for white space in answers have the same


@dataclass(frozen=True)
class Tip:
    """The answer that a request continues, and where it was sampled.

    `named`: what comes back says which one it is, so that another one which says the same is wrong. `reasoned`: its
    reasoning comes back too, and tells it from others.
    """

    place: Place
    said: Said
    count: int  # entries up to it
    named: bool
    reasoned: bool

    @property
    def is_told(self) -> bool:
        """Whether it is told from others that say the same."""
        return self.named or self.reasoned


@dataclass
class Asked:
    """A request, and what its harness knows of it. `call` is empty while no answer has come.

    `began` and `ended` are steps of the history, in their order.
    """

    place: Place
    tip: Tip | None
    entries: tuple[Entry, ...]
    body: bytes
    auxiliary_call: str
    began: int
    ended: int = 0
    said: Said | None = None

    @property
    def call(self) -> str:
        return self.said.call if self.said is not None else ""


@dataclass
class Truth:
    """All requests of an episode, and what was answered where. `names` is that of its dialect."""

    names: Callable[[Said, Style], bool]
    asked: list[Asked] = field(default_factory=list)
    retried: list[tuple[Asked, Said]] = field(default_factory=list)  # with a mark, and what they were answered
    _answers: dict[Place, set[Visible]] = field(default_factory=dict)
    _steps: int = 0

    def ask(self, ask: Ask, entries: tuple[Entry, ...], body: bytes, auxiliary_call: str) -> Asked:
        """Note a request before it is sent. `entries` are the whole conversation, which it may name in part."""
        place, tip = self.walk(ask.tools, entries, bool(ask.continues))
        self._steps += 1
        asked = Asked(place, tip, entries, body, auxiliary_call, self._steps)
        self.asked.append(asked)
        return asked

    def answer(self, asked: Asked, said: Said) -> None:
        self._steps += 1
        asked.said, asked.ended = said, self._steps
        self._answers.setdefault(asked.place, set()).add(said.visible)

    def walk(self, tools: Sequence[str], entries: Sequence[Entry], named: bool = False) -> tuple[Place, Tip | None]:
        """Return the place of a conversation, and the last of its answers that stands where it was sampled."""
        place: Place = hash(tuple(tools))
        tip: Tip | None = None
        for count, entry in enumerate(entries, start=1):
            said = entry.said
            if said is None:
                place = hash((place, entry.key))
            elif said.visible in self._answers.get(place, ()):
                by_ids = said.has_own_ids and not entry.style.own_ids
                told = named or by_ids or self.names(said, entry.style)
                tip = Tip(place, said, count, told, bool(said.reasoning) and (entry.style.reasoning or named))
                place = after(place, said.visible)
            else:
                style: Hashable = entry.style
                place = hash((place, said.visible, style))
        return place, tip

    def stands(self, tools: Sequence[str], entries: Sequence[Entry], at: int) -> bool:
        """Return whether an answer of a conversation stands where it was sampled."""
        said = entries[at].said
        return said is not None and said.visible in self._answers.get(self.walk(tools, entries[:at])[0], ())

    def continues(self, entries: Sequence[Entry]) -> tuple[Said, int] | None:
        """Return the last answer of a conversation, and how many entries there are up to it, if it may be named.

        It may where its request had the entries before it, whatever its instructions were.
        """
        last = next((at for at in range(len(entries) - 1, -1, -1) if entries[at].said is not None), None)
        if last is None:
            return None
        said = entries[last].said
        assert said is not None
        asked = next((each for each in self.asked if each.call == said.call), None)
        same = asked is not None and _said_to_it(asked.entries) == _said_to_it(entries[:last])
        return (said, last + 1) if same else None


def after(place: Place, visible: Visible) -> Place:
    return hash((place, "answer", words_of(visible)))


def _said_to_it(entries: Sequence[Entry]) -> tuple[Entry, ...]:
    """Return a conversation without the instructions."""
    return tuple(entries[1:]) if entries and entries[0].kind == "system" else tuple(entries)
