"""Refuses a conversation if the chat template silently drops part of it."""

import copy
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Self, TypeVar

from bombus.errors import Code, Refused
from bombus.text.chat_template import TemplateRefused
from bombus_gateway.text.forms import TOOL, WORD, call_of, user
from bombus_gateway.text.message import ChatMessage
from bombus_gateway.text.reading.finding import RenderText
from bombus_gateway.text.words import free_word, strings

SURE_CHARACTERS = 8  # shorter text may occur by chance: in a number, or across the boundary between two texts
SEARCHES_MAX = 16  # with more contents than this, none of them is searched for in the rendering
LOOKS_MAX = 32  # the most messages that are checked individually, with one rendering each

_Tools = Sequence[Mapping[str, Any]]
_Key = TypeVar("_Key")

_OTHER = "wasp"
_PAIR = call_of([WORD, _OTHER])
_RESULTS: list[ChatMessage] = [{"role": "tool", "tool_call_id": f"call_{n}", "content": "rose"} for n in (0, 1)]
_LATER: list[ChatMessage] = [{"role": "assistant", "content": "found"}, user("again")]
# Turns with calls, used to find out whether a template renders every call.
_CALLS: list[list[ChatMessage]] = [
    [user("look"), {**called, "content": content}, *following]
    for called, results in ((call_of([WORD]), _RESULTS[:1]), (_PAIR, _RESULTS))
    for content in (None, "", "see")
    for following in (results, [*results, *_LATER], [user("again")])
]


class NotRendered(Refused):
    """Raised for a conversation that the model's chat template refuses, or part of which it would drop."""

    def __init__(self, why: str) -> None:
        super().__init__(Code.MALFORMED, why)


class LossCheck:
    """Finds the parts of a conversation that a chat template drops."""

    def __init__(self, render: RenderText, written: str) -> None:
        """Initialize with `written`: all text that the template itself can write."""
        self._render = render
        self._written = written
        shown = self._rendered([user("look")], [TOOL])
        self._shows_tools = shown is not None and TOOL["function"]["name"] in shown
        self.shows_calls = all(map(self._shows_words, _CALLS))

    def _shows_words(self, messages: Sequence[ChatMessage]) -> bool:
        """Return whether the rendering contains the arguments of all calls, or true if the template refuses the
        messages."""
        rendered = self._rendered(messages, [TOOL])
        words = (WORD, _OTHER)[: len(messages[1]["tool_calls"])]
        return rendered is None or all(word in rendered for word in words)

    def given(self, render: RenderText, values: Iterable[str]) -> Self:
        """Return a check for the same template with other variables.

        With these, the template may write `values`, and may no longer show tools.
        """
        made = copy.copy(self)
        made._render = render
        made._written = "\0".join([self._written, *values])
        made._shows_tools = False  # checked for each conversation instead
        return made

    def refuse_losses(self, messages: Sequence[ChatMessage], tools: _Tools, text: str, since: int = 0) -> None:
        """Raise `NotRendered` if the rendering `text` lacks part of the conversation, starting with message `since`."""
        if since == 0 and tools and self._loses_tools(messages, tools, text):
            raise NotRendered(
                "The model's chat template has no place for tools: set model.tools to hermes in the job, so that "
                "they are described in the system message, or send no tools.",
            )
        content = self._lost_content(messages, tools, text, since)
        call = self._lost_call(messages, tools, text, since)
        if call is not None and (content is None or call < content):
            raise NotRendered(_LOST_CALL.format(call))
        if content is not None:
            role = messages[content]["role"]
            raise NotRendered(_LOST.format(content, role, _cure(role)))

    def _loses_tools(self, messages: Sequence[ChatMessage], tools: _Tools, text: str) -> bool:
        """Return whether the template ignores the tools.

        A tool's name in the text is not enough evidence that the template shows the tool, since calls contain names
        too.
        """
        if not all(tool["function"]["name"] in text for tool in tools):
            return True
        if self._shows_tools:
            return False
        word = free_word(strings([messages, tools]))
        others = [{**tool, "function": {**tool["function"], "name": word}} for tool in tools]
        return self._rendered(messages, others) == text

    def _lost_content(self, messages: Sequence[ChatMessage], tools: _Tools, text: str, since: int) -> int | None:
        """Return the index of the first message, not counting the assistant's, whose content does not affect the
        rendering.

        If there are only a few contents, each is first searched for in the text. A content that occurs there as often
        as in the conversation is not lost, unless the template itself writes the same words. To check the rest, a
        unique word is added to each, and the first messages whose word is missing from the rendering are then checked
        one by one.
        """
        everything = [*strings([messages, tools])]
        suspects = [
            i for i, each in enumerate(messages) if i >= since and each["role"] != "assistant" and _content(each)
        ]
        if len(suspects) <= SEARCHES_MAX:
            suspects = [index for index in suspects if not self._is_sure(_content(messages[index]), text, everything)]
        if not suspects:
            return None
        return self._first_lost(suspects, partial(_with_words, messages), tools, text, free_word(everything))

    def _is_sure(self, content: str, text: str, everything: Sequence[str]) -> bool:
        """Return whether `content` occurs in the text, as it is or as JSON, at least as often as in the whole
        conversation."""
        if len(content) < SURE_CHARACTERS or content in self._written:
            return False
        wanted = sum(part.count(content) for part in everything)
        return text.count(content) >= wanted or text.count(json.dumps(content, ensure_ascii=False)[1:-1]) >= wanted

    def _lost_call(self, messages: Sequence[ChatMessage], tools: _Tools, text: str, since: int) -> int | None:
        """Return the index of the first message with a call that does not affect the rendering.

        If the template is known to render calls in every kind of turn, only the function names are searched for.
        """
        unnamed = _unnamed_call(messages, text, since)
        if unnamed is not None or self.shows_calls:
            return unnamed
        suspects = [
            (index, number)
            for index, message in enumerate(messages[since:], since)
            for number in range(len(message.get("tool_calls") or ()))
        ]
        if not suspects:
            return None
        word = free_word(strings([messages, tools]))
        found = self._first_lost(suspects, partial(_with_call_words, messages), tools, text, word)
        return None if found is None else found[0]

    def _first_lost(
        self,
        suspects: Sequence[_Key],
        marked: Callable[[Mapping[_Key, str]], Sequence[ChatMessage]],
        tools: _Tools,
        text: str,
        word: str,
    ) -> _Key | None:
        """Return the first suspect that does not affect the rendering. `marked` adds words to the suspect messages."""
        words = {suspect: f"{word}{number}q" for number, suspect in enumerate(suspects)}
        whole = self._rendered(marked(words), tools) or ""
        shown = {f"{word}{rest.partition('q')[0]}q" for rest in whole.split(word)[1:]}
        missing = [suspect for suspect in suspects if words[suspect] not in shown][:LOOKS_MAX]
        alone = (self._rendered(marked({suspect: words[suspect]}), tools) for suspect in missing)
        return next((suspect for suspect, changed in zip(missing, alone) if changed == text), None)

    def _rendered(self, messages: Sequence[ChatMessage], tools: _Tools) -> str | None:
        try:
            return self._render(messages, tools, True)
        except TemplateRefused:
            return None


