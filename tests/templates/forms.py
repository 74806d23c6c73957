"""The forms in which chat templates take messages."""

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from bombus_gateway.text.message import ChatMessage


class Form(NamedTuple):
    """How a template takes messages.

    Contents are text in the OpenAI API, and a call's arguments are JSON text: so our renderers get them. transformers
    passes messages to a template as they are, and nearly all templates want arguments as a mapping (`tojson` of a text
    would quote it twice), so the reference parses them, unless `text_arguments`. `parts`: the template reads contents
    only as lists of parts. `fill_content`: it raises on a message without content, which gets an empty one.
    `developer_as_system`: it raises on the role of a developer or loses it, and has one for that of a system.
    """

    parts: bool = False
    text_arguments: bool = False
    fill_content: bool = False
    developer_as_system: bool = False

    def apply(self, messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
        """Return messages as the template takes them."""
        return [self._message(message) for message in messages]

    def _message(self, message: ChatMessage) -> dict[str, Any]:
        made = dict(message)
        if self.developer_as_system and made["role"] == "developer":
            made["role"] = "system"
        if self.fill_content and made["content"] is None:
            made["content"] = ""
        if self.parts and made["content"] is not None:
            made["content"] = [{"type": "text", "text": made["content"]}]
        if "tool_calls" in made and not self.text_arguments:
            made["tool_calls"] = [_with_mapping(call) for call in made["tool_calls"]]
        return made


def _with_mapping(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {**call, "function": {**function, "arguments": json.loads(function["arguments"])}}
