"""Renders conversations for ChatML models: `<|im_start|>role\\ncontent<|im_end|>\\n`.

Tools follow the Hermes convention that Qwen's templates use. Its tags are plain text in tokenizers that have no tokens
for them.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from bombus.errors import EngineFault
from bombus.hive.records import unpack_tokens
from bombus_gateway.text.message import ChatMessage
from bombus_gateway.text.tokenizer import Tokenizer
from bombus_gateway.text.tool_calls import PlainReader, ToolCallReader

IM_START, IM_END = "<|im_start|>", "<|im_end|>"
TOOLS_HEAD = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>"
)
TOOLS_TAIL = (
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments within "
    '<tool_call></tool_call> XML tags:\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n'
    "</tool_call>"
)
# A system turn that a template spells out is its default, for conversations without a system message.
_DEFAULT_SYSTEM = re.compile(r"<\|im_start\|>system(?:\n|\\n)([^<{}]+?)<\|im_end\|>")


def is_chatml(tokenizer: Tokenizer) -> bool:
    """Whether the model's own template is plain ChatML, without reasoning, which needs rules of its own."""
    template = tokenizer.chat_template
    has_tokens = tokenizer.token_id(IM_START) is not None and tokenizer.token_id(IM_END) is not None
    return has_tokens and IM_START in template and "think" not in template


class ChatML:
    """The renderer for plain ChatML templates.

    Each turn is encoded by itself, so that the text between two special tokens gets the tokens that it has in the
    model's own template. Special tokens are inserted by id, so no text in a message can forge them.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        start, end = tokenizer.token_id(IM_START), tokenizer.token_id(IM_END)
        if start is None or end is None:
            raise EngineFault(f"the tokenizer has no {IM_START} and {IM_END}: this is not a ChatML model")
        self._tokenizer = tokenizer
        self._start, self._end = start, end
        found = _DEFAULT_SYSTEM.search(tokenizer.chat_template)
        self.default_system = found.group(1) if found else ""
        self._newline = tokenizer.encode("\n")
        self._generate = [start, *tokenizer.encode("assistant\n")]
        self.stop_token_ids = stop_tokens(tokenizer, end)
        self._stops = frozenset(self.stop_token_ids)

    def render(self, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]]) -> list[int]:
        """Return a whole prompt, up to where the assistant begins."""
        tokens: list[int] = []
        first_is_system = bool(messages) and messages[0]["role"] in _SYSTEM
        system = (messages[0].get("content") or "") if first_is_system else self.default_system
        if tools:
            system = f"{system}\n\n{_tools_text(tools)}" if system or first_is_system else _tools_text(tools)
        if system or first_is_system:
            tokens += self._turn("system", system)
        return tokens + self._turns(messages[1:] if first_is_system else messages) + self._generate

    def extend(
        self,
        history: bytes,
        completion_at: int,
        messages: Sequence[ChatMessage],
        tools: Sequence[Mapping[str, Any]],
    ) -> list[int] | None:
        """Return the tokens to append to `history` (int32: a prompt and its completion, as they were sampled).

        A completion that was cut, by length or by a stop string, is closed first: its closing token was not sampled.
        """
        closed = len(history) > 4 * completion_at and unpack_tokens(history[-4:])[0] in self._stops
        tail = [] if closed else [self._end]
        return [*tail, *self._newline, *self._turns(messages), *self._generate]

    def reader(
        self, prompt: bytes, tools: Sequence[Mapping[str, Any]], stops: Sequence[str]
    ) -> PlainReader | ToolCallReader:
        return ToolCallReader() if tools else PlainReader()

    def _turns(self, messages: Sequence[ChatMessage]) -> list[int]:
        tokens: list[int] = []
        responses: list[str] = []
        for message in messages:
            if message["role"] == "tool":
                responses.append(f"<tool_response>\n{message.get('content') or ''}\n</tool_response>")
                continue
            if responses:  # the responses to parallel calls share one turn
                tokens += self._turn("user", "\n".join(responses))
                responses = []
            role = "system" if message["role"] in _SYSTEM else message["role"]
            tokens += self._turn(role, _content(message))
        if responses:
            tokens += self._turn("user", "\n".join(responses))
        return tokens

    def _turn(self, role: str, content: str) -> list[int]:
        return [self._start, *self._tokenizer.encode(f"{role}\n{content}"), self._end, *self._newline]


_SYSTEM = ("system", "developer")


def stop_tokens(tokenizer: Tokenizer, *more: int) -> tuple[int, ...]:
    """Return the ids at which generation ends, according to the model's files."""
    stops = set(more)
    for config in (tokenizer.generation_config, tokenizer.model_config):
        found = config.get("eos_token_id")
        stops.update(found if isinstance(found, list) else [found] if isinstance(found, int) else [])
    name = tokenizer.config.get("eos_token")
    named = tokenizer.token_id(name["content"] if isinstance(name, dict) else name) if name else None
    return tuple(sorted(stops if named is None else stops | {named}))


def _content(message: ChatMessage) -> str:
    content: str = message.get("content") or ""
    calls = message.get("tool_calls") or ()
    blocks = [
        f'<tool_call>\n{{"name": {json.dumps(call["function"]["name"])}, '
        f'"arguments": {call["function"]["arguments"] or "{}"}}}\n</tool_call>'
        for call in calls
    ]
    return "\n".join([content, *blocks] if content else blocks) if blocks else content


def _tools_text(tools: Sequence[Mapping[str, Any]]) -> str:
    lines = "".join("\n" + json.dumps(tool, ensure_ascii=False) for tool in tools)
    return TOOLS_HEAD + lines + TOOLS_TAIL
