"""The text of tokens, as shown by `bombus replay episode` (`bombus.replay.providers`)."""

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby

from bombus.text.tokenizer import Tokenizer


class TextsOfTokens:
    """The texts of one tokenizer's tokens."""

    def __init__(self, tokenizer: Tokenizer, added: Mapping[int, str]) -> None:
        self._pieces = tokenizer.pieces
        self._specials = tokenizer.specials
        self._added = added

    def __call__(self, token: int) -> str:
        return text_of(token, self._pieces, self._specials)

    def marked_up(self, tokens: Sequence[int]) -> str:
        """Return the text of the tokens.

        A token that is not plain text is put between ⟦ and ⟧, to distinguish it from a message that contains the same
        characters.
        """
        runs = groupby(tokens, key=self._is_plain)
        return "".join(self._plain(run) if is_plain else "".join(map(self._named, run)) for is_plain, run in runs)

    def _is_plain(self, token: int) -> bool:
        return 0 <= token < len(self._pieces) and token not in self._added

    def _named(self, token: int) -> str:
        return f"⟦{self._added.get(token, token)}⟧"

    def _plain(self, tokens: Iterable[int]) -> str:
        return b"".join(self._pieces[token] for token in tokens).decode("utf-8", "backslashreplace")


def token_texts(files: Mapping[str, bytes]) -> TextsOfTokens:
    """Return the token texts of a tokenizer. Raises `EngineFault` if its `files` cannot be used."""
    tokenizer = Tokenizer(files)
    added = json.loads(files["tokenizer.json"])["added_tokens"]
    return TextsOfTokens(tokenizer, {int(token["id"]): str(token["content"]) for token in added})


def text_of(token: int, pieces: Sequence[bytes], specials: Mapping[int, str]) -> str:
    """Return the text that a token adds. Bytes that are not a whole character are spelled out, as in `\\xe2`.

    Special tokens are shown by name, and ids outside the vocabulary as `<id>`.
    """
    if token in specials:
        return specials[token]
    if not 0 <= token < len(pieces):
        return f"<{token}>"
    return pieces[token].decode("utf-8", "backslashreplace")
