"""Finds the sampled answers in the messages of a request, even if the harness has rewritten them. Pure.

An answer is searched for only at the place where it was sampled, which is after the same messages. It is recognized by
its call ids, which nearly all harnesses echo unchanged, or otherwise by its words. The echo is then replaced by the
sampled message, because that is what the model wrote and is trained on.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any, Generic, Protocol

import msgspec

from bombus_gateway.history.answers import Answers, AnswerT, Sampled
from bombus_gateway.history.identity import call_ids, next_digest, reasoning_digest
from bombus_gateway.text.message import ChatMessage, is_ours
from bombus_gateway.text.shortening import NO_OUTLINE, HistoryOutline


class SampledEpisode(Protocol[AnswerT]):
    """The answers sampled in an episode, and which of them were continued."""

    @property
    def sampled(self) -> Answers[AnswerT]: ...

    def is_continued(self, answer: AnswerT) -> bool:
        """Return whether a request has continued an answer."""
        ...


PARTS_MAX = 32  # maximum number of messages into which a harness may split an answer without call ids


class Echo(msgspec.Struct, frozen=True):
    """One answer as it appears in a request.

    `message` joins the parts of the answer, and `results` are the results of its calls that appear between these parts.
    `count` is the number of request messages that the parts and results take up together.
    """

    message: ChatMessage
    results: tuple[ChatMessage, ...]
    count: int


class Settled(msgspec.Struct, Generic[AnswerT], frozen=True):
    """The part of a match that does not depend on later messages. It covers the first `given` messages of a request.

    These correspond to the first `taken` of the matched messages. Among those, the first `count` end with one of the
    `candidates`.
    """

    given: int = 0
    taken: int = 0
    count: int = 0
    candidates: Sequence[AnswerT] = ()


class Followed(msgspec.Struct, Generic[AnswerT], frozen=True):
    """The messages of a request, with echoes replaced by the sampled answers, and the digest of each prefix of them.

    The first `count` messages end with the last answer that was found. If none was found, there is nothing to extend.
    `candidates` are the answers that this last answer may be, all with the same words, likeliest first. `doubt` is true
    if an id or the reasoning in some message shows that the message is not the answer with which it was matched, but
    another answer with the same words. `settled` is the part that a longer request need not match again. `outline`
    describes the first messages, as far as an earlier request settled them.
    """

    messages: Sequence[ChatMessage] = ()
    digests: Sequence[bytes] = ()
    count: int = 0
    candidates: Sequence[AnswerT] = ()
    doubt: bool = False
    settled: Settled[AnswerT] = Settled()
    outline: HistoryOutline = NO_OUTLINE

    @property
    def last(self) -> AnswerT | None:
        """The last answer that was found, or None."""
        return self.candidates[0] if self.candidates else None


_NOTHING: Followed[Any] = Followed()


def follow(
    episode: SampledEpisode[AnswerT],
    root: bytes,
    messages: Sequence[ChatMessage],
    stops: Collection[str] = (),
    before: Followed[AnswerT] | None = None,
) -> Followed[AnswerT]:
    """Match the messages of a conversation that begins with `root` to the answers sampled after each of its prefixes.

    `stops` are the request's stop strings, because some harnesses append to an answer the stop string that ended it.
    `before` is the match of an earlier request with the same root and stops; this request must begin with the earlier
    request's settled messages.
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
    # How an answer's parts are joined may depend on the messages after them, but not on messages after a later answer.
    if messages[-1]["role"] == "assistant":
        settled = Settled()
    return Followed(taken, digests, count, candidates, doubt, settled, before.outline)


def _echoed(
    episode: SampledEpisode[AnswerT], reached: bytes, messages: Sequence[ChatMessage], at: int, stops: Collection[str]
) -> tuple[Echo, Sequence[AnswerT]]:
    """Return the echo that begins with message `at`, and the answers that it may echo, if any."""
    sampled = episode.sampled
    if messages[at]["role"] == "assistant" and sampled.after(reached):
        named = sampled.with_ids(reached, _first_id(messages, at))
        for turn in _turns(named, messages, at):
            same = sampled.recorded(reached, turn.message, stops)
            if same:
                return turn, _by_likelihood(same, turn.message, episode.is_continued)
    return Echo(messages[at], (), 1), ()


def _first_id(messages: Sequence[ChatMessage], at: int) -> list[str]:
    """Return the first call id, as a list, in the answer whose parts begin at `at`. The list is empty if the answer has
    no calls."""
    parts = takewhile(lambda message: message["role"] == "assistant", messages[at : at + PARTS_MAX])
    return next((ids[:1] for part in parts if (ids := call_ids(part))), [])


def _turns(named: Sequence[Sampled], messages: Sequence[ChatMessage], at: int) -> Iterator[Echo]:
    """Yield the ways to read the messages from `at` on as one answer: a single message, or several joined.

    Some harnesses write each part of an answer as a separate message, and some put the result of each call right after
    it. The first ways yielded join messages by the call ids of one of the answers in `named`, all of which contain the
    first call id.
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
    """Return the echo that joins the parts, from message `at` on, of an answer with these call ids, and the results
    between the parts.

    A repeated id belongs to a later answer, since some models number the calls of each answer from 0. A message without
    calls also belongs to a later answer if there are results before it or right after it.
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
    """Join the parts of an answer into one message."""
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
    """Return a message without the name of the answer that it claims to be (`answer_of`)."""
    if "answer_of" not in message:
        return message
    return {key: value for key, value in message.items() if key != "answer_of"}


def _with_id(message: ChatMessage, ids: Mapping[str, str]) -> ChatMessage:
    """Return a message with its call id replaced. `ids` maps the call ids of an echo to those of the sampled answer."""
    given = message.get("tool_call_id")
    own = ids.get(given, given) if given is not None else None
    return message if own == given else message | {"tool_call_id": own}


# ---- distinguishing answers with the same words ----------------------------------------------------------------------


def _is_of_another(echo: ChatMessage, same: Sequence[Sampled]) -> bool:
    """Return whether an echo's reasoning, or an id that the gateway made, matches none of these answers."""
    reasoning = _reasoning(echo)
    ours = {id for id in call_ids(echo) if is_ours(id)}
    return not any(
        echo.get("answer_of", answer.name) == answer.name
        and reasoning in (None, answer.reasoning)
        and (not ours or ours <= set(call_ids(answer.message)))
        for answer in same
    )


def _reasoning(echo: ChatMessage) -> bytes | None:
    """Return the digest of an echo's reasoning, or None if it has none."""
    return reasoning_digest(echo) if echo.get("reasoning_content") else None


def _by_likelihood(
    same: Sequence[AnswerT], echo: ChatMessage, is_continued: Callable[[AnswerT], bool]
) -> Sequence[AnswerT]:
    """Return the answers that an echo may be: the answers with the echo's reasoning or, if there are none, all of them.

    Answers that were not continued come first, so that sub-agents with equal requests and answers each continue a
    different answer.
    """
    if len(same) == 1:
        return same
    reasoning = _reasoning(echo)
    reasoned = [answer for answer in same if answer.reasoning == reasoning] or same
    return sorted(reasoned, key=is_continued)
