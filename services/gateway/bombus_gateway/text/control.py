"""Prevents the texts of messages from forging control tokens.

A control token is a special token, or an added token that the chat template writes, such as `<tool_response>`. The text
of a message may contain the name of a control token. Before a conversation is rendered, such names in its messages are
replaced by placeholders: single characters that do not occur in the conversation. All names in the rendering are then
the template's own, and only these are encoded as control tokens. The placeholders are turned back into names, which are
encoded as text.
"""

import json
import secrets
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer as Fast

from bombus.errors import Code, Refused
from bombus.text.tokenizer import encoded
from bombus_gateway.text.parts import PartEncoder
from bombus_gateway.text.patterns import any_of

# These are ideographs. Templates that change case or white space leave them unchanged, and so does `repr`, with which
# some templates print lists.
PLACEHOLDERS_FROM, PLACEHOLDERS_TO = 0x20000, 0x2A6D0

_NO_PLACEHOLDER = (
    "The conversation contains names of control tokens, and uses all the rare ideographs that could stand for them: "
    "remove the names."
)


class ControlTokens:
    """The control tokens of one model, and its tokenizer without them."""

    def __init__(
        self, fast: Fast, names: Collection[str], unknown: str = "", remakers: Sequence[Callable[[str], str]] = ()
    ) -> None:
        """`unknown` is the name of the tokenizer's token for unknown text.

        `remakers` are the changes that the chat template may make to a text.
        """
        self.names = frozenset(names)
        self._pattern = any_of(self.names)
        self._fast = fast
        self._parts = PartEncoder(fast)
        self._remakers = remakers
        counted = self.names - {unknown}  # text that lacks this token's name may be encoded as the token
        self._ids = {index: name for name in counted if (index := fast.token_to_id(name)) is not None}
        normal = self._normal_names()
        self._has_normal = bool(normal)
        folded = {_folded(name) for name in self.names | normal} - {""}
        self._signs = {name[:2] for name in folded if _is_signed(name)}
        plain = {name for name in folded if not _is_signed(name)}
        self._plain, self._heads = any_of(plain), {name[:4] for name in plain}
        self._starts = frozenset().union(*map(_starts, folded))
        self._ends = frozenset().union(*map(_ends, folded))
        self._inner = frozenset().union(*map(_inner, folded))
        self._longest = max(map(len, folded), default=0)
        self._firsts, self._lasts = {name[0] for name in folded}, {name[-1] for name in folded}
        # Conversations that contain names of control tokens use a tokenizer that gives these tokens unguessable names.
        # It encodes the usual names as text, regardless of what surrounds them.
        nonce = secrets.token_hex(8)
        self._private = {name: f"\U000f0000{nonce}{index:x}\U000f0001" for index, name in enumerate(sorted(self.names))}
        self._guarded: Fast | None = None

    def find(self, text: str) -> list[str]:
        """Return the names of control tokens in a text, in order of occurrence."""
        return self._pattern.findall(text)

    def replaced(self, text: str, words: Mapping[str, str]) -> str:
        """Return a text with control tokens' names replaced by their values in `words`. Names that are not in `words`
        are kept."""
        return self._pattern.sub(lambda found: words.get(found.group(), found.group()), text)

    def placeholders(self, names: Iterable[str], texts: Iterable[str]) -> dict[str, str]:
        """Return a character for each name. None of these characters occurs in `texts`, either as it is or in the
        escaped form of ASCII JSON.

        Raises `Refused` if there are fewer such characters than names.
        """
        whole = "\0".join(texts)
        characters = map(chr, range(PLACEHOLDERS_FROM, PLACEHOLDERS_TO))
        free = (each for each in characters if each not in whole and escaped(each) not in whole)
        found = dict(zip(names := sorted(names), free))
        if len(found) < len(names):
            raise Refused(Code.MALFORMED, _NO_PLACEHOLDER)
        return found

    def is_suspect(self, text: str, inner: bool = True) -> bool:
        """Return whether a text contains a control token's name, or could be turned into one by a template or
        tokenizer.

        The latter is possible for a text that contains a name in a different case, for a text that begins or ends with
        part of a name and, if `inner`, for a text that is most of a name. Templates put such texts between others,
        change their case, or replace parts of them.
        """
        return any(self._is_like_a_name(form, inner) for form in self._forms(text))

    def _forms(self, text: str) -> Iterator[str]:
        """Yield a text, in lower case, in several forms: unchanged, as the tokenizer normalizes it, and as the template
        changes it.

        A template makes several changes, in an order that is not evident from its source, so all are applied twice.
        """
        yield _folded(text)
        if self._has_normal:
            yield _folded(self._normalized(text))
        for remake in (*self._remakers, *self._remakers):
            before, text = text, remake(text)
            if text != before:
                yield _folded(text)

    def _is_like_a_name(self, folded: str, inner: bool) -> bool:
        for sign in self._signs:
            if sign in folded:
                return True
        for head in self._heads:
            if head in folded:
                if self._plain.search(folded) is not None:
                    return True
                break
        return self._begins_or_ends(folded) or (inner and folded in self._inner)

    def is_suspect_of(self, name: str, text: str) -> bool:
        """Return whether a text contains this name, or begins or ends with part of it."""
        name, text = _folded(name), _folded(text)
        ends, starts = text.endswith(tuple(_starts(name))), text.startswith(tuple(_ends(name)))
        return bool(name) and (name in text or ends or starts)

    def _begins_or_ends(self, text: str) -> bool:
        """Return whether a text begins with the end of a name, or ends with the beginning of a name."""
        if self._lasts.isdisjoint(text[: self._longest]) and self._firsts.isdisjoint(text[-self._longest :]):
            return False
        lengths = range(1, min(self._longest, len(text)) + 1)
        return any(text[:length] in self._ends or text[-length:] in self._starts for length in lengths)

    def count(self, tokens: Iterable[int]) -> Counter[int]:
        """Return how often each control token occurs in `tokens`."""
        return Counter(token for token in tokens if token in self._ids)

    def name_of(self, token: int) -> str:
        return self._ids[token]

    def encode(self, text: str, placeholders: Mapping[str, str], guarded: bool = False) -> list[int]:
        """Encode a rendered conversation in which each placeholder represents a name that must be encoded as text.

        `guarded` means that the tokenizer may mistake texts in the conversation for names of control tokens.
        """
        if not placeholders and not (guarded and self._has_normal):
            return self._parts.encode(text)
        text = restored(self.replaced(text, self._private), placeholders)
        return encoded(self._tokenizer_without_names(), text)

    def _normal_names(self) -> set[str]:
        """Return, in normalized form, the names for which the tokenizer searches only in normalized text."""
        if self._fast.normalizer is None:
            return set()
        added = self._fast.get_added_tokens_decoder().values()
        names = {self._normalized(token.content) for token in added if token.normalized and token.content in self.names}
        return names - {""}

    def _normalized(self, text: str) -> str:
        return str(self._fast.normalizer.normalize_str(text))

    def _tokenizer_without_names(self) -> Fast:
        if self._guarded is None:
            self._guarded = Fast.from_str(_renamed(self._fast, self._private))
        return self._guarded


