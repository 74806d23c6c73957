"""Determines the form in which a chat template expects messages. The form differs from template to template."""

import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from bombus.text.chat_template import ChatTemplate, TemplateRefused
from bombus_gateway.text.message import ChatMessage, id_for_model

WORD = "bumblebee"  # used in place of a text in probes of a template
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "forage",
        "description": "Look for flowers.",
        "parameters": {"type": "object", "properties": {"flower": {"type": "string"}}, "required": ["flower"]},
    },
}
ID_CHARACTERS = 9  # length of a short id, which some templates insist on


class Form(msgspec.Struct, frozen=True):
    """The form in which a template expects messages.

    `parts`: texts are lists of parts. `text_arguments`: a call's arguments are JSON text, not a mapping.
    `fill_content`: a message without content gets empty content. `short_ids`: call ids consist of nine letters and
    digits. `developer_as_system`: the template renders the role `system` but not `developer`.
    """

    parts: bool = False
    text_arguments: bool = False
    fill_content: bool = False
    short_ids: bool = False
    developer_as_system: bool = False

    def apply(self, messages: Sequence[ChatMessage]) -> list[ChatMessage]:
        """Return messages in the form that the template expects. The given arguments may be JSON text or mappings.

        Call ids are replaced by the ids that the model wrote, if it wrote any.
        """
        return [self._message(message) for message in messages]

    def _message(self, message: ChatMessage) -> ChatMessage:
        made = dict(message)
        if self.fill_content and made.get("content") is None:
            made["content"] = ""
        if self.parts and isinstance(made.get("content"), str):
            made["content"] = [{"type": "text", "text": made["content"]}]
        if made.get("tool_calls"):
            made["tool_calls"] = [self._call(call) for call in made["tool_calls"]]
        if made.get("tool_call_id"):
            made["tool_call_id"] = self._id(made["tool_call_id"])
        return made

    def _call(self, call: Mapping[str, Any]) -> dict[str, Any]:
        given = call["function"]["arguments"]
        text = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
        arguments = text if self.text_arguments else arguments_of(text)
        made = {**call, "function": {**call["function"], "arguments": arguments}}
        if made.get("id"):
            made["id"] = self._id(made["id"])
        return made

    def _id(self, call_id: str) -> str:
        own = id_for_model(call_id)
        return short_id(own) if self.short_ids else own


def arguments_of(text: str) -> Any:
    """Return the value of JSON text, or the text itself if it is not valid JSON."""
    try:
        return json.loads(text or "{}")
    except ValueError:
        return text
    except RecursionError:  # nested too deeply
        return text


def short_id(call_id: str) -> str:
    """Return an id of nine letters and digits for a call, the same on every gateway."""
    if len(call_id) == ID_CHARACTERS and call_id.isascii() and call_id.isalnum():
        return call_id
    return hashlib.blake2b(call_id.encode("utf-8", "replace")).hexdigest()[:ID_CHARACTERS]


def common_start(one: str, other: str) -> str:
    """Return the longest common prefix of two texts."""
    length = next((i for i, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other)))
    return one[:length]


def user(content: str) -> ChatMessage:
    return {"role": "user", "content": content}


def call_of(words: Sequence[str], prefix: str = "call") -> ChatMessage:
    """Return an assistant message with one call of `TOOL` for each word. Each call's id consists of the prefix and a
    number."""
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": f"{prefix}_{index}",
                "type": "function",
                "function": {"name": "forage", "arguments": json.dumps({"flower": word})},
            }
            for index, word in enumerate(words)
        ],
    }


SAMPLES: list[list[ChatMessage]] = [  # conversations with each of the roles
    [{"role": "system", "content": WORD}, user(WORD)],
    [{"role": "developer", "content": WORD}, user(WORD)],
    [user(WORD), {"role": "assistant", "content": WORD}, user(WORD)],
    [user(WORD), call_of([WORD]), {"role": "tool", "tool_call_id": "call_0", "content": WORD}],
]


def find_form(template: ChatTemplate) -> Form:
    """Return the form in which a template expects messages. If the template renders none of the forms that are tried,
    return the default form."""
    parts = not _shows(template, Form(), [user(WORD)]) and _shows(template, Form(parts=True), [user(WORD)])
    found = Form(parts=parts)
    conversation = [user("look"), call_of([WORD]), {"role": "tool", "tool_call_id": "call_0", "content": "rose"}]
    for short_ids, fill_content, text_arguments in itertools.product((False, True), repeat=3):
        form = Form(parts, text_arguments, fill_content, short_ids)
        if _shows(template, form, conversation, [TOOL], without="{'flower'"):
            found = form
            break
    developer, system = ([{"role": role, "content": WORD}, user("look")] for role in ("developer", "system"))
    replaced = not _shows(template, found, developer) and _shows(template, found, system)
    return msgspec.structs.replace(found, developer_as_system=replaced)


def _shows(
    template: ChatTemplate,
    form: Form,
    messages: Sequence[ChatMessage],
    tools: Sequence[Mapping[str, Any]] = (),
    without: str = "\0",
) -> bool:
    """Return whether the rendered messages contain `WORD` but not the text `without`."""
    try:
        text = template.render(form.apply(messages), tools, True)
    except TemplateRefused:
        return False
    return WORD in text and without not in text