_LOST_CALL = (
    "messages.{}: the model's chat template silently drops a call of this assistant message: set "
    "model.tools to hermes in the job, or send each call in its own message, without text."
)
_LOST = "messages.{}: the model's chat template silently drops messages of role {}: {}."


def _cure(role: str) -> str:
    if role == "tool":
        return "set model.tools to hermes in the job, or send the result as a user's message"
    if role == "user":
        return "give the job a model.chat_template that renders it"
    return "put the text into the first user's message, or give the job a model.chat_template that renders it"


def _unnamed_call(messages: Sequence[ChatMessage], text: str, since: int) -> int | None:
    """Return the index of the first message that calls a function whose name is not in the text.

    The search for each name starts where the previous name was found, so the text is usually read only once.
    """
    place = 0
    for index, message in enumerate(messages[since:], since):
        for call in message.get("tool_calls") or ():
            name = call["function"]["name"]
            found = text.find(name, place)
            if found < 0 and name not in text:
                return index
            place = max(place, found)
    return None


def _content(message: ChatMessage) -> str:
    return (message.get("content") or "").strip()


def _with_words(messages: Sequence[ChatMessage], words: Mapping[int, str]) -> list[ChatMessage]:
    return [
        {**message, "content": f"{_content(message)} {words[index]}"} if index in words else message
        for index, message in enumerate(messages)
    ]


def _with_call_words(messages: Sequence[ChatMessage], words: Mapping[tuple[int, int], str]) -> list[ChatMessage]:
    made = list(messages)
    for (index, number), word in words.items():
        calls = [*made[index]["tool_calls"]]
        calls[number] = {
            **calls[number],
            "function": {**calls[number]["function"], "arguments": json.dumps({"a": word})},
        }
        made[index] = {**made[index], "tool_calls": calls}
    return made
