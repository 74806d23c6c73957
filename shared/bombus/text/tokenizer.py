"""Converts text to token ids and back with the light `tokenizers` library: no torch, no transformers."""

import json
import re
from collections.abc import Collection, Iterable, Mapping
from functools import cached_property
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Fast

from bombus.config.template_variables import SPECIAL_TOKENS
from bombus.errors import EngineFault
from bombus.weights.tokenizer_fit import read_json, template_sources

# Special tokens that are part of the text by default. All other special tokens are left out of it.
SHOWN_SPECIALS = frozenset(
    {"<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"}
)
LONG_CHARACTERS = 4096  # longer texts are encoded as a batch, which takes time to set up but lets other threads run
_BYTE_TOKEN = re.compile(r"^<0x([0-9A-Fa-f]{2})>$")


class Tokenizer:
    """One model's tokenizer.

    `shown` contains the special tokens that are part of the text. It may be set only before the first text is decoded.
    `added` maps the ids of all added tokens to their text, and `specials` the ids of the special tokens. `named` maps
    the names that a chat template may use, such as `bos_token`, to special tokens.
    """

    def __init__(self, files: Mapping[str, bytes]) -> None:
        """Load the tokenizer from the files in a model's folder, keyed by name. Raises `EngineFault` if they cannot be
        used."""
        if "tokenizer.json" not in files:
            raise EngineFault("the model has no tokenizer.json: save it with a fast tokenizer")
        try:
            described: dict[str, Any] = json.loads(files["tokenizer.json"])
            self.fast = Fast.from_str(files["tokenizer.json"].decode())
        except Exception as error:  # the library raises nothing narrower
            raise EngineFault(f"tokenizer.json cannot be read: {error}") from error
        # A tokenizer that was saved after training may truncate or pad texts. transformers does not do that for chats.
        self.fast.no_truncation()
        self.fast.no_padding()
        self._to_bytes = _piece_reader(described.get("decoder"))
        self.config = read_json(files, "tokenizer_config.json")
        self.model_config = read_json(files, "config.json")
        self.generation_config = read_json(files, "generation_config.json")
        templates = template_sources(files)
        self.chat_template = templates.get("default", "")
        self.template_with_tools = templates.get("tool_use", "")
        self.named = _named_specials(self.config, read_json(files, "special_tokens_map.json"))
        # The token that represents text unknown to the tokenizer, or "" if there is none.
        self.unknown = self.named.get("unk_token") or str(getattr(self.fast.model, "unk_token", None) or "")
        self._add_tokens()
        added = self.fast.get_added_tokens_decoder()
        self.added = {index: str(token.content) for index, token in added.items()}
        named = set(self._named_or_extra())
        self.specials = {i: str(token.content) for i, token in added.items() if token.special or token.content in named}
        self.shown: Collection[str] = SHOWN_SPECIALS

    def _add_tokens(self) -> None:
        """Add the tokens that are only in tokenizer_config.json, and apply that file's flags to the other tokens.

        transformers does the same when it loads the files.
        """
        known = set(self.fast.get_added_tokens_decoder().values())
        listed = self.config.get("added_tokens_decoder")
        for _, token in sorted(listed.items(), key=lambda item: int(item[0])) if isinstance(listed, dict) else ():
            flags = {flag: bool(token[flag]) for flag in _FLAGS if flag in token}
            added = AddedToken(token["content"], **flags)
            if added not in known:
                self.fast.add_tokens([added])
        names = {token.content for token in self.fast.get_added_tokens_decoder().values()}
        absent = [name for name in dict.fromkeys(self._named_or_extra()) if name not in names]
        self.fast.add_tokens([AddedToken(name, special=True) for name in absent])

    def _named_or_extra(self) -> list[str]:
        extra = self.config.get("extra_special_tokens", self.config.get("additional_special_tokens"))
        return [*self.named.values(), *(_content(token) for token in (extra if isinstance(extra, list) else ()))]

    def encode(self, text: str) -> list[int]:
        """Encode text, in which special tokens may be written by name."""
        return encoded(self.fast, text)

    def token_id(self, token: str) -> int | None:
        index: int | None = self.fast.token_to_id(token)
        return index

    def decode(self, tokens: Iterable[int], with_specials: bool = False) -> str:
        if with_specials:
            return str(self.fast.decode(list(tokens), skip_special_tokens=False))
        return self.bytes_of(tokens).decode("utf-8", "replace")

    def bytes_of(self, tokens: Iterable[int]) -> bytes:
        """Return the bytes of the tokens' text. Raises `EngineFault` for an id outside the vocabulary."""
        pieces = self.pieces
        try:
            return b"".join([pieces[token] for token in tokens])
        except IndexError:
            raise EngineFault(f"a sampled token is outside the vocabulary of {len(pieces)} tokens") from None

    @cached_property
    def pieces(self) -> list[bytes]:
        """Return the bytes that each token adds to the text, by id. They are empty for special tokens that are not in
        `shown`."""
        vocabulary = self.fast.get_vocab(with_added_tokens=True)
        # A model's head may be padded beyond its vocabulary. The extra tokens have no text.
        size = max(max(vocabulary.values(), default=0) + 1, int(self.model_config.get("vocab_size") or 0))
        pieces = [b""] * size
        for token, index in vocabulary.items():
            if index not in self.added:
                pieces[index] = self._to_bytes(token)
            elif index not in self.specials or token in self.shown:
                pieces[index] = token.encode()
        return pieces


