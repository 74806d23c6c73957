"""Keeps texts of messages from forging control tokens.

A control token is a special token, or an added token that the chat template writes, such as `<tool_response>`. A
message may hold the name of one, as text. Before a conversation is rendered, such names in it are replaced by
placeholders, which are single characters that the conversation does not have. The names that are in the rendering are
then the template's own, and only they are encoded as control tokens. The placeholders become names again, which are
encoded as text.
"""

import json
import re
import secrets
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from tokenizers import Tokenizer as Fast

# Ideographs: templates change neither their case nor white space, and `repr`, by which some print a list, keeps them.
_PLACEHOLDERS_FROM, _PLACEHOLDERS_TO = 0x20000, 0x2A6D0


class ControlTokens:
    """The control tokens of one model, and its tokenizer without them."""

    def __init__(self, fast: Fast, names: Collection[str]) -> None:
        self.names = frozenset(names)
        longest_first = sorted(self.names, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._fast = fast
        self._ids = {index: name for name in self.names if (index := fast.token_to_id(name)) is not None}
        pieces = [_pieces(name) for name in longest_first]
        self._suspect = re.compile("|".join(pieces) or r"(?!)", re.IGNORECASE)
        self._inner = frozenset().union(*map(_inner, longest_first))
        self._normal = self._normal_pattern()
        # In the tokenizer for conversations that hold names of control tokens, these tokens have names of their own,
        # which nobody can guess: what is left of their usual names is text to it, whatever stands around it.
        nonce = secrets.token_hex(8)
        self._private = {name: f"\U000f0000{nonce}{index:x}\U000f0001" for index, name in enumerate(longest_first)}
        self._guarded: Fast | None = None

    def find(self, text: str) -> set[str]:
        """Return the names of control tokens that a text holds."""
        return set(self._pattern.findall(text))

    def placeholders(self, names: Iterable[str], texts: Iterable[str]) -> dict[str, str]:
        """Return a character for each name. None of `texts` has it, as it is or as JSON in ASCII has it."""
        whole = "\0".join(texts)
        characters = map(chr, range(_PLACEHOLDERS_FROM, _PLACEHOLDERS_TO))
        free = (each for each in characters if each not in whole and escaped(each) not in whole)
        return dict(zip(sorted(names), free))

    def is_suspect(self, text: str, inner: bool = True) -> bool:
        """Whether a text holds the name of a control token, or what a template or the tokenizer could make one of.

        That is a name in other letters, a text that begins or ends with a part of a name, and, if `inner`, one that is
        most of a name. Templates put such texts between others, or change their case.
        """
        found = self._suspect.search(text)
        if found is not None or (inner and text.strip() in self._inner):
            return True
        return self._normal is not None and self._normal.search(self._normalized(text)) is not None

    def is_suspect_of(self, name: str, text: str) -> bool:
        """Whether a text holds this name, or begins or ends with a part of it."""
        return re.search(_pieces(name), text, re.IGNORECASE) is not None if name else False

    def count(self, tokens: Iterable[int]) -> Counter[int]:
        """Return how often each control token is among tokens."""
        return Counter(token for token in tokens if token in self._ids)

    def name_of(self, token: int) -> str:
        return self._ids[token]

    def encode(self, text: str, placeholders: Mapping[str, str], guarded: bool = False) -> list[int]:
        """Encode a rendered conversation, in which each placeholder stands for a name that is text.

        `guarded`: texts in it may look like names to the tokenizer, although they are none.
        """
        if not placeholders and not (guarded and self._normal):
            return list(self._fast.encode(text, add_special_tokens=False).ids)
        text = self._pattern.sub(lambda found: self._private[found.group()], text)
        text = text.translate({ord(character): name for name, character in placeholders.items()})
        return list(self._tokenizer_without_names().encode(text, add_special_tokens=False).ids)

    def _normal_pattern(self) -> re.Pattern[str] | None:
        """Return what finds the names that the tokenizer looks for only after it has normalized a text."""
        if self._fast.normalizer is None:
            return None
        added = self._fast.get_added_tokens_decoder().values()
        names = {self._normalized(token.content) for token in added if token.normalized and token.content in self.names}
        return re.compile("|".join(map(re.escape, sorted(names - {""})))) if names - {""} else None

    def _normalized(self, text: str) -> str:
        return str(self._fast.normalizer.normalize_str(text))

    def _tokenizer_without_names(self) -> Fast:
        if self._guarded is None:
            self._guarded = Fast.from_str(_renamed(self._fast, self._private))
        return self._guarded


def _pieces(name: str) -> str:
    """Return a pattern for a name, a part of it at an end of a text, and its first letters where they are signs."""
    if len(name.strip()) < 2:
        return re.escape(name)
    shortest = 2 if name[0].isalnum() or name[0].isspace() else 1
    starts = "|".join(re.escape(name[:length]) for length in range(len(name) - 1, shortest - 1, -1))
    ends = "|".join(re.escape(name[-length:]) for length in range(len(name) - 1, 1, -1))
    sign = [re.escape(name[:2])] if not any(each.isalnum() or each.isspace() for each in name[:2]) else []
    return "|".join([*sign, re.escape(name), rf"(?:{starts})\s*\Z", *([rf"\A\s*(?:{ends})"] if ends else [])])


def _inner(name: str) -> set[str]:
    """Return the texts that are nearly all of a name, without a few letters at both of its ends."""
    cut = [(start, end) for start in range(1, 4) for end in range(1, 4) if 2 * (start + end) <= len(name)]
    return {name[start : len(name) - end] for start, end in cut}


def escaped(character: str) -> str:
    """Return a character as JSON in ASCII has it, in which some templates write tools and arguments."""
    return json.dumps(character)[1:-1]


def _renamed(fast: Fast, names: Mapping[str, str]) -> str:
    """Return the JSON of a tokenizer, with other names for some added tokens."""
    described: dict[str, Any] = json.loads(fast.to_str())
    for token in described["added_tokens"]:
        if token["content"] in names:
            # Only the name itself is the token, wherever it stands.
            token |= {"content": names[token["content"]], "normalized": False, "single_word": False}
    model = described["model"]
    vocabulary = model.get("vocab")
    if isinstance(vocabulary, dict):
        model["vocab"] = {names.get(name, name): index for name, index in vocabulary.items()}
    elif isinstance(vocabulary, list):
        model["vocab"] = [[names.get(name, name), score] for name, score in vocabulary]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    described["post_processor"] = None  # it may name special tokens, and adds none to a part of a conversation
    return json.dumps(described)
