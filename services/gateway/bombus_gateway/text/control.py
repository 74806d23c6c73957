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

    def encode(self, text: str, placeholders: Mapping[str, str]) -> list[int]:
        """Encode a rendered conversation, in which each placeholder stands for a name that is text."""
        if not placeholders:
            return list(self._fast.encode(text, add_special_tokens=False).ids)
        text = self._pattern.sub(lambda found: self._private[found.group()], text)
        for name, character in placeholders.items():
            text = text.replace(character, name)
        return list(self._tokenizer_without_names().encode(text, add_special_tokens=False).ids)

    def _tokenizer_without_names(self) -> Fast:
        if self._guarded is None:
            self._guarded = Fast.from_str(_renamed(self._fast, self._private))
        return self._guarded


def escaped(character: str) -> str:
    """Return a character as JSON in ASCII has it, in which some templates write tools and arguments."""
    return json.dumps(character)[1:-1]


def _renamed(fast: Fast, names: Mapping[str, str]) -> str:
    """Return the JSON of a tokenizer, with other names for some added tokens."""
    described: dict[str, Any] = json.loads(fast.to_str())
    for token in described["added_tokens"]:
        token["content"] = names.get(token["content"], token["content"])
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
