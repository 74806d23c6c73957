"""An index of the answers that were sampled in an episode, by their content. Pure.

The cost of a look-up depends on the length of the given message, not on the number of answers sampled at one place.
"""

from collections.abc import Collection, Sequence
from typing import Generic, Protocol, TypeVar

from bombus_gateway.history.identity import call_ids, next_digest, words_digest, words_of
from bombus_gateway.text.message import ChatMessage


class Sampled(Protocol):
    """An answer that was sampled. `name` is its call and choice.

    `digest` is that of the conversation including the answer (`Answers.digest_with`).
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
    """Answers by the digest of the conversation that each was sampled after, in the order of the log."""

    def __init__(self) -> None:
        self._after: dict[bytes, list[AnswerT]] = {}
        self._exact: dict[bytes, list[AnswerT]] = {}  # by the digest of the conversation with the answer
        self._in_words: dict[bytes, list[AnswerT]] = {}  # by the digest of the conversation and the answer's words
        self._by_id: dict[tuple[bytes, str], list[AnswerT]] = {}  # by the digest before the answer, and each call id
        self._by_name: dict[tuple[bytes, tuple[str, int]], AnswerT] = {}  # by the digest before the answer, and name

    def add(self, before: bytes, answer: AnswerT) -> None:
        """Add an answer that was sampled after the conversation with the digest `before`."""
        message = answer.message
        self._after.setdefault(before, []).append(answer)
        self._exact.setdefault(next_digest(before, message), []).append(answer)
        self._by_name[before, answer.name] = answer
        self._in_words.setdefault(words_digest(before, words_of(message), message), []).append(answer)
        for id in dict.fromkeys(call_ids(message)):
            self._by_id.setdefault((before, id), []).append(answer)

    def digest_with(self, before: bytes, message: ChatMessage) -> bytes:
        """Return the digest of the conversation `before` with one more message.

        Answers with the same words share the digest of the first of them, so that the answers sampled after any of them
        are found whichever one an echo is matched with.
        """
        words = words_digest(before, words_of(message), message) if message["role"] == "assistant" else b""
        same = self._in_words.get(words)
        return same[0].digest if same else next_digest(before, message)

    def after(self, before: bytes) -> Sequence[AnswerT]:
        """Return all answers that were sampled after a conversation."""
        return self._after.get(before, ())

    def with_ids(self, before: bytes, ids: Sequence[str]) -> list[AnswerT]:
        """Return the answers whose calls have all of these ids; none if there are no ids."""
        found = self._by_id.get((before, ids[0]), ()) if ids else ()
        return [answer for answer in found if _has(answer, ids)]

    def recorded(self, before: bytes, echo: ChatMessage, stops: Collection[str]) -> Sequence[AnswerT]:
        """Return the answers that a message may echo.

        They are the answer that it names (`answer_of`), if its call ids or words match; else those with its call ids;
        else those with its words. The arguments of calls may be formatted differently. An answer with exactly the same
        white space is preferred to others with the same words.
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
        """Return whether an echo has only calls of this answer, or the answer's words."""
        ids = call_ids(echo)
        has_ids = bool(ids) and _has(answer, ids)
        return has_ids or answer in self._in_other_spaces(before, echo, stops)

    def _in_other_spaces(self, before: bytes, echo: ChatMessage, stops: Collection[str]) -> list[AnswerT]:
        """Return the answers with the calls and words of an echo, whether or not the echo ends with a stop string."""
        words = words_of(echo)
        ended = [words.removesuffix(stop.strip()).rstrip() for stop in stops if stop.strip()]
        digests = [words_digest(before, each, echo) for each in dict.fromkeys([words, *ended])]
        return [answer for digest in digests for answer in self._in_words.get(digest, ())]


def _has(answer: Sampled, ids: Sequence[str]) -> bool:
    """Return whether the calls of an answer have all of these ids."""
    return set(ids) <= set(call_ids(answer.message))
