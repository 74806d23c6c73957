"""Reads the items of a request's `input` into messages. Pure.

One answer from the model comes back as several items, such as reasoning, text and calls. Consecutive items from the
model form one message, unless their ids refer to different calls.
"""

import copy
import re
from typing import Any, Self

import msgspec

from bombus.errors import Code
from bombus_gateway import limits
from bombus_gateway.call.request import Unsupported
from bombus_gateway.decoding.json_body import BadParameter, arguments_of_text, checked_arguments
from bombus_gateway.decoding.parameters import Name
from bombus_gateway.responses.tools import name_for_model
from bombus_gateway.text.message import ChatMessage

_ROLES = {"user": "user", "system": "developer", "developer": "developer", "assistant": "assistant"}
_OUTPUTS = ("function_call_output", "custom_tool_call_output")
_CALLS = ("function_call", "custom_tool_call")
_ours = re.compile(r"[a-z]+_([0-9a-f]{32})_[0-9]+|bombus:([0-9a-f]{32})")  # the ids and encrypted contents that we make


class InputItem(msgspec.Struct):
    """An item of any type. An item with a role and no type is a message. Fields of unknown types are ignored."""

    type: str | None = None
    role: str | None = None
    content: Any = None
    id: Any = None
    call_id: Name | None = None
    name: Name | None = None
    namespace: Name | None = None
    arguments: Any = None
    input: Any = None
    output: Any = None
    summary: Any = None
    encrypted_content: Any = None
    tools: list[dict[str, Any]] | None = None


class _Answer:
    """A message from the model, made from one or more items. `call` is the call that the items' ids refer to, if
    any."""

    def __init__(self) -> None:
        self.call = ""
        self.texts: list[str] = []
        self.reasoning: list[str] = []
        self.calls: list[dict[str, Any]] = []

    def forked(self) -> Self:
        made = copy.copy(self)
        made.texts, made.reasoning, made.calls = [*self.texts], [*self.reasoning], [*self.calls]
        return made

    def message(self) -> ChatMessage:
        """Return the message. Its content is null if it has only calls."""
        text, reasoning = "".join(self.texts), "".join(self.reasoning)
        message: ChatMessage = {"role": "assistant", "content": text or None if self.calls else text}
        if reasoning:
            message["reasoning_content"] = reasoning
        if self.calls:
            message["tool_calls"] = self.calls
        if self.call:
            message["answer_of"] = self.call, 0
        return message


