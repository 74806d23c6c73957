"""Writes tools, calls and results as message text in the Hermes format, for chat templates without tool support."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from bombus.text.chat_template import ChatTemplate

_HEAD = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>"
)
_TAIL = (
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments within "
    '<tool_call></tool_call> XML tags:\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n'
    "</tool_call>"
)


class HermesTemplate(ChatTemplate):
    """A chat template that renders tools, calls and results as message text."""

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], add_generation_prompt: bool
    ) -> str:
        return super().render(as_texts(messages, tools), (), add_generation_prompt)

    def literals(self) -> str:
        return "\0".join([super().literals(), _HEAD, _TAIL, "<tool_response></tool_response>"])


def as_texts(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the messages with their tools, calls and results written as text.

    The tools are described at the end of the system message, which is added if missing. Consecutive results become one
    user message.
    """
    made: list[Mapping[str, Any]] = []
    if tools:
        given = str(messages[0].get("content") or "") if messages and messages[0]["role"] == "system" else ""
        messages = messages[1:] if messages and messages[0]["role"] == "system" else messages
        made.append({"role": "system", "content": f"{given}\n\n{_described(tools)}" if given else _described(tools)})
    before = ""
    for message in messages:
        if message["role"] == "tool":
            text = f"<tool_response>\n{message.get('content') or ''}\n</tool_response>"
            if before == "tool":
                made[-1] = {"role": "user", "content": f"{made[-1]['content']}\n{text}"}
            else:
                made.append({"role": "user", "content": text})
        else:
            made.append(_with_calls_as_text(message))
        before = message["role"]
    return made


def _described(tools: Sequence[Mapping[str, Any]]) -> str:
    return _HEAD + "".join("\n" + json.dumps(tool, ensure_ascii=False) for tool in tools) + _TAIL


def _with_calls_as_text(message: Mapping[str, Any]) -> Mapping[str, Any]:
    blocks = []
    for call in message.get("tool_calls") or ():
        function = call["function"]
        given = function["arguments"]
        arguments = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
        name = json.dumps(function["name"], ensure_ascii=False)
        blocks.append(f'<tool_call>\n{{"name": {name}, "arguments": {arguments or "{}"}}}\n</tool_call>')
    if not blocks:
        return message
    content = message.get("content") or ""
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**rest, "content": "\n".join([content, *blocks] if content else blocks)}
