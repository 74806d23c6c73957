"""Runs conversations through our renderer and compares what it does with the reference."""

from collections import Counter
from collections.abc import Iterator, Sequence
from enum import StrEnum
from itertools import pairwise
from typing import Any, NamedTuple

from bombus.errors import Refused
from bombus.hive.records import pack_tokens
from bombus_gateway.text.message import ChatMessage
from bombus_gateway.text.rendering import TextModel
from tests.templates.conversations import (
    CONVERSATIONS,
    PARIS,
    TOOLS,
    Conversation,
    assistant,
    call,
    result,
    system,
    user,
)
from tests.templates.families import MODEL, Family
from tests.templates.reference import Conversations, Expected, Ids, Reference, Refusal, Safe


class Kind(StrEnum):
    """How a conversation came out. The last two are failures."""

    EQUAL = "equal"
    REFUSED = "refused as the template refuses"
    LOST = "refused because the template loses a part"
    WRONG = "wrong"
    ERROR = "errors"


class Outcome(NamedTuple):
    conversation: str
    kind: Kind
    detail: str = ""

    @property
    def failed(self) -> bool:
        return self.kind in (Kind.WRONG, Kind.ERROR)


class Tally:
    """Counts the outcomes of a whole run, for its last line."""

    def __init__(self) -> None:
        self.kinds: Counter[Kind] = Counter()
        self.templates: set[str] = set()

    def add(self, template: str, outcomes: Sequence[Outcome]) -> None:
        self.templates.add(template)
        self.kinds.update(outcome.kind for outcome in outcomes)

    def __str__(self) -> str:
        kinds = ", ".join(f"{self.kinds[kind]} {kind}" for kind in Kind)
        return f"{len(self.templates)} templates, {self.kinds.total()} conversations: {kinds}"


TALLY = Tally()
ALL = Conversations(CONVERSATIONS)


class Subject(NamedTuple):
    """A family as transformers has it, and as we have it: as a model of an unknown name."""

    reference: Reference
    ours: TextModel


def subject(family: Family) -> Subject:
    return Subject(Reference(family), TextModel(family.files, MODEL))


def run(subject: Subject, conversations: Conversations = ALL) -> list[Outcome]:
    """Render all conversations with our renderer, and compare each with what transformers makes of it."""
    cases = subject.reference.cases(conversations)
    return [_compare(*subject, case.conversation, subject.reference.expected(case)) for case in cases]


def _compare(reference: Reference, ours: TextModel, sent: Conversation, expected: Expected) -> Outcome:
    try:
        ids = ours.renderer.render(sent.messages, sent.tools)
    except Refused as refused:
        return _refused(sent.name, expected, refused)
    except Exception as error:  # any other error is a bug of ours, and the battery goes on
        return Outcome(sent.name, Kind.ERROR, f"{type(error).__name__}: {error}; expected {_short(expected)}")
    match expected:
        case Refusal(why, lost):
            rule = "should be refused: " if lost else "is rendered, and the template raises "
            return Outcome(sent.name, Kind.WRONG, rule + why)
        case Ids(wanted, _):
            detail = "" if ids == wanted else difference(reference, ids, wanted)
        case Safe(text, specials, _):
            detail = _unsafe(reference, ids, text, specials)
    return Outcome(sent.name, Kind.WRONG if detail else Kind.EQUAL, detail)


def _refused(name: str, expected: Expected, refused: Refused) -> Outcome:
    if isinstance(expected, Refusal):
        return Outcome(name, Kind.LOST if expected.lost else Kind.REFUSED, refused.why)
    if expected.or_refused:
        return Outcome(name, Kind.LOST, refused.why)
    return Outcome(name, Kind.WRONG, f"refused, and the template renders it: {refused.why}")


def _unsafe(reference: Reference, ids: Sequence[int], text: str, specials: Counter[int] | None) -> str:
    found = reference.decoded(ids)
    if found != text:
        return _first_difference(found, text)
    counted = reference.specials_of(ids)
    if specials is None or counted == specials:
        return ""
    more = {reference.fast.id_to_token(index): count for index, count in (counted - specials).items()}
    fewer = {reference.fast.id_to_token(index): count for index, count in (specials - counted).items()}
    return f"special tokens too many {more}, too few {fewer}"


def difference(reference: Reference, ours: Sequence[int], theirs: Sequence[int]) -> str:
    """Say where two renderings part: in their texts, or in their tokens where the texts are the same."""
    texts = [str(reference.fast.decode(list(ids), skip_special_tokens=False)) for ids in (ours, theirs)]
    if texts[0] != texts[1]:
        return _first_difference(*texts)
    place = common(ours, theirs)
    pieces = [
        [reference.fast.id_to_token(index) for index in ids[max(0, place - 2) : place + 6]] for ids in (ours, theirs)
    ]
    return f"the same text in other tokens: ours {pieces[0]}, theirs {pieces[1]}"