class InputReader:
    """Collects messages from items. `tools` are the tools found in items, each with its place in the body.

    `answers` maps places in `messages` to the calls whose answers belong there, according to the items that refer to
    them.
    """

    def __init__(self) -> None:
        self.messages: list[ChatMessage] = []
        self.answers: dict[int, str] = {}
        self.tools: list[tuple[str, dict[str, Any]]] = []
        self.unsupported: list[Unsupported] = []
        self._answer: _Answer | None = None  # the model's message being built, which follows all `messages`
        self._referred = ""  # the call last referred to, until an item other than a tool's output follows

    def forked(self) -> Self:
        """Return a reader that continues from here, leaving this one unchanged."""
        made = copy.copy(self)
        made.messages, made.answers = [*self.messages], {**self.answers}
        made.tools, made.unsupported = [*self.tools], [*self.unsupported]
        made._answer = self._answer.forked() if self._answer is not None else None
        return made

    def read(self, item: InputItem, place: str) -> None:
        """Add an item to the messages. Raises `BadParameter`."""
        kind = item.type or ("message" if item.role else "item_reference" if item.id else "")
        if kind == "message":
            self._read_message(item, place)
        elif kind in _CALLS:
            self._read_call(item, place)
        elif kind in _OUTPUTS:
            output = {"role": "tool", "content": self._output(item.output, f"{place}.output")}
            self._add({**output, "tool_call_id": _required(item.call_id, f"{place}.call_id")})
        elif kind == "reasoning":
            answer = self._answer_of(item)
            texts = item.summary or (item.content if isinstance(item.content, list) else None)
            answer.reasoning.append(self._text(texts, f"{place}.summary"))
        elif kind == "additional_tools":
            self.tools += [(f"{place}.tools.{at}", tool) for at, tool in enumerate(item.tools or ())]
        elif kind == "item_reference":
            self._read_reference(item, place)
        else:
            why = f"items of type {kind[:40]!r} are not known here"
            self.unsupported.append(Unsupported(place, why, is_content=True))

    def _read_message(self, item: InputItem, place: str) -> None:
        role = _ROLES.get(item.role or "")
        if role is None:
            names = ", ".join(_ROLES)
            raise BadParameter(Code.MALFORMED, f"{place}.role", f"The role of a message must be one of {names}.")
        text = self._text(item.content, f"{place}.content")
        if role == "assistant":
            self._answer_of(item).texts.append(text)
        else:
            self._add({"role": role, "content": text})

    def _read_call(self, item: InputItem, place: str) -> None:
        if item.type == "custom_tool_call":
            arguments = arguments_of_text(_text_of(item.input, f"{place}.input"))
        else:
            given = _text_of("" if item.arguments is None else item.arguments, f"{place}.arguments")
            arguments = checked_arguments(given, f"{place}.arguments")
        name = name_for_model(_required(item.name, f"{place}.name"), item.namespace)
        calls = self._answer_of(item).calls
        if len(calls) >= limits.CALLS_IN_MESSAGE:
            why = f"One answer may have at most {limits.CALLS_IN_MESSAGE} calls."
            raise BadParameter(Code.MALFORMED, place, why)
        function = {"name": name, "arguments": arguments}
        calls.append({"id": _required(item.call_id, f"{place}.call_id"), "type": "function", "function": function})

    def _read_reference(self, item: InputItem, place: str) -> None:
        """Put a call's whole answer in the place where an item refers to part of that answer.

        No client sends back one item of an answer without the others.
        """
        call = _call_of(item)
        if not call:
            why = "Only items of this hive's answers can be referenced: send the item itself, or previous_response_id."
            raise BadParameter(Code.UNSUPPORTED, place, why)
        if call != self._referred:
            self._answer_of(item)
            self.answers[len(self.messages)] = self._referred = call

    def _answer_of(self, item: InputItem) -> _Answer:
        """Return the model's message that an item belongs to."""
        call = _call_of(item)
        if self._answer is None or (call and self._answer.call and call != self._answer.call):
            self.end_answer()
            self._answer, self._referred = _Answer(), ""
        self._answer.call = call or self._answer.call
        return self._answer

    def end_answer(self) -> None:
        """End the model's message that is being built."""
        if self._answer is not None:
            self.messages.append(self._answer.message())
        self._answer = None

    def _add(self, message: ChatMessage) -> None:
        """End the model's message, and add a message that is not from the model."""
        self.end_answer()
        if message["role"] != "tool":
            self._referred = ""
        self.messages.append(message)

    def _output(self, output: Any, place: str) -> str:
        """Return the output of a tool, given as a text or as content parts."""
        return self._text(output, place) if isinstance(output, list) else _text_of(output, place)

    def _text(self, content: Any, place: str) -> str:
        """Return the text of some content. Parts that are not text are recorded as unsupported."""
        if content is None:
            return ""
        if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
            return _text_of(content, place)
        texts: list[str] = []
        for index, part in enumerate(content):
            kind = str(part.get("type"))
            text = part.get("refusal" if kind == "refusal" else "text")
            if isinstance(text, str):
                texts.append(text)
            elif kind.endswith("text"):
                raise BadParameter(Code.MALFORMED, f"{place}.{index}", "A text part needs text.")
            else:
                why = f"a content part of type {kind[:40]!r} is not text"
                self.unsupported.append(Unsupported(f"{place}.{index}", why, is_content=True))
        return "".join(texts)


def _call_of(item: InputItem) -> str:
    """Return the id of the call whose answer contained an item, as found in the item's id or encrypted content.

    Return "" for an item that this hive did not make.
    """
    texts = (text for text in (item.id, item.encrypted_content) if isinstance(text, str))
    named = next((found for text in texts if (found := _ours.fullmatch(text))), None)
    return (named.group(1) or named.group(2)) if named else ""


def _required(text: str | None, place: str) -> str:
    if not text:
        raise BadParameter(Code.MALFORMED, place, f"{place} is missing.")
    return text


def _text_of(value: Any, place: str) -> str:
    if not isinstance(value, str):
        raise BadParameter(Code.MALFORMED, place, f"{place} must be a string.")
    return value
