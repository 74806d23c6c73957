"""The text of single tokens, as `bombus replay episode` shows them (`bombus.replay.providers`)."""

from collections.abc import Callable, Mapping, Sequence

from bombus_gateway.text.tokenizer import Tokenizer


def token_texts(files: Mapping[str, bytes]) -> Callable[[int], str]:
    """Return a function that gives the text of a token id.

    `files` are the tokenizer's, by name. Raises `EngineFault` when they cannot be used.
    """
    tokenizer = Tokenizer(files)
    return lambda token: text_of(token, tokenizer.pieces, tokenizer.specials)


def text_of(token: int, pieces: Sequence[bytes], specials: Mapping[int, str]) -> str:
    """Return what a token adds to the text; bytes that are not a whole character are spelled out, as `\\xe2`.

    Special tokens are shown by name, ids outside the vocabulary as `<id>`.
    """
    if token in specials:
        return specials[token]
    if not 0 <= token < len(pieces):
        return f"<{token}>"
    return pieces[token].decode("utf-8", "backslashreplace")
