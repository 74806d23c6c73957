"""The model of the histories: a small tokenizer with marks of calls and reasoning, and a template that keeps both."""

import json
import random
from collections.abc import Sequence

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from bombus_gateway.text.rendering import TextModel
from tests.gateway.openai_hive import CORPUS

NAME = "models/histories"
CONTEXT = 1 << 20
MARKS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = """
{%- if tools %}
{{- '<|im_start|>system\\n# Tools\\n\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' + tool | tojson }}{% endfor %}
{{- '\\n</tools>\\nWrite {"name": <function-name>, "arguments": <args-json-object>} in tags.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{{- '<|im_start|>' + ('user' if message.role == 'tool' else message.role) + '\\n' }}
{%- if message.role == 'tool' %}{{- '<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- else %}
{%- if message.reasoning_content %}{{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}{% endif %}
{{- message.content or '' }}
{%- for call in message.tool_calls or [] %}
{{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""


def _files() -> dict[str, bytes]:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=[AddedToken(name, special=True) for name in SPECIALS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken(name, special=False, normalized=False) for name in MARKS])
    return {
        "tokenizer.json": tokenizer.to_str().encode(),
        "tokenizer_config.json": json.dumps({"eos_token": "<|im_end|>"}).encode(),
        "chat_template.jinja": TEMPLATE.encode(),
        "config.json": json.dumps({"max_position_embeddings": CONTEXT, "vocab_size": 600}).encode(),
    }


FILES = _files()
TEXT = TextModel(FILES, NAME)
START = TEXT.tokenizer.token_id("<|im_start|>") or 0
END = TEXT.tokenizer.token_id("<|im_end|>") or 0


def sampled_tokens(text: str, chance: random.Random) -> list[int]:
    """Return tokens of a text, often others than an encoder would choose, as models sample them."""
    if chance.random() < 0.3:
        return TEXT.tokenizer.encode(text)
    tokens: list[int] = []
    while text:
        size = chance.randint(1, 12)
        tokens += TEXT.tokenizer.encode(text[:size])
        text = text[size:]
    return tokens


_TEXTS = [TEXT.tokenizer.bytes_of((token,)) for token in range(len(TEXT.tokenizer.pieces))]
# With a private character for each special token, which no text can have.
_MARKED = [
    chr(0xE000 + token).encode() if token in TEXT.tokenizer.specials else _TEXTS[token] for token in range(len(_TEXTS))
]


def written(tokens: Sequence[int]) -> bytes:
    """Return the text of tokens, in which special ones can be told from texts with their names."""
    return b"".join(map(_MARKED.__getitem__, tokens))


def text_of(tokens: Sequence[int]) -> str:
    """Return the text of tokens as a client may see it, without special ones."""
    return b"".join(map(_TEXTS.__getitem__, tokens)).decode("utf-8", "replace")
