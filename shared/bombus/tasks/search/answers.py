"""Parses the actions in a model's replies, and computes the reward for its answer. Pure."""

import re
import string
import unicodedata
from collections.abc import Sequence
from enum import StrEnum

import msgspec

from bombus.tasks.search.corpus import SearchDocument

QUERY_CHARACTERS_MAX = 500

HINT = (
    "That was neither a search nor an answer. To search, write <search>what to search for</search>. To answer, write "
    "<answer>the answer</answer>, with nothing but the answer between the tags. Try again."
)

_CLOSED = re.compile(r"<(search|answer)>((?:(?!<\1>).)*?)</\1>", re.DOTALL)
_OPEN = re.compile(r"<(search|answer)>((?:(?!<(?:search|answer)>).)*)\Z", re.DOTALL)
_ARTICLE = re.compile(r"(?<!\S)(a|an|the)(?!\S)")


class ActionKind(StrEnum):
    """The kind of a reply's action."""

    SEARCH = "search"
    ANSWER = "answer"
    INVALID = "invalid"


class SearchAction(msgspec.Struct, frozen=True):
    """The first action of a reply. `text` is its query or its answer."""

    kind: ActionKind
    text: str = ""


def action_of(reply: str) -> SearchAction:
    """Return the first search or answer in a reply. The text after this action is ignored.

    An unclosed tag counts only if there is no closed one. In that case, the content of the last tag extends to the end
    of the reply, since servers may stop before the closing tag.
    """
    found = _CLOSED.search(reply) or _OPEN.search(reply)
    if found is None or not found[2].strip():
        return SearchAction(ActionKind.INVALID)
    text = found[2].strip()
    if found[1] == ActionKind.SEARCH:
        return SearchAction(ActionKind.SEARCH, text[:QUERY_CHARACTERS_MAX])
    return SearchAction(ActionKind.ANSWER, text)


def information(documents: Sequence[SearchDocument]) -> str:
    """Return the search results as they are shown to the model."""
    lines = [f"Doc {number}(Title: {found.title}) {found.text}" for number, found in enumerate(documents, 1)]
    return "<information>" + ("\n".join(lines) or "Nothing was found.") + "</information>"


def is_match(answer: str, golds: Sequence[str]) -> bool:
    """Return whether an answer is one of the correct ones, ignoring case, articles, punctuation and spaces."""
    given = plain_forms(answer)
    return any(given & plain_forms(gold) for gold in golds)


def plain_forms(text: str) -> set[str]:
    """Return the forms of a text without case, articles and punctuation.

    Punctuation is either removed ("U.S.") or becomes a space ("Jean-Luc").
    """
    known = unicodedata.normalize("NFKC", text).casefold()
    left_out = _without_articles("".join("" if _is_punctuation(char) else char for char in known))
    spaced = _without_articles(known)
    return {left_out, " ".join("".join(" " if _is_punctuation(char) else char for char in spaced).split())} - {""}


def _without_articles(text: str) -> str:
    """Return the text without articles, or the whole text if it consists only of articles."""
    words = " ".join(text.split())
    return " ".join(_ARTICLE.sub(" ", words).split()) or words


def _is_punctuation(char: str) -> bool:
    return char in string.punctuation or unicodedata.category(char).startswith("P")


def worth(actions: Sequence[SearchAction], golds: Sequence[str], format_score: float) -> float:
    """Return the worth of the last action. If all actions are valid, a correct answer is worth 1, and a wrong answer
    `format_score`.

    A correct answer after an invalid action is worth 1 - `format_score`, and everything else is worth 0.
    """
    is_clean = all(action.kind != ActionKind.INVALID for action in actions)
    if not actions or actions[-1].kind != ActionKind.ANSWER:
        return 0.0
    if is_match(actions[-1].text, golds):
        return 1.0 if is_clean else 1.0 - format_score
    return format_score if is_clean else 0.0
