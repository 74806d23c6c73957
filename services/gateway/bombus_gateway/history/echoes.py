"""Finds in the messages of a request the answers that were sampled, however their harness has written them. Pure.

An answer is looked for only where it was sampled: after the same messages. There its call ids tell it, which nearly
all harnesses echo unchanged, else its words. What was sampled then takes the place of what came back: it is what the
model has said, and what is trained.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any, Generic, Protocol

import msgspec

from bombus_gateway.history.answers import Answers, AnswerT, Sampled
from bombus_gateway.history.identity import call_ids, next_digest, reasoning_digest
from bombus_gateway.text.message import ChatMessage, is_ours


class SampledEpisode(Protocol[AnswerT]):
    """What was sampled in an episode, and what was asked after it."""

    @property
    def sampled(self) -> Answers[AnswerT]: ...

    def is_continued(self, answer: AnswerT) -> bool:
        """Return whether a request has continued after an answer."""
        ...


PARTS_MAX = 32  # of an answer without ids that comes back in several messages


class Echo(msgspec.Struct, frozen=True):
    """What a request has in place of one answer: the answer's parts in one message, the results of its calls, and how
    many messages of the request these are.
    """

    message: ChatMessage
    results: tuple[ChatMessage, ...]
    count: int


class Settled(msgspec.Struct, Generic[AnswerT], frozen=True):
    """What is known of the first `given` messages of a request, and does not depend on those that come after them.

    They became the first `taken` of what was followed, of which `count` end with one of the `candidates`.
    """

    given: int = 0
    taken: int = 0
    count: int = 0
    candidates: Sequence[AnswerT] = ()


class Followed(msgspec.Struct, Generic[AnswerT], frozen=True):
    """The messages of a request with what was sampled in place of its echoes, and the digest of each prefix of them.

    The first `count` of them end with the last answer that was found. Without one there is nothing to extend.
    `candidates` are the answers that this may be, which all have the same words, the likeliest first. With `doubt`, a
    message says of itself that it is another answer than the one it was taken for, whose words are the same. `settled`
    is what a longer request need not look at again.
    """

    messages: Sequence[ChatMessage] = ()
    digests: Sequence[bytes] = ()
    count: int = 0
    candidates: Sequence[AnswerT] = ()
    doubt: bool = False
    settled: Settled[AnswerT] = Settled()

    @property
    def last(self) -> AnswerT | None:
        """The last answer that was found, if there is one."""
        return self.candidates[0] if self.candidates else None


_NOTHING: Followed[Any] = Followed()


def follow(
    episode: SampledEpisode[AnswerT],
    root: bytes,
    messages: Sequence[ChatMessage],
    stops: Collection[str] = (),
    before: Followed[AnswerT] | None = None,
) -> Followed[AnswerT]:
    """Follow a conversation that begins with `root` along the answers that were sampled after each of its prefixes.

    `stops` are the request's stop strings: some harnesses put the one that ended an answer back. `before` is what an
    earlier request with the same root and stops was followed to, whose settled messages this one begins with.
    """
    before = before or _NOTHING
    settled = before.settled
    taken, digests = list(before.messages[: settled.taken]), list(before.digests[: settled.taken])
    at, count, candidates = settled.given, settled.count, settled.candidates
    ids, doubt = dict[str, str](), False
    while at < len(messages):
        reached = digests[-1] if digests else root
        if messages[at]["role"] == "assistant":
            settled = Settled(at, len(taken), count, candidates)
        turn, found = _echoed(episode, reached, messages, at, stops)
        if found:
            taken.append(said := found[0].message)
            digests.append(reached := found[0].digest)
            candidates, count = [each for each in found if each.digest == reached], len(taken)
            ids = dict(zip(call_ids(turn.message), call_ids(said)))
            doubt = doubt or _is_of_another(turn.message, found)
        for message in turn.results if found else [_unnamed(turn.message)]:
            taken.append(_with_id(message, ids))
            digests.append(reached := next_digest(reached, message))
        at += turn.count
    # How an answer's parts are put together may depend on what follows them, but not on what follows a later answer.
    if messages[-1]["role"] == "assistant":
        settled = Settled()
    return Followed(taken, digests, count, candidates, doubt, settled)


def _echoed(
    episode: SampledEpisode[AnswerT], reached: bytes, messages: Sequence[ChatMessage], at: int, stops: Collection[str]
) -> tuple[Echo, Sequence[AnswerT]]:
    """Return what the messages from `at` on echo, and the answers that this may be, if there are any."""
    sampled = episode.sampled
    if messages[at]["role"] == "assistant" and sampled.after(reached):
        named = sampled.with_ids(reached, _first_id(messages, at))
        for turn in _turns(named, messages, at):
            same = sampled.recorded(reached, turn.message, stops)
            if same:
                return turn, _by_likelihood(same, turn.message, episode.is_continued)
    return Echo(messages[at], (), 1), ()


def _first_id(messages: Sequence[ChatMessage], at: int) -> list[str]:
    """Return the first id of a call in the parts of an answer from `at` on, if any has calls."""
    parts = takewhile(lambda message: message["role"] == "assistant", messages[at : at + PARTS_MAX])
    return next((ids[:1] for part in parts if (ids := call_ids(part))), [])


def _turns(named: Sequence[Sampled], messages: Sequence[ChatMessage], at: int) -> Iterator[Echo]:
    """Yield the ways to read an answer from the messages from `at` on: one message, or several that were one.

    Some harnesses write the parts of an answer as messages of their own, and some put the result of each call behind
    it. What the ids of one answer hold together comes first: of those that have the id of the first call, `named`.
    """
    for held in {frozenset(ids): None for answer in named if len(ids := call_ids(answer.message)) > 1}:
        together = _held_together(messages, at, held)
        if together.count > 1:
            yield together
    yield Echo(messages[at], (), 1)
    end = at + 1
    while end < min(len(messages), at + PARTS_MAX) and messages[end]["role"] == "assistant":
        end += 1
    for last in range(end, at + 1, -1):
        yield Echo(_joined(messages[at:last]), (), last - at)


def _held_together(messages: Sequence[ChatMessage], at: int, ids: Collection[str]) -> Echo:
    """Return the parts of an answer with calls of these ids, from `at` on, and the results that lie between them.

    An id that comes again belongs to a later answer: some models number the calls of each answer from 0. So does a
    message without calls that has results before it, or right after it.
    """
    parts: list[ChatMessage] = []
    results: list[ChatMessage] = []
    seen, unanswered = set[str](), set[str]()
    end = at
    while end < len(messages):
        message = messages[end]
        own = call_ids(message)
        if message["role"] == "assistant" and set(own) <= set(ids) - seen and (own or not results):
            parts.append(message)
            seen.update(own)
            unanswered.update(own)
        elif message["role"] == "tool" and message.get("tool_call_id") in unanswered and call_ids(parts[-1]):
            results.append(message)
            unanswered.remove(message["tool_call_id"])
        else:
            break
        end += 1
    while end > at and messages[end - 1]["role"] == "assistant" and not call_ids(messages[end - 1]):
        parts.pop()
        end -= 1
    return Echo(_joined(parts) if parts else messages[at], tuple(results), end - at)


def _joined(parts: Sequence[ChatMessage]) -> ChatMessage:
    """Return one message of several parts of it."""
    message: ChatMessage = {"role": "assistant", "content": "".join(part.get("content") or "" for part in parts)}
    reasoning = "".join(part.get("reasoning_content") or "" for part in parts)
    calls = [call for part in parts for call in part.get("tool_calls") or ()]
    if reasoning:
        message["reasoning_content"] = reasoning
    names = {part["answer_of"] for part in parts if "answer_of" in part}
    if len(names) == 1:
        message["answer_of"] = names.pop()
    if calls:
        message["tool_calls"] = calls
    return message


def _unnamed(message: ChatMessage) -> ChatMessage:
    """Return a message without the name of the answer that it claims to be."""
    if "answer_of" not in message:
        return message
    return {key: value for key, value in message.items() if key != "answer_of"}


def _with_id(message: ChatMessage, ids: Mapping[str, str]) -> ChatMessage:
    """Return a message with the id that its call has now: `ids` are those of an answer, by those of its echo."""
    given = message.get("tool_call_id")
    own = ids.get(given, given) if given is not None else None
    return message if own == given else message | {"tool_call_id": own}


# ---- what tells an answer --------------------------------------------------------------------------------------------


def _is_of_another(echo: ChatMessage, same: Sequence[Sampled]) -> bool:
    """Return whether an echo names another answer than each of these with its words, by an id of ours or reasoning."""
    reasoning = _reasoning(echo)
    ours = {id for id in call_ids(echo) if is_ours(id)}
    return not any(
        echo.get("answer_of", answer.name) == answer.name
        and reasoning in (None, answer.reasoning)
        and (not ours or ours <= set(call_ids(answer.message)))
        for answer in same
    )


def _reasoning(echo: ChatMessage) -> bytes | None:
    """Return the digest of an echo's reasoning, if it has any."""
    return reasoning_digest(echo) if echo.get("reasoning_content") else None


def _by_likelihood(
    same: Sequence[AnswerT], echo: ChatMessage, is_continued: Callable[[AnswerT], bool]
) -> Sequence[AnswerT]:
    """Return those of several answers that an echo may be: those with its reasoning, else all of them.

    Those without a continuation come first, so that sub-agents that ask the same and are answered the same each go on
    with an answer of their own.
    """
    if len(same) == 1:
        return same
    reasoning = _reasoning(echo)
    reasoned = [answer for answer in same if answer.reasoning == reasoning] or same
    return sorted(reasoned, key=is_continued)
