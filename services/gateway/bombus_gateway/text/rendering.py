"""The text side of one model: its tokenizer, the renderer of its chat template, and how its completions are read."""

import logging
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from bombus.errors import EngineFault
from bombus_gateway.text.chat_template import ChatTemplate
from bombus_gateway.text.hermes import HermesTemplate
from bombus_gateway.text.renderer import TemplateRenderer
from bombus_gateway.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

CONTEXT_TOKENS_DEFAULT = 1 << 20
CONTEXT_NAMES = ("max_position_embeddings", "n_positions", "max_seq_len")


class TextOptions(msgspec.Struct, frozen=True):
    """What a job says about the text of its model.

    `variables` are given to the chat template. `tools`: "template" gives it the tools, "hermes" describes them in texts
    of messages. `history`: what holds where the template drops a part of what was sampled, see `TemplateRenderer`.
    """

    variables: dict[str, Any] = {}
    tools: Literal["template", "hermes"] = "template"
    history: Literal["template", "keep"] = "template"


DEFAULTS = TextOptions()


def context_tokens(config: Mapping[str, Any]) -> int:
    """Return the longest sequence that a model's config.json states, under any of the names that families have for it.

    Models of more than text state it in the part that is for text.
    """
    parts = (config, config.get("text_config"))
    limits = (part.get(name) for part in parts if isinstance(part, dict) for name in CONTEXT_NAMES)
    return next((limit for limit in limits if isinstance(limit, int) and limit > 0), CONTEXT_TOKENS_DEFAULT)


class TextModel:
    """A model's tokenizer and renderer. `context_tokens` is the longest sequence that the model can take."""

    def __init__(self, files: Mapping[str, bytes], name: str, options: TextOptions = DEFAULTS) -> None:
        """Load from the files of the model's folder; `name` is the job's name for it, and decides nothing.

        Raises `EngineFault` when the tokenizer or the chat template cannot be used.
        """
        self.tokenizer = Tokenizer(files)
        if not self.tokenizer.chat_template.strip():
            raise EngineFault(f"{name!r} has no chat template: set model.chat_template in the job")
        kind = HermesTemplate if options.tools == "hermes" else ChatTemplate
        template = kind(self.tokenizer.chat_template, {**self.tokenizer.named, **options.variables})
        self.renderer = TemplateRenderer(self.tokenizer, template, options.history)
        self.tokenizer.shown = self.renderer.reading.markers
        self.context_tokens = context_tokens(self.tokenizer.model_config)
        reading = self.renderer.reading
        log.info(
            "the model's own chat template renders its prompts",
            extra={"model": name, "tool_calls": reading.calls or "text", "reasoning": reading.reasoning or "text"},
        )
