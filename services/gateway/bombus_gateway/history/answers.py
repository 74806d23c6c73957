"""An index, by content, of the answers sampled in an episode. Pure.

The cost of a look-up depends on the length of the given message, not on how many answers were sampled after the same
conversation.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Generic, Protocol, TypeVar

from bombus_gateway.history.identity import call_ids, next_digest, words_digest, words_of
from bombus_gateway.text.message import ChatMessage


class Sampled(Protocol):
    """An answer that was sampled. `name` consists of the id of its call and the number of its choice.

    `digest` covers the conversation including the answer (`Answers.digest_with`).
    """

    @property
    def message(self) -> ChatMessage: ...

    @property
    def name(self) -> tuple[str, int]: ...

    @property
    def digest(self) -> bytes: ...

    @property
    def reasoning(self) -> bytes: ...


AnswerT = TypeVar("AnswerT", bound=Sampled)


class Answers(Generic[AnswerT]):
    """Answers in the order of the log, indexed by the digest of the conversation after which each was sampled."""

    def __init__(self) -> None:
        self._after: dict[bytes, list[AnswerT]] = {}
        self._exact: dict[bytes, list[AnswerT]] = {}  # by the digest of the conversation including the answer
        self._in_words: dict[bytes, list[AnswerT]] = {}  # by the digest of the conversation and the answer's words
        self._by_id: dict[tuple[bytes, str], list[AnswerT]] = {}  # by the digest before the answer, and each call id
        self._by_name: dict[tuple[bytes, tuple[str, int]], AnswerT] = {}  # by the digest before the answer, and name

    def add(self, before: bytes, message: ChatMessage, made: Callable[[bytes], AnswerT]) -> AnswerT:
        """Add an answer that was sampled after the conversation with digest `before`, and return it.

        `made` creates the answer from its digest (`digest_with`).
        """
        exact, words = next_digest(before, message), words_digest(before, words_of(message), message)
        same = self._in_words.setdefault(words, [])
        answer = made(same[0].digest if same else exact)
        same.append(answer)
        self._after.setdefault(before, []).append(answer)
        self._exact.setdefault(exact, []).append(answer)
        self._by_name[before, answer.name] = answer
        for id in dict.fromkeys(call_ids(message)):
            self._by_id.setdefault((before, id), []).append(answer)
        return answer

    def digest_with(self, before: bytes, message: ChatMessage) -> bytes:
        """Return the digest of the conversation with digest `before`, extended by one message.

        Answers with the same words share the digest of the first such answer. So whichever of them an echo is matched
        with, the answers that were sampled after any of them are found.
        """
        words = words_digest(before, words_of(message), message) if message["role"] == "assistant" else b""
        same = self._in_words.get(words)
        return same[0].digest if same else next_digest(before, message)

    def after(self, before: bytes) -> Sequence[AnswerT]:
        """Return all answers that were sampled after a conversation."""
        return self._after.get(before, ())

    def with_ids(self, before: bytes, ids: Sequence[str]) -> list[AnswerT]:
        """Return the answers whose calls have all of these ids. If no ids are given, return no answers."""
        found = self._by_id.get((before, ids[0]), ()) if ids else ()
        return [answer for answer in found if _has(answer, ids)]

    def recorded(self, before: bytes, echo: ChatMessage, stops: Collection[str]) -> Sequence[AnswerT]:
        """Return the answers that a message may echo.

        If the message names an answer (`answer_of`) whose call ids or words match, only this answer is returned.
        Otherwise the answers with the message's call ids are returned or, failing that, those with its words; the
        arguments of calls may be formatted differently. Among answers with the same words, those with exactly the same
        white space are preferred.
        """
        ids = call_ids(echo)
        claimed = self._by_name.get((before, echo["answer_of"])) if "answer_of" in echo else None
        if claimed is not None and self._is_like(claimed, before, echo, stops):
            return [claimed]
        named = self.with_ids(before, ids)
        if len(named) == 1:
            return named
        exact = self._exact.get(next_digest(before, echo), ())
        if exact and not named:
            return exact
        in_words = self._in_other_spaces(before, echo, stops)
        if not named:
            return in_words
        fitting = ([answer for answer in same if _has(answer, ids)] for same in (exact, in_words))
        return next(filter(None, fitting), named)

    def _is_like(self, answer: AnswerT, before: bytes, echo: ChatMessage, stops: Collection[str]) -> bool:
        """Return whether all of an echo's calls belong to this answer, or the echo has the same words as the answer."""
        ids = call_ids(echo)
        has_ids = bool(ids) and _has(answer, ids)
        return has_ids or answer in self._in_other_spaces(before, echo, stops)

    def _in_other_spaces(self, before: bytes, echo: ChatMessage, stops: Collection[str]) -> list[AnswerT]:
        """Return the answers with the calls and words of an echo, with or without a stop string at the echo's end."""
        words = words_of(echo)
        ended = [words.removesuffix(stop.strip()).rstrip() for stop in stops if stop.strip()]
        digests = [words_digest(before, each, echo) for each in dict.fromkeys([words, *ended])]
        return [answer for digest in digests for answer in self._in_words.get(digest, ())]


def _has(answer: Sampled, ids: Sequence[str]) -> bool:
    """Return whether the calls of an answer have all of these ids."""
    return set(ids) <= set(call_ids(answer.message))
