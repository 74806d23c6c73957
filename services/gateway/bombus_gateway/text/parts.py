"""Encodes a text in parts, split at its added tokens. The parts are cached, since prompts share most of them."""

import re
from array import array

from tokenizers import AddedToken
from tokenizers import Tokenizer as Fast

from bombus.text.tokenizer import LONG_CHARACTERS, encoded
from bombus_gateway.decoding.json_parts import RememberedParts
from bombus_gateway.text.patterns import any_of

REMEMBERED_CHARACTERS_MAX = 1 << 20  # limit of each of the cache's two generations
_TRIED = ("a", " a", "a ", "\n", "  b\n", "É 1")  # texts to test whether a part's tokens depend on its surroundings


class PartEncoder:
    """Encodes text with one tokenizer.

    A tokenizer first finds its added tokens, then encodes the parts between them. If the tokens of a part do not depend
    on the surrounding text, each part is encoded once and cached (`splits` is true). Some tokenizers treat the first
    part differently, and in some, added tokens include the white space around them. With such tokenizers, each text is
    encoded as a whole.
    """

    def __init__(self, fast: Fast) -> None:
        self._fast = fast
        self._ids = _separators(fast)
        self._separator = re.compile(f"({any_of(self._ids).pattern})")
        self._remembered = RememberedParts[str, "array[int]"](self._read, REMEMBERED_CHARACTERS_MAX)
        self.splits = bool(self._ids) and self._is_same_in_parts()

    def encode(self, text: str) -> list[int]:
        """Encode a text. The result is the same as the tokenizer itself would return."""
        return self._in_parts(text) if self.splits else encoded(self._fast, text)

    def _in_parts(self, text: str) -> list[int]:
        pieces = self._separator.split(text)  # parts and, between them, separators
        new = self._read_together(pieces[::2]) if len(text) > LONG_CHARACTERS else {}
        tokens: list[int] = []
        for index, piece in enumerate(pieces):
            if index % 2:
                tokens.append(self._ids[piece])
            elif piece:
                tokens.extend(new[piece] if piece in new else self._remembered(piece))
        return tokens

    def _read(self, part: str) -> "array[int]":
        return array("i", encoded(self._fast, part))

    def _read_together(self, parts: list[str]) -> dict[str, "array[int]"]:
        """Encode the new parts in one batch if they are long in total, so that other threads can run meanwhile."""
        new = [part for part in dict.fromkeys(parts) if not self._remembered.knows(part)]
        if sum(map(len, new)) <= LONG_CHARACTERS:
            return {}
        encodings = self._fast.encode_batch_fast(new, add_special_tokens=False)
        found = {part: array("i", each.ids) for part, each in zip(new, encodings)}
        for part, tokens in found.items():
            self._remembered.add(part, tokens)
        return found

    def _is_same_in_parts(self) -> bool:
        name = next(iter(self._ids))
        texts = [f"{one}{name}{other}" for one in ("", *_TRIED) for other in _TRIED]
        try:
            return all(self._in_parts(text) == encoded(self._fast, text) for text in texts)
        except Exception:  # the tokenizer does not know a letter; the library raises nothing more specific
            return False


def _separators(fast: Fast) -> dict[str, int]:
    """Return the ids, by name, of the added tokens that are found in a text before it is normalized.

    Returns an empty map if any added token includes white space, or if the tokenizer treats the start of a text
    differently.
    """
    added: dict[int, AddedToken] = fast.get_added_tokens_decoder()
    takes_more = any(token.lstrip or token.rstrip or token.single_word for token in added.values())
    knows_first = fast.pre_tokenizer is not None and b'"first"' in fast.pre_tokenizer.__getstate__()
    exact = {token.content: index for index, token in added.items() if not token.normalized and token.content}
    return {} if takes_more or knows_first else exact
