"""Makes a model's tokenizer folder for a chat template, without any hub.

The vocabulary is a part of SmolLM2's byte-level BPE, or a small one that is trained here: of bytes, or as SentencePiece
has it. Every special token that the template writes is added to it, with the flags that the tokenizers of such models
have, and the tag that ends an answer, where no such token does.
"""

import json
import re
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Fast

from tests import smollm2_wheel
from tests.templates.template_text import TemplateText, template_text

MODEL = "nobody/made-up-1b"  # a name that no table knows

# What templates write for control tokens: `<|x|>`, `<|x>`, `<x|>`, `<｜x｜>`, `<start_of_turn>`, `[INST]`.
CONTROL = re.compile(
    r"<\|[\w:./-]+\|?>|<[\w:./-]+\|>|<｜[^｜<>\s]+｜>|<(?:start|end)_of_\w+>|</?s>|<(?:\w+:)?(?:bos|eos|image|sop|eop)>"
    r"|<[A-Z]+(?:_[A-Z]+)*_TOKEN>|\[/?[A-Z]+(?:_[A-Z]+)*\]|\[gMASK\]|<SPECIAL_\d+>|\]~!?b[\[\]]|\[e~\["
)
# Tags that are tokens in many tokenizers, special in some and not in others.
TAG = re.compile(r"</?(?:think|tool_call|tool_response|arg_key|arg_value)>")

ANY_TAG = re.compile(r"</?\w+>")

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
    ("<seed:eos>", "<seed:bos>"),
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


def control_tokens(written: str) -> list[str]:
    return sorted(set(CONTROL.findall(written)))


def tags(written: str) -> list[str]:
    """Return the tags in what a template writes; of each pair both."""
    found = {re.sub(r"^</", "<", tag) for tag in TAG.findall(written)}
    return sorted(found | {tag.replace("<", "</", 1) for tag in found})


def end_tags(texts: TemplateText) -> list[str]:
    """Return the tag after an answer where no control token is there: a model ends its turn with a token of its own."""
    after = texts.after_answer()
    return [] if CONTROL.search(after) else ANY_TAG.findall(after)[:1]


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


def part_of_smollm2() -> Fast:
    """Return SmolLM2's tokenizer with the first of its merges: with all of them it takes a second to load."""
    return Fast.from_str(_part_of_smollm2())


@cache
def _part_of_smollm2() -> str:
    described = json.loads(smollm2_wheel.tokenizer_json())
    merges = [(left, right) for left, right in described["model"]["merges"][:MERGES]]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = dict.fromkeys([*alphabet, *(left + right for left, right in merges)])
    described["model"] |= {"vocab": {name: index for index, name in enumerate(names)}, "merges": merges}
    return json.dumps(described)


MERGES = 5000


def small_byte_level() -> Fast:
    """Train a small byte-level BPE tokenizer."""
    tokenizer = Fast(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    return tokenizer


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
    """Make the files of a model with this template. One variant has SmolLM2's vocabulary, but not if `small`."""
    if variant == "sentencepiece":
        tokenizer, flags = sentencepiece(), FLAGS["all special"]
    else:
        real = variant == "all special" and not small
        tokenizer, flags = part_of_smollm2() if real else small_byte_level(), FLAGS[variant]
    bos, eos = ends(template)
    texts = template_text(template, bos, eos)
    written = f"{template}\0{texts.samples()}"  # some tokens are put together from pieces
    names = list(dict.fromkeys([*control_tokens(written), bos, eos, *tags(written), *end_tags(texts)]))
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


_CORPUS = [
    "the quick brown fox jumps over the lazy dog and the weather is fine today",
    'what is the weather in Paris? {"name": "weather", "arguments": {"city": "Paris"}}',
    "user assistant system tool model hello there how are you, you are brief",
    "def f(x):\n\treturn x ** 2\n\n    # done\n",
    "Grüße, 你好 0123456789 ABCDEFGHIJKLMNOPQRSTUVWXYZ <|>[]{}/_:.;!?'\"=+-*&%$#@\\`~^()",
] * 4