def encoded(fast: Fast, text: str) -> list[int]:
    """Return the tokens of a text. While a long text is encoded, other threads can run."""
    if len(text) <= LONG_CHARACTERS:
        return list(fast.encode(text, add_special_tokens=False).ids)
    return list(fast.encode_batch_fast([text], add_special_tokens=False)[0].ids)


_FLAGS = ("lstrip", "normalized", "rstrip", "single_word", "special")


def _content(token: Any) -> str:
    return str(token.get("content", "")) if isinstance(token, dict) else str(token or "")


def _named_specials(config: Mapping[str, Any], special_map: Mapping[str, Any]) -> dict[str, str]:
    """Return the special tokens by name: the names that all models have, and the model's own."""
    extra = config.get("extra_special_tokens")
    given = {**special_map, **config, **(extra if isinstance(extra, dict) else {})}
    own = [name for name in given if name.endswith("_token") or (isinstance(extra, dict) and name in extra)]
    found = {name: given.get(name) or special_map.get(name) for name in (*SPECIAL_TOKENS, *own)}
    return {name: _content(token) for name, token in found.items() if isinstance(token, str | dict) and _content(token)}


class _PieceReader:
    """Converts the tokens of a vocabulary to bytes, as one kind of decoder does."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._bytes = _byte_level_alphabet() if kind == "ByteLevel" else {}

    def __call__(self, token: str) -> bytes:
        if self._kind == "ByteLevel":
            alphabet = self._bytes
            if all(character in alphabet for character in token):
                return bytes([alphabet[character] for character in token])
            return token.encode()
        if self._kind == "Metaspace":
            byte = _BYTE_TOKEN.match(token)
            return bytes([int(byte.group(1), 16)]) if byte else token.replace("▁", " ").encode()
        return token.encode()


def _piece_reader(decoder: dict[str, Any] | None) -> _PieceReader:
    """Return the reader for a decoder that decodes tokens one by one. Raises `EngineFault` for any other kind."""
    kind = decoder.get("type") if decoder else None
    if kind == "Sequence" and decoder:
        kinds = {step.get("type") for step in decoder.get("decoders", ())}
        if "ByteLevel" in kinds:
            kind = "ByteLevel"
        elif kinds <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}:
            kind = "Metaspace"
    if kind in ("ByteLevel", "Metaspace"):
        return _PieceReader(kind)
    if kind in (None, "Fuse"):
        return _PieceReader("Plain")
    raise EngineFault(
        f"a tokenizer with a decoder of type {kind} is not supported: it must be byte-level BPE or SentencePiece"
    )


def _byte_level_alphabet() -> dict[str, int]:
    """Return the byte for each character in byte-level BPE: printable bytes represent themselves, and the others start
    at U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    hidden = (byte for byte in range(256) if byte not in set(printable))
    alphabet.update({chr(0x100 + index): byte for index, byte in enumerate(hidden)})
    return alphabet
