"""What a chat template makes of messages as text, by transformers, and which parts of them it loses."""

import copy
import json
import re
from collections.abc import Iterator, Sequence
from datetime import datetime
from functools import cache
from typing import Any, NamedTuple, Self

from bombus_gateway.text.forms import common_start
from bombus_gateway.text.message import ChatMessage
from tests.templates.conversations import (
    PARIS,
    TOOLS,
    Conversation,
    assistant,
    call,
    developer,
    result,
    system,
    user,
)
from tests.templates.forms import Form

AT = datetime(2026, 1, 2, 3, 4, 5)  # when all is rendered that is not asked for at another time
CLOCK = "strftime_now"  # what templates that write the date or the time call
HARMLESS = "harmlessword"
OTHER = "quite another text 7421"
WORD = "probing7421"


def dated(template: str, now: datetime) -> str:
    """Return a template with this time for the present. transformers lets nobody give a function to a template."""
    formats = {form for _, form in re.findall(CLOCK + r"\((['\"])(.*?)\1\)", template)}
    if not formats:
        return template
    times = json.dumps({form: now.strftime(form) for form in formats})
    return f"{{% macro {CLOCK}(form) %}}{{{{ {times}[form] }}}}{{% endmacro %}}{{{{ '' }}}}{template}"


class Refusal(NamedTuple):
    """A refusal; `lost` where the template would have lost a part without a word."""

    why: str
    lost: bool


class Case(NamedTuple):
    """A conversation with its names filled in, and what its text alone says about the expectation."""

    conversation: Conversation
    harmless: Conversation | None  # the same with harmless words, where it has names that are only text to the template
    names: bool
    refusal: Refusal | None
    or_refused: bool