def common(ours: Sequence[object], theirs: Sequence[object]) -> int:
    """Return the length of the longest common prefix."""
    parted = (place for place, (left, right) in enumerate(zip(ours, theirs)) if left != right)
    return next(parted, min(len(ours), len(theirs)))


def _first_difference(ours: str, theirs: str) -> str:
    place = common(ours, theirs)
    around = slice(max(0, place - 40), place + 60)
    return f"ours   {ours[around]!r}\n    theirs {theirs[around]!r}"


def _short(expected: Expected) -> str:
    return expected.why if isinstance(expected, Refusal) else "ids"


# ---- bridging -----------------------------------------------------------------------------------------------------

Turn = tuple[list[ChatMessage], ChatMessage]
# Six turns: what the client sends each time, and what the model answers.
SIX_TURNS: list[Turn] = [
    ([system("You are brief."), user("Weather in Paris?")], assistant("", call(1, "weather", PARIS))),
    ([result(1, "sunny")], assistant("It is sunny.")),
    ([user("And the time?")], assistant("", call(2, "local_time", {"zone": "CET"}))),
    ([result(2, '{"time": "12:00"}')], assistant("Noon.")),
    ([user(" Grüße 🐝\n")], assistant("Hello.")),
    ([user("Bye.")], assistant("Bye!")),
]
PLAIN_TURNS: list[Turn] = [([user(f"Question {number}?\n")], assistant(f"Answer {number}.")) for number in range(6)]


def _whole(turns: list[Turn]) -> list[ChatMessage]:
    return [message for sent, answer in turns for message in (*sent, answer)]


WHOLE = Conversations(
    (Conversation("plain turns", _whole(PLAIN_TURNS)), Conversation("turns with tools", _whole(SIX_TURNS), TOOLS))
)


def bridge(subject: Subject) -> list[Outcome]:
    """Play six turns, with tools where the template has them, and compare each extension with the template's rendering.

    What the model samples is what the template writes for its turn, up to the token that ends it. Its tokens need not
    be those that the whole text would have: they are compared as text, and what is appended as tokens. Where the
    template rewrites its prompt, such as one that begins the reasoning that it leaves out of history, any answer is
    sampled, and the extension has to be None.
    """
    plain, tooled = subject.reference.cases(WHOLE)
    if tooled.refusal is None and not tooled.or_refused:
        return list(_bridges(*subject, SIX_TURNS, TOOLS))
    return list(_bridges(*subject, PLAIN_TURNS, [])) if plain.refusal is None else []


def _bridges(
    reference: Reference, ours: TextModel, turns: list[Turn], tools: list[dict[str, Any]]
) -> Iterator[Outcome]:
    messages: list[ChatMessage] = list(turns[0][0])
    sequence = ours.renderer.render(messages, tools)
    for number, ((_, answer), (sent, _)) in enumerate(pairwise(turns), 2):
        before = reference.texts.text(messages, tools)
        count = len(messages) + 1
        messages += [answer, *sent]
        text, wanted = reference.texts.text(messages, tools), reference.ids(messages, tools)
        sampled = _sampled(reference, ours, text.removeprefix(before) if text.startswith(before) else "Fine.")
        kept = reference.shown(text).startswith(reference.shown(before) + reference.decoded(sampled))
        history = sequence + sampled
        tail = ours.renderer.extend(pack_tokens(history), len(sequence), messages, count, tools)
        detail = _misjudged(reference, history, tail, wanted, kept)
        yield Outcome(f"turn {number}", Kind.WRONG if detail else Kind.EQUAL, detail)
        sequence = wanted if tail is None else history + tail


def _misjudged(reference: Reference, history: list[int], tail: list[int] | None, wanted: list[int], kept: bool) -> str:
    if tail is None or not kept:
        return "" if (tail is None) != kept else "must be a branch" if tail else "need not be a branch"
    if reference.decoded(history + tail) != reference.decoded(wanted):
        return difference(reference, history + tail, wanted)
    return "" if tail == wanted[-len(tail) :] else difference(reference, tail, wanted[-len(tail) :])


def _sampled(reference: Reference, ours: TextModel, text: str) -> list[int]:
    """Return the tokens of an answer, up to the one that ends it. Where the text has none, one is added.

    It is encoded after a special token, so that a tokenizer that marks the beginning of a text marks nothing here.
    """
    stops = ours.renderer.stop_token_ids
    _, *tokens = reference.fast.encode(reference.family.bos + text, add_special_tokens=False).ids
    ends = [place for place, token in enumerate(tokens) if token in stops]
    return tokens[: ends[0] + 1] if ends else [*tokens, *stops[:1]]
