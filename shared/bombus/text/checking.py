"""Checks, before anything runs, that a gateway can use the text files of a model."""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bombus.config.job import NO_CHAT_TEMPLATE, ModelConfig
from bombus.errors import EngineFault
from bombus.text.chat_template import ChatTemplate, TemplateRefused
from bombus.text.tokenizer import Tokenizer
from bombus.weights.models import TOOL_TEMPLATE
from bombus.weights.tokenizer_fit import read_json, token_ids

_WORDS = ("look", "again")
_MARKER = re.compile(r"<[|｜][^<>|｜\s]{1,64}[|｜]>")
# Some templates accept no system message, and others only a single message.
_PLAIN_TURNS = (("system", "user", "assistant", "user"), ("user", "assistant", "user"), ("user",))


def with_chat_template(files: Mapping[str, bytes], given: str) -> dict[str, bytes]:
    """Return a model's text files with the chat template that its job sets, as text or as a file name.

    Raises `EngineFault` if `given` is neither.
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
    """Raise `EngineFault` unless a gateway can read the tokenizer, and the chat template renders a user's message.

    Markers in the tokenizer's own template must be tokens. `files` must already include the job's own template, if any.
    If a job sets no chat template (`NO_CHAT_TEMPLATE`), only the tokenizer is checked.
    """
    tokenizer = Tokenizer(files)
    if model.chat_template == NO_CHAT_TEMPLATE:
        return
    variables = {**tokenizer.named, **model.chat_template_kwargs}
    template = ChatTemplate(template_of(tokenizer, model.path), variables, tokenizer.template_with_tools)
    _check_renders(template)
    marker = "" if model.chat_template else unknown_marker(template, token_ids(read_json(files, "tokenizer.json")))
    if marker:
        raise EngineFault(
            f"the tokenizer of {model.tokenizer or model.path!r} does not fit its chat template: the template writes "
            f"{marker!r}, which is not a token; correct the tokenizer's files, set model.tokenizer to the model's own, "
            f"or set model.chat_template to a template that fits"
        )


def template_of(tokenizer: Tokenizer, name: str) -> str:
    """Return the chat template of the model `name`. Raises `EngineFault` if the model has none."""
    if not tokenizer.chat_template.strip():
        raise EngineFault(
            f"{name!r} has no chat template: set model.chat_template in the job to one, or to "
            f"{NO_CHAT_TEMPLATE} for plain completions only"
        )
    return tokenizer.chat_template


def _check_renders(template: ChatTemplate) -> None:
    """Raise `EngineFault` unless the template's output depends on a user's message, as text or as a list of parts."""
    why = ""
    for as_parts in (False, True):
        try:
            shown = {_rendered(template, ("user",), _content(word, as_parts)) for word in _WORDS}
        except TemplateRefused as error:
            why = why or f"refuses even a single user message: {error}"
            continue
        if len(shown) == len(_WORDS):
            return
        why = why or "drops user messages"
    raise EngineFault(f"the model's chat template {why}; set model.chat_template in the job to another")


def _content(word: str, as_parts: bool) -> Any:
    return [{"type": "text", "text": word}] if as_parts else word


def _rendered(template: ChatTemplate, roles: Sequence[str], content: Any) -> str:
    return template.render([{"role": role, "content": content} for role in roles], (), True)


def unknown_marker(template: ChatTemplate, ids: Mapping[str, int]) -> str:
    """Return a marker that a template writes around texts but that is not a token, or "" if there is none.

    If none of the markers is a token, the model learned them as plain text. Markers that the template only compares
    with, or writes around tools or images, are ignored: many models have templates that name such markers, but lack the
    tokens.
    """
    written = "\0".join(_plain_conversations(template))
    markers = sorted({marker for marker in _MARKER.findall(template.literals()) if marker in written})
    missing = [marker for marker in markers if marker not in ids]
    plain = len(missing) == len(markers) and "<|im_end|>" not in missing
    return "" if plain or not missing else missing[0]


def _plain_conversations(template: ChatTemplate) -> Iterator[str]:
    """Yield renderings of text-only conversations. Conversations that the template refuses are left out."""
    for roles in _PLAIN_TURNS:
        for as_parts in (False, True):
            try:
                yield _rendered(template, roles, _content(_WORDS[0], as_parts))
            except TemplateRefused:
                continue
