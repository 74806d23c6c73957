"""Encodes texts part by part, between added tokens, and remembers the parts: prompts have most of theirs in common."""

from array import array

from tokenizers import AddedToken
from tokenizers import Tokenizer as Fast

from bombus.text.tokenizer import encoded
from bombus_gateway.decoding.json_parts import RememberedParts
from bombus_gateway.text.patterns import any_of

REMEMBERED_CHARACTERS_MAX = 1 << 20  # of one generation
_TRIED = ("a", " a", "a ", "\n", "  b\n", "É 1")  # texts by which a tokenizer shows whether a part's place matters


class PartEncoder:
    """The encoder of one tokenizer.

    A tokenizer looks for its added tokens first, and encodes what is between them. Where these parts do not depend on
    what is around them, each is encoded once. Some tokenizers treat the first part in another way, and some tokens take
    white space around them: then texts are encoded as wholes.
    """

    def __init__(self, fast: Fast) -> None:
        self._fast = fast
        self._ids = _separators(fast)
        self._separator = any_of(self._ids)
        self._remembered = RememberedParts[str, "array[int]"](self._part, REMEMBERED_CHARACTERS_MAX)
        self.is_used = bool(self._ids) and self._is_same_in_parts()

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, as the tokenizer gives them."""
        return self._in_parts(text) if self.is_used else encoded(self._fast, text)

    def _in_parts(self, text: str) -> list[int]:
        tokens: list[int] = []
        at = 0
        for found in self._separator.finditer(text):
            if found.start() > at:
                tokens.extend(self._remembered(text[at : found.start()]))
            tokens.append(self._ids[found[0]])
            at = found.end()
        if at < len(text):
            tokens.extend(self._remembered(text[at:]))
        return tokens

    def _part(self, text: str) -> "array[int]":
        return array("i", encoded(self._fast, text))

    def _is_same_in_parts(self) -> bool:
        name = next(iter(self._ids))
        texts = [f"{one}{name}{other}" for one in ("", *_TRIED) for other in _TRIED]
        return all(self._in_parts(text) == encoded(self._fast, text) for text in texts)


def _separators(fast: Fast) -> dict[str, int]:
    """Return the added tokens that are looked for in a text as it is, by their names; none where one takes more."""
    added: dict[int, AddedToken] = fast.get_added_tokens_decoder()
    exact = {token.content: index for index, token in added.items() if not token.normalized}
    takes_more = any(token.lstrip or token.rstrip or token.single_word for token in added.values())
    return {} if takes_more else exact
