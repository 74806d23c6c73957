"""Checks from the text files of a model, before anything runs, that a gateway can use them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bombus.config.job import NO_CHAT_TEMPLATE, ModelConfig
from bombus.errors import EngineFault
from bombus.text.chat_template import ChatTemplate, TemplateRefused
from bombus.text.tokenizer import Tokenizer
from bombus.weights.models import TOOL_TEMPLATE

_WORDS = ("look", "again")


def with_chat_template(files: Mapping[str, bytes], given: str) -> dict[str, bytes]:
    """Return a model's text files with the chat template that its job gives: as text, or as the name of a file.

    Raises `EngineFault` when it is neither.
    """
    if given in ("", NO_CHAT_TEMPLATE):
        return dict(files)
    kept = {name: data for name, data in files.items() if name != TOOL_TEMPLATE}
    return {**kept, "chat_template.jinja": given.encode() if "{" in given else _read(given)}


def _read(name: str) -> bytes:
    try:
        return Path(name).read_bytes()
    except OSError as error:
        raise EngineFault(f"model.chat_template {name!r} is neither a template nor a file here: {error}") from error


def check_text(files: Mapping[str, bytes], model: ModelConfig) -> None:
    """Raise `EngineFault` unless a gateway can read the tokenizer, and the chat template renders what a user says.

    `files` have the job's own template already. Nothing is rendered for a job without conversations.
    """
    tokenizer = Tokenizer(files)
    if model.chat_template != NO_CHAT_TEMPLATE:
        source = template_of(tokenizer, model.path)
        variables = {**tokenizer.named, **model.chat_template_kwargs}
        _check_renders(ChatTemplate(source, variables, tokenizer.template_with_tools))


def template_of(tokenizer: Tokenizer, name: str) -> str:
    """Return the chat template of the model `name`. Raises `EngineFault` when it has none."""
    if not tokenizer.chat_template.strip():
        raise EngineFault(
            f"{name!r} has no chat template: set model.chat_template in the job to one, or to "
            f"{NO_CHAT_TEMPLATE} for plain completions alone"
        )
    return tokenizer.chat_template


def _check_renders(template: ChatTemplate) -> None:
    """Raise `EngineFault` unless a user's message, as text or as a list of parts, is in what the template writes."""
    why = ""
    for as_parts in (False, True):
        try:
            shown = {_rendered(template, [{"type": "text", "text": word}] if as_parts else word) for word in _WORDS}
        except TemplateRefused as error:
            why = why or f"refuses even a single message of a user: {error}"
            continue
        if len(shown) == len(_WORDS):
            return
        why = why or "drops what a user says"
    raise EngineFault(f"the model's chat template {why}; set model.chat_template in the job to another")


def _rendered(template: ChatTemplate, content: Any) -> str:
    return template.render([{"role": "user", "content": content}], (), True)
