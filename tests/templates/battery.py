"""Runs conversations through our renderer and compares what it does with the reference."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import datetime
from enum import StrEnum
from itertools import pairwise, product
from typing import Any, NamedTuple, Self

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
from tests.templates.reference import Conversations, Expected, Ids, Reference, Safe
from tests.templates.template_text import AT, CLOCK, Refusal


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
        self.played: Counter[str] = Counter()
        self.templates: set[str] = set()

    def add(self, template: str, outcomes: Sequence[Outcome]) -> None:
        self.templates.add(template)
        self.kinds.update(outcome.kind for outcome in outcomes)

    def __str__(self) -> str:
        kinds = ", ".join(f"{self.kinds[kind]} {kind}" for kind in Kind)
        played = ", ".join(f"{count} {how}" for how, count in sorted(self.played.items()))
        return (
            f"{len(self.templates)} templates, {self.kinds.total()} conversations: {kinds}; played: {played or 'none'}"
        )


TALLY = Tally()
ALL = Conversations(CONVERSATIONS)


class Subject(NamedTuple):
    """A family as transformers has it, and as we have it: as a model of an unknown name."""

    reference: Reference
    ours: TextModel

    def at(self, now: datetime) -> Self:
        """Return it with a reference at another time."""
        return self._replace(reference=self.reference.at(now))


def subject(family: Family) -> Subject:
    """Return a family at the time `AT`."""
    ours = TextModel(family.files, MODEL)
    if CLOCK in family.template:
        ours.renderer = ours.renderer.given({CLOCK: AT.strftime})
    return Subject(Reference(family), ours)


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
THOUGHT = "Let me think."
# Two calls at once, which some templates refuse.
PAIR = (call(1, "weather", PARIS), call(2, "local_time", {"zone": "CET"}))
PLAIN_TURNS: list[Turn] = [([user(f"Question {number}?\n")], assistant(f"Answer {number}.")) for number in range(6)]


def _whole(turns: list[Turn]) -> list[ChatMessage]:
    return [message for sent, answer in turns for message in (*sent, answer)]


WHOLE = Conversations(
    (Conversation("plain turns", _whole(PLAIN_TURNS)), Conversation("turns with tools", _whole(SIX_TURNS), TOOLS))
)


def turns_of(subject: Subject, tools: bool = True) -> tuple[list[Turn], list[dict[str, Any]]]:
    """Return six turns that the template can render, with `tools` where it has them; nothing where there are none."""
    plain, tooled = subject.reference.cases(WHOLE)
    if tools and tooled.refusal is None and not tooled.or_refused:
        return SIX_TURNS, TOOLS
    return (PLAIN_TURNS, []) if plain.refusal is None else ([], [])


def bridge(subject: Subject) -> list[Outcome]:
    """Play six turns and compare each extension with the template's rendering.

    What the model samples is what the template writes for its turn, up to the token that ends it. Its tokens need not
    be those that the whole text would have: they are compared as text, and what is appended as tokens. Where the
    template rewrites its prompt, the extension has to be None.
    """
    turns, tools = turns_of(subject)
    return list(_bridges(subject, turns, tools)) if turns else []


def _bridges(subject: Subject, turns: list[Turn], tools: list[dict[str, Any]]) -> Iterator[Outcome]:
    reference, ours = subject
    messages: list[ChatMessage] = list(turns[0][0])
    sequence = ours.renderer.render(messages, tools)
    for number, ((_, answer), (sent, _)) in enumerate(pairwise(turns), 2):
        before = reference.texts.text(messages, tools)
        said = spoken(subject, messages, answer, sent, tools)
        messages = [*messages, said.message, *sent]
        history, count = sequence + said.tokens, len(messages) - len(sent)
        tail = ours.renderer.extend(pack_tokens(history), len(sequence), messages, count, tools)
        detail = Extension(before, said.tokens, history, tail).misjudged(reference, messages, tools)
        yield Outcome(f"turn {number}", Kind.WRONG if detail else Kind.EQUAL, detail)
        sequence = reference.ids(messages, tools) if tail is None else history + tail


class Spoken(NamedTuple):
    """A message of the assistant, and the tokens that it samples."""

    message: ChatMessage
    tokens: list[int]


def spoken(
    subject: Subject,
    messages: Sequence[ChatMessage],
    answer: ChatMessage,
    following: Sequence[ChatMessage],
    tools: Sequence[dict[str, Any]],
) -> Spoken:
    """Return an answer as the template writes it after its prompt.

    Its tokens go up to the one that ends a completion; where the template writes none, one is added. Where the template
    never writes what follows its prompt, it is another answer.
    """
    reference, ours = subject
    before = reference.texts.text(messages, tools)
    unended: Spoken | None = None
    for message, turn, is_last in _turns(subject, before, messages, answer, following, tools):
        tokens = _tokens_after(reference, turn)
        ends = [place for place, token in enumerate(tokens) if token in ours.renderer.stop_token_ids]
        if ends:
            return Spoken(message, tokens[: ends[0] + 1])
        unended = unended or (Spoken(message, tokens) if is_last else None)
    unended = unended or _another_answer(subject, before)
    return Spoken(unended.message, [*unended.tokens, *ours.renderer.stop_token_ids[:1]])


_Turn = tuple[ChatMessage, str, bool]


def _turns(
    subject: Subject,
    before: str,
    messages: Sequence[ChatMessage],
    answer: ChatMessage,
    following: Sequence[ChatMessage],
    tools: Sequence[dict[str, Any]],
) -> list[_Turn]:
    """Return forms of the answer with the text that the template writes for it, and whether nothing follows that.

    The answer gets reasoning where the prompt begins it, and where the template writes it only so. Some templates write
    the beginning of an answer otherwise than their prompt: then the rest of it follows the prompt.
    """
    texts, thinking = subject.reference.texts, subject.ours.renderer.reading.thinking
    is_open = thinking is not None and before.rstrip().endswith(thinking.open)
    thoughtful = {**answer, "reasoning_content": THOUGHT}
    written = [
        (said, text, not then)
        for said, then in product((answer, thoughtful), (following, []))
        if (text := texts.text_or_none([*messages, said, *then], tools, generate=bool(then))) is not None
    ]
    turns = [(said, text.removeprefix(before), last) for said, text, last in written if text.startswith(before)]
    turns = [turn for turn in turns if turn[0] is answer or THOUGHT in turn[1]]
    if is_open and thinking:
        turns = [turn for turn in turns if thinking.close in turn[1]]
    if turns:
        return turns
    given = len(texts.text_or_none(messages, tools, generate=False) or before)
    rests = [(_rest(before, text, given, answer), last) for said, text, last in written if said is answer]
    if is_open and thinking:
        begun = f"{THOUGHT}\n{thinking.close}\n"
        return [(thoughtful, begun + rest, last) for rest, last in rests if rest is not None]
    return [(answer, rest, last) for rest, last in rests if rest is not None]


_PART_OF_TAG = re.compile(r"<[^<>\s]*\Z")


def _rest(before: str, text: str, given: int, answer: ChatMessage) -> str | None:
    """Return the text of an answer without what it has in common with the end of its prompt, but for white space.

    The messages of the prompt are `given` characters of it. None where the template changes these.
    """
    shared = text[: common(before, text)]
    if len(shared) < given:
        return None
    content = text.find(answer["content"], given) if answer["content"] else len(shared)
    shared = _PART_OF_TAG.sub("", shared[: max(given, content)])
    rest, header = text.removeprefix(shared), before.removeprefix(shared).strip()
    return rest.lstrip().removeprefix(header).lstrip() if header and rest.lstrip().startswith(header) else rest


def _another_answer(subject: Subject, before: str) -> Spoken:
    said, text = {"role": "assistant", "content": "Fine."}, "Fine."
    thinking = subject.ours.renderer.reading.thinking
    if thinking and before.rstrip().endswith(thinking.open):
        said["reasoning_content"] = THOUGHT
        text = f"{THOUGHT}{thinking.close}Fine."
    return Spoken(said, _tokens_after(subject.reference, text))


def _tokens_after(reference: Reference, text: str) -> list[int]:
    """Encode what follows a prompt, after a special token: some tokenizers mark the beginning of a text."""
    _, *tokens = reference.fast.encode(reference.family.bos + text, add_special_tokens=False).ids
    return tokens


class Extension(NamedTuple):
    """The tokens that the gateway appended to a conversation, and what they were appended to.

    `before` is the text of the prompt that was answered with `sampled`, `history` the tokens of both. `tail` was
    appended to them; it is None where a branch began.
    """

    before: str
    sampled: list[int]
    history: list[int]
    tail: list[int] | None

    def misjudged(self, reference: Reference, messages: Sequence[ChatMessage], tools: Sequence[dict[str, Any]]) -> str:
        """Say what is wrong, given all messages: they have to continue the history where the template keeps it."""
        text, wanted = reference.texts.text(messages, tools), reference.ids(messages, tools)
        kept = reference.shown(text).startswith(reference.shown(self.before) + reference.decoded(self.sampled))
        if self.tail is None or not kept:
            return "" if (self.tail is None) != kept else "must be a branch" if self.tail else "need not be a branch"
        whole = self.history + self.tail
        if reference.decoded(whole) != reference.decoded(wanted):
            return difference(reference, whole, wanted)
        end = wanted[-len(self.tail) :]
        return "" if self.tail == end else difference(reference, self.tail, end)
