"""Texts are encoded part by part only where that gives what the tokenizer gives for them as wholes."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers.normalizers import Normalizer
from tokenizers.pre_tokenizers import PreTokenizer

from bombus_gateway.text.parts import REMEMBERED_CHARACTERS_MAX, PartEncoder
from tests.gateway.openai_hive import CORPUS

NAMES = ["<|im_start|>", "<|im_end|>", "<|im_end|>>", "<s>"]
WORDS = ("".join(letters) for letters in ("fox", " ", "\n", "É", "<|", "|>", "<s", " <|im_start", "the", "▁", "s>"))
TEXTS = st.lists(st.sampled_from([*NAMES, *WORDS]) | st.text(max_size=3), max_size=8).map("".join)
LETTERS = Regex(r"(?i:'s|'t)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")


def trained(pre_tokenizer: PreTokenizer, normalizer: Normalizer | None = None, **flags: bool) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False, **flags) for name in NAMES])
    return tokenizer


def unigram() -> Tokenizer:
    """A tokenizer that fails at what is not in its vocabulary."""
    tokenizer = Tokenizer(models.Unigram([(letter, -1.0) for letter in "abcdefghijklmnopqrstuvwxyz \n"], None, False))
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in NAMES])
    return tokenizer


def byte_level(**options: bool) -> PreTokenizer:
    return pre_tokenizers.ByteLevel(**options)


def in_pieces() -> PreTokenizer:
    split = pre_tokenizers.Split(LETTERS, behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "bytes": lambda: trained(byte_level(add_prefix_space=False)),
    "bytes after a space": lambda: trained(byte_level(add_prefix_space=True)),
    "pieces by a pattern": lambda: trained(in_pieces(), normalizers.NFC()),
    "metaspace always": lambda: trained(pre_tokenizers.Metaspace(prepend_scheme="always")),
    "metaspace first": lambda: trained(pre_tokenizers.Metaspace(prepend_scheme="first")),
    "metaspace never": lambda: trained(pre_tokenizers.Metaspace(prepend_scheme="never")),
    "prepended by a normalizer": lambda: trained(
        byte_level(add_prefix_space=False),
        normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
    ),
    "stripped and in small letters": lambda: trained(
        pre_tokenizers.BertPreTokenizer(), normalizers.Sequence([normalizers.Strip(), normalizers.Lowercase()])
    ),
    "space that a token takes on its left": lambda: trained(byte_level(add_prefix_space=False), lstrip=True),
    "space that a token takes on its right": lambda: trained(byte_level(add_prefix_space=False), rstrip=True),
    "letters that it does not know": lambda: unigram(),
    "tokens that are whole words": lambda: trained(byte_level(add_prefix_space=False), single_word=True),
}  # fmt: skip
TOKENIZERS = {kind: made() for kind, made in KINDS.items()}
ENCODERS = {kind: PartEncoder(tokenizer) for kind, tokenizer in TOKENIZERS.items()}
AS_WHOLES = {
    "metaspace first",
    "space that a token takes on its left",
    "space that a token takes on its right",
    "letters that it does not know",
    "tokens that are whole words",
}


@pytest.mark.parametrize("kind", KINDS.keys() - {"letters that it does not know"})
@given(TEXTS)
def test_a_text_has_the_tokens_that_its_tokenizer_gives_it(kind: str, text: str) -> None:
    tokens = ENCODERS[kind].encode(text)
    assert tokens == TOKENIZERS[kind].encode(text, add_special_tokens=False).ids
    assert tokens == ENCODERS[kind].encode(text), "as it is remembered"


def test_parts_are_used_unless_it_matters_what_is_around_them() -> None:
    assert {kind for kind, encoder in ENCODERS.items() if not encoder.splits} == AS_WHOLES


@pytest.mark.parametrize("kind", ["bytes", "letters that it does not know"])
def test_long_texts_of_many_parts_have_the_same_tokens(kind: str) -> None:
    text = "".join(f"<|im_start|>{'the fox ' * count}<|im_end|>" for count in range(80))
    assert ENCODERS[kind].encode(text) == TOKENIZERS[kind].encode(text, add_special_tokens=False).ids


def test_a_part_that_is_too_large_to_be_remembered_is_encoded_all_the_same() -> None:
    text = f"<s>{'fox ' * (REMEMBERED_CHARACTERS_MAX // 12)}<s>"
    assert ENCODERS["bytes"].encode(text) == TOKENIZERS["bytes"].encode(text, add_special_tokens=False).ids
