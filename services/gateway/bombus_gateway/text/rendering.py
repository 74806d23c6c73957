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


class TextOptions(msgspec.Struct, frozen=True):
    """What a job says about the text of its model.

    `variables` are given to the chat template. `tools`: "template" gives it the tools, "hermes" describes them in texts
    of messages. `history`: what holds where the template drops a part of what was sampled, see `TemplateRenderer`.
    """

    variables: dict[str, Any] = {}
    tools: Literal["template", "hermes"] = "template"
    history: Literal["template", "keep"] = "template"


DEFAULTS = TextOptions()


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
        variables = {**self.tokenizer.named, **options.variables}
        template = kind(self.tokenizer.chat_template, variables, self.tokenizer.template_with_tools)
        self.renderer = TemplateRenderer(self.tokenizer, template, options.history)
        self.tokenizer.shown = self.renderer.reading.markers
        limit = self.tokenizer.model_config.get("max_position_embeddings")
        self.context_tokens = limit if isinstance(limit, int) and limit > 0 else CONTEXT_TOKENS_DEFAULT
        reading = self.renderer.reading
        log.info(
            "the model's own chat template renders its prompts",
            extra={"model": name, "tool_calls": reading.calls or "text", "reasoning": reading.reasoning or "text"},
        )
