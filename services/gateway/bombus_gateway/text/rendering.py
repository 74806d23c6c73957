"""The text side of one model: its tokenizer, the renderer of its chat template, and how its completions are read."""

import logging
from collections.abc import Mapping
from functools import cached_property
from typing import Any, Literal

import msgspec

from bombus.config.job import NO_CHAT_TEMPLATE, ModelConfig
from bombus.hive.events import ConversationFormat
from bombus.hive.records import digest
from bombus.text.chat_template import ChatTemplate
from bombus.text.checking import template_of
from bombus.text.tokenizer import Tokenizer
from bombus_gateway.text.hermes import HermesTemplate
from bombus_gateway.text.prompt_digest import prompt_digest
from bombus_gateway.text.renderer import TemplateRenderer

log = logging.getLogger(__name__)

CONTEXT_TOKENS_DEFAULT = 1 << 20
SYNTAX_CHARACTERS_MAX = 80  # maximum length of a syntax name in `TextModel.format`
_NO_CHAT = "{{ raise_exception('the job has model.chat_template: none, for plain completions only') }}"
CONTEXT_NAMES = ("max_position_embeddings", "n_positions", "max_seq_len")


class TextOptions(msgspec.Struct, frozen=True):
    """A job's options for the text of its model.

    `variables` are passed to the chat template. `tools` is "template" to pass the tools to the template, or "hermes" to
    describe them in message text. `history` says what to do if the template drops sampled text; see `TemplateRenderer`.
    `chat` says whether there are conversations at all; without them, no template is needed.
    """

    variables: dict[str, Any] = {}
    tools: Literal["template", "hermes"] = "template"
    history: Literal["template", "keep"] = "template"
    chat: bool = True

    @classmethod
    def of(cls, model: ModelConfig, history: Literal["template", "keep"] = "template") -> "TextOptions":
        """Return the options in the model section of a job."""
        return cls(model.chat_template_kwargs, model.tools, history, chat=model.chat_template != NO_CHAT_TEMPLATE)


DEFAULTS = TextOptions()


def context_tokens(config: Mapping[str, Any]) -> int:
    """Return the length of the longest sequence according to a model's config.json; model families use different keys
    for it.

    Multimodal models state the length in their `text_config`.
    """
    parts = (config, config.get("text_config"))
    limits = (part.get(name) for part in parts if isinstance(part, dict) for name in CONTEXT_NAMES)
    return next((limit for limit in limits if isinstance(limit, int) and limit > 0), CONTEXT_TOKENS_DEFAULT)


class TextModel:
    """A model's tokenizer and renderer. `context_tokens` is the length of the model's longest sequence."""

    def __init__(self, files: Mapping[str, bytes], name: str, options: TextOptions = DEFAULTS) -> None:
        """Load from the files in the model's folder. `name` is the job's name for the model, used only in messages.

        Raises `EngineFault` if the tokenizer or the chat template cannot be used.
        """
        self.tokenizer = Tokenizer(files)
        source = template_of(self.tokenizer, name) if options.chat else _NO_CHAT
        kind = HermesTemplate if options.tools == "hermes" else ChatTemplate
        with_tools = self.tokenizer.template_with_tools if options.chat else ""
        variables = {**self.tokenizer.named, **options.variables}
        template = kind(source, variables, with_tools)
        self.renderer = TemplateRenderer(self.tokenizer, template, options.history)
        self.tokenizer.shown = self.renderer.reading.markers
        self._sources = [source, with_tools, variables, options.tools, options.history]
        self._sources.append(digest(files["tokenizer.json"]).hex())
        self.context_tokens = context_tokens(self.tokenizer.model_config)
        log.info(
            "the model's own chat template renders its prompts"
            if options.chat
            else "the job is for plain completions only",
            extra={"model": name, **self.syntaxes},
        )

    @property
    def syntaxes(self) -> dict[str, str]:
        """The names of the syntaxes of tool calls and of reasoning, each "text" if it is not parsed."""
        reading = self.renderer.reading
        return {"tool_calls": reading.calls or "text", "reasoning": reading.reasoning or "text"}

    @cached_property
    def format(self) -> ConversationFormat:
        """How conversations are rendered and turns are parsed, in the form in which the hive's log records it. Long
        names are truncated."""
        names = {what: name[:SYNTAX_CHARACTERS_MAX] for what, name in self.syntaxes.items()}
        return ConversationFormat(template=prompt_digest(self.renderer, *self._sources), **names)


def syntaxes_of(files: Mapping[str, bytes], model: ModelConfig) -> dict[str, str]:
    """Return `TextModel.syntaxes` for a job's model. Raises `EngineFault` if the model's files cannot be used."""
    return TextModel(files, model.path, TextOptions.of(model)).syntaxes