def _folded(text: str) -> str:
    """Return a text stripped and in lower case, so that texts that differ only in case or in outer white space become
    equal."""
    return text.upper().lower().replace("▁", " ").strip()


def _is_signed(name: str) -> bool:
    """Return whether a name begins with two punctuation characters that, unlike `</`, are rare in other texts."""
    return len(name) > 2 and name[:2] != "</" and not any(each.isalnum() or each.isspace() for each in name[:2])


def _starts(name: str) -> set[str]:
    """Return the proper prefixes of a name, except those that are a single letter, digit or space, since many texts end
    with one."""
    shortest = 2 if name[:1].isalnum() or name[:1].isspace() else 1
    return {name[:length] for length in range(shortest, len(name))}


def _ends(name: str) -> set[str]:
    """Return the proper suffixes of a name that have at least two characters, since many texts begin with any single
    one."""
    return {name[-length:] for length in range(2, len(name))}


def _inner(name: str) -> set[str]:
    """Return the substrings of a name that lack one to three characters at each end, and at most half of the name in
    total."""
    cut = [(start, end) for start in range(1, 4) for end in range(1, 4) if 2 * (start + end) <= len(name)]
    return {name[start : len(name) - end] for start, end in cut}


def restored(text: str, placeholders: Mapping[str, str]) -> str:
    """Return a text with its placeholders replaced by the names that they represent."""
    if not placeholders:
        return text
    return text.translate({ord(character): name for name, character in placeholders.items()})


def escaped(character: str) -> str:
    """Return a character in the escaped form of ASCII JSON, which some templates use for tools and arguments."""
    return json.dumps(character)[1:-1]


def _parts(merge: str | Sequence[str]) -> set[str]:
    """Return the two tokens that a merge joins, and the resulting token."""
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return {left, right, left + right}


def _renamed(fast: Fast, names: Mapping[str, str]) -> str:
    """Return the JSON of a tokenizer in which the added tokens in `names` are renamed."""
    described: dict[str, Any] = json.loads(fast.to_str())
    for token in described["added_tokens"]:
        if token["content"] in names:
            # The token is found only by its exact name, regardless of what surrounds it.
            token |= {"content": names[token["content"]], "normalized": False, "single_word": False}
    model = described["model"]
    vocabulary = model.get("vocab")
    if isinstance(vocabulary, dict):
        model["vocab"] = {names.get(name, name): index for name, index in vocabulary.items()}
    elif isinstance(vocabulary, list):
        model["vocab"] = [[names.get(name, name), score] for name, score in vocabulary]
    if "merges" in model:  # drop the merges that could build a name from pieces of text
        model["merges"] = [merge for merge in model["merges"] if not names.keys() & _parts(merge)]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    described["post_processor"] = None  # it may refer to the old names, and is not used on parts of a conversation
    return json.dumps(described)