class TemplateText:
    """Renders conversations as text with transformers, and finds the form in which the template takes messages."""

    def __init__(self, template: str, bos: str, eos: str) -> None:
        from tokenizers import AddedToken, Tokenizer, models
        from transformers import PreTrainedTokenizerFast

        empty = Tokenizer(models.BPE())
        empty.add_special_tokens([AddedToken(name, special=True) for name in (bos, eos)])
        self._theirs = PreTrainedTokenizerFast(tokenizer_object=empty, bos_token=bos, eos_token=eos)
        self._source = template
        self.template = dated(template, AT)
        self.form = self._find_form()

    def at(self, now: datetime) -> Self:
        """Return the same at another time: some templates write it."""
        made = copy.copy(self)
        made.template = dated(self._source, now)
        return made

    def text(self, messages: Sequence[ChatMessage], tools: Sequence[dict[str, Any]]) -> str:
        """Render a conversation. Raises what the template raises."""
        return self._text(self.form, messages, tools)

    def text_or_none(
        self, messages: Sequence[ChatMessage], tools: Sequence[dict[str, Any]], generate: bool = True
    ) -> str | None:
        """Render a conversation, with a prompt for the assistant at its end if `generate`. None where that raises."""
        return self._text_or_none(self.form, messages, tools, generate)

    def samples(self) -> str:
        """Return what the template writes for a few conversations, with NUL between them."""
        turns = [[system("Hi."), user("Hi."), assistant("Hi."), user("Hi.")], *map(_called, ("", None))]
        texts = (self.text_or_none(messages, tools) for messages in turns for tools in (TOOLS, []))
        return "\0".join(text for text in texts if text is not None)

    def after_answer(self) -> str:
        """Return what the template writes after an answer, whether or not a turn of the user follows."""
        turns = [user("Hi."), assistant(WORD)]
        alone, continued = self.text_or_none(turns, [], generate=False), self.text_or_none([*turns, user("Hi.")], [])
        return common_start(*((text or "").rpartition(WORD)[2] for text in (alone, continued)))

    def cases(self, conversation: Conversation, names: Sequence[str]) -> list[Case]:
        """Return the conversation with names filled in: those that the template looks for in a case of their own."""
        if not conversation.has_names:
            return [self._case(conversation, None, False)]
        harmless = conversation.with_names(HARMLESS)
        worded = self.text_or_none(harmless.messages, harmless.tools)
        sought = [name for name in names if self._looks_for(conversation, name, worded)]
        free = [name for name in names if name not in sought]
        together = " ".join(free)
        only_text = not self._looks_for(conversation, together, worded)
        cases = [self._case(conversation.with_names(together), harmless if only_text else None, True)] if free else []
        if sought:
            title = f"{conversation.name} that the template looks for"
            cases.append(self._case(conversation.with_names(" ".join(sought))._replace(name=title), None, True))
        return cases

    def _case(self, filled: Conversation, harmless: Conversation | None, names: bool) -> Case:
        try:
            text = self.text(filled.messages, filled.tools)
        except Exception as error:  # templates raise whatever Python raises: all of it is their refusal
            return Case(filled, harmless, names, Refusal(f"{type(error).__name__}: {error}", lost=False), False)
        lost = next(self._lost_parts(filled, text), None)
        refusal = Refusal(f"the template ignores {lost}", lost=True) if lost else None
        return Case(filled, harmless, names, refusal, self._may_be_refused(filled, text))

    def _may_be_refused(self, filled: Conversation, text: str) -> bool:
        """Whether a developer's message has to be a system's, or the text of an assistant's turn is lost."""
        if self.form.developer_as_system and any(message["role"] == "developer" for message in filled.messages):
            return True
        return any(self.text_or_none(changed, filled.tools) == text for changed in _other_texts(filled.messages))

    def _looks_for(self, conversation: Conversation, names: str, worded: str | None) -> bool:
        """Whether the rendering with `names` is not that with harmless words, but for the words."""
        named = conversation.with_names(names)
        text = self.text_or_none(named.messages, named.tools)
        return text != (None if worded is None else worded.replace(HARMLESS, names))

    def _lost_parts(self, filled: Conversation, text: str) -> Iterator[str]:
        if filled.tools and self.text_or_none(filled.messages, _other_tools(filled.tools)) == text:
            yield "tools"
        for index, message in enumerate(filled.messages):
            if message["role"] == "assistant" or not (message["content"] or "").strip():
                continue
            other = _with(filled.messages, index, {**message, "content": OTHER})
            if self.text_or_none(other, filled.tools) == text:
                yield f"the {message['role']} message {index}"
        for index, other in _other_calls(filled.messages):
            if self.text_or_none(other, filled.tools) == text:
                yield f"a call of message {index}"

    # ---- how it wants its messages ----

    def _find_form(self) -> Form:
        """Find the first form in which the template shows a word, as text and as an argument of a call."""
        parts = not self._shows(Form(), [user(WORD)]) and self._shows(Form(parts=True), [user(WORD)])
        form = Form(parts=parts)
        text_arguments = form._replace(text_arguments=True)
        if not self._shows_call(form) and self._shows_call(text_arguments):
            form = text_arguments
        if self._needs_content(form):
            form = form._replace(fill_content=True)
        if not self._shows(form, [developer(WORD), user("hi")]) and self._shows(form, [system(WORD), user("hi")]):
            form = form._replace(developer_as_system=True)
        return form

    def _shows_call(self, form: Form) -> bool:
        texts = (self._text_or_none(form, _called(content), []) or "" for content in ("", None))
        return any(PARIS["city"] in text and repr(PARIS) not in text for text in texts)

    def _needs_content(self, form: Form) -> bool:
        """Whether a call is shown beside an empty content, and not without any."""
        without, empty = (self._text_or_none(form, _called(content), []) or "" for content in (None, ""))
        return PARIS["city"] in empty and PARIS["city"] not in without

    def _shows(self, form: Form, messages: Sequence[ChatMessage]) -> bool:
        return WORD in (self._text_or_none(form, messages, []) or "")

    def _text(
        self,
        form: Form,
        messages: Sequence[ChatMessage],
        tools: Sequence[dict[str, Any]],
        generate: bool = True,
    ) -> str:
        return str(
            self._theirs.apply_chat_template(
                form.apply(messages),
                tools=list(tools) or None,
                tokenize=False,
                add_generation_prompt=generate,
                chat_template=self.template,
            )
        )

    def _text_or_none(
        self,
        form: Form,
        messages: Sequence[ChatMessage],
        tools: Sequence[dict[str, Any]],
        generate: bool = True,
    ) -> str | None:
        try:
            return self._text(form, messages, tools, generate)
        except Exception:  # templates raise whatever Python raises
            return None


@cache
def template_text(template: str, bos: str, eos: str) -> TemplateText:
    return TemplateText(template, bos, eos)


def _called(content: str | None) -> list[ChatMessage]:
    return [user("hi"), assistant(content, call(1, "weather", PARIS)), result(1, "sunny")]


def _with(messages: Sequence[ChatMessage], index: int, message: ChatMessage) -> list[ChatMessage]:
    return [*messages[:index], message, *messages[index + 1 :]]


def _other_tools(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    others = copy.deepcopy(tools)
    for tool in others:
        tool["function"] |= {"name": "another", "description": OTHER}
    return others


def _other_texts(messages: Sequence[ChatMessage]) -> Iterator[list[ChatMessage]]:
    """Yield the messages with another text in each of the assistant's turns."""
    for index, message in enumerate(messages):
        if message["role"] == "assistant" and (message["content"] or "").strip():
            yield _with(messages, index, {**message, "content": OTHER})


def _other_calls(messages: Sequence[ChatMessage]) -> Iterator[tuple[int, list[ChatMessage]]]:
    """Yield the messages with each call another, and the number of the message that has it."""
    for index, message in enumerate(messages):
        for number in range(len(message.get("tool_calls", ()))):
            other = copy.deepcopy(message)
            other["tool_calls"][number]["function"] |= {"name": "another", "arguments": json.dumps({"a": OTHER})}
            yield index, _with(messages, index, other)
