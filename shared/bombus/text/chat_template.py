"""Runs a model's own chat template."""

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Self

import jinja2
from jinja2 import nodes
from jinja2.filters import do_striptags
from jinja2.meta import find_undeclared_variables

from bombus.config.template_variables import GIVEN
from bombus.errors import EngineFault
from bombus.text.sandbox import Steps, environment

SWITCHES_MAX = 8
STEPS_MAX = 200_000  # limit for rendering an empty conversation: about 50 ms of work
STEPS_OF_PAIR = 4  # added for each pair of messages or tools: a template may look at all messages for each one
STEPS_OF_CHARACTER = 1 / 8  # added for each character in the messages: a template may read it several times
_REASONING = ("reasoning_content", "thinking", "reasoning")
_SWITCHES = ("think", "reason", "enable")


class TemplateRefused(ValueError):
    """Raised if a template cannot render a conversation, because it rejects the conversation or fails on it."""


class ChatTemplate:
    """A compiled chat template.

    `variables` are passed to each rendering: special tokens by name, and the job's variables. `source_with_tools` is a
    separate template that some models have for conversations with tools.
    """

    def __init__(self, source: str, variables: Mapping[str, Any], source_with_tools: str = "") -> None:
        """Compile the template. Raises `EngineFault` if that fails."""
        self.variables = dict(variables)
        self._sources = [source, source_with_tools] if source_with_tools else [source]
        try:
            compiled = [environment().from_string(each) for each in self._sources]
        except Exception as error:  # jinja2 lets errors of Python's own compiler through
            raise EngineFault(f"the model's chat template cannot be compiled: {error}") from error
        self._template, self._template_with_tools = compiled[0], compiled[-1]
        self._globals = dict(environment().globals)
        for template in compiled:
            template.globals = self._globals  # jinja2's own mapping would be iterated over at each rendering

    def given(self, variables: Mapping[str, Any]) -> Self:
        """Return a copy of this template with these variables added or replaced."""
        made = copy.copy(self)
        made.variables = {**self.variables, **variables}
        return made

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
    ) -> str:
        """Return the text of a conversation, with special tokens written by name. Raises `TemplateRefused`."""
        template = self._template_with_tools if tools else self._template
        try:
            with Steps(_steps_max(messages, tools)):
                given = {
                    **self._globals,
                    **self.variables,
                    "messages": [_for_template(message) for message in messages],
                    "tools": list(tools) or None,
                    "documents": None,
                    "add_generation_prompt": add_generation_prompt,
                }
                context = template.new_context(given, shared=True)  # shared, so that it need not be copied
                return environment().concat(template.root_render_func(context))
        except jinja2.TemplateError as error:
            raise TemplateRefused(str(error.message or type(error).__name__)) from error
        except Exception as error:  # a template is a program: it can fail in any way that a program can
            raise TemplateRefused(f"{type(error).__name__}: {error}") from error

    def switches(self) -> list[str]:
        """Return the variables that the template looks up and whose names suggest that they turn reasoning on.

        At most `SWITCHES_MAX` are returned, because a gateway renders with each of them.
        """
        return sorted(name for name in self.looked_up() if any(part in name for part in _SWITCHES))[:SWITCHES_MAX]

    def looked_up(self) -> set[str]:
        """Return the variables that the template looks up, except those given at every rendering. The template may set
        some of them itself."""
        trees = (environment().parse(source) for source in self._sources)
        return set().union(*map(find_undeclared_variables, trees)) - GIVEN - environment().globals.keys()

    def remakers(self) -> list[Callable[[str], str]]:
        """Return functions that change a text in the same ways as the template may. Trimming, cutting and changing case
        are not included.

        The functions replace texts that the template names, remove separators at which the template splits (since it
        may join the parts), or strip tags.
        """
        trees = [environment().parse(source) for source in self._sources]
        calls = [call for tree in trees for call in tree.find_all(nodes.Call)]
        filters = [filter for tree in trees for filter in tree.find_all(nodes.Filter)]
        given = [call.args for call in calls if getattr(call.node, "attr", "") in ("replace", "split", "rsplit")]
        given += [filter.args for filter in filters if filter.name == "replace"]
        found = dict.fromkeys((_constant(args[:1]), _constant(args[1:2])) for args in given)
        made: list[Callable[[str], str]] = [partial(_replaced, old=old, new=new) for old, new in found if old]
        return [*made, do_striptags] if any(filter.name == "striptags" for filter in filters) else made

    def looked_for(self) -> list[str]:
        """Return the texts that the template searches for or compares with, except for words and single characters."""
        trees = [environment().parse(source) for source in self._sources]
        places = [place for tree in trees for place in tree.find_all((nodes.Compare, nodes.Call, nodes.Filter))]
        constants = [node.value for place in places for node in place.find_all(nodes.Const)]
        texts = {value.strip() for value in constants if isinstance(value, str)}
        return sorted(text for text in texts if len(text) > 1 and not text.isalpha())

    def literals(self) -> str:
        """Return the texts that the template itself can write, joined by NUL characters."""
        trees = [environment().parse(source) for source in self._sources]
        texts = [node.data for tree in trees for node in tree.find_all(nodes.TemplateData)]
        return "\0".join([*texts, *self.words()])

    def words(self) -> list[str]:
        """Return the string constants in the template's expressions."""
        trees = [environment().parse(source) for source in self._sources]
        constants = [node.value for tree in trees for node in tree.find_all(nodes.Const)]
        return [constant for constant in constants if isinstance(constant, str)]


def _steps_max(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> int:
    characters = sum(len(message.get("content") or ()) for message in messages)
    pairs = (len(messages) + len(tools)) ** 2
    return STEPS_MAX + STEPS_OF_PAIR * pairs + int(STEPS_OF_CHARACTER * characters)


def _constant(args: Sequence[nodes.Node]) -> str:
    """Return the first of these arguments if it is a string constant, otherwise an empty string."""
    return str(args[0].value) if args and isinstance(args[0], nodes.Const) and isinstance(args[0].value, str) else ""


def _replaced(text: str, old: str, new: str) -> str:
    return text.replace(old, new)


def _for_template(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message without null values, and with its reasoning under each name that templates read."""
    message = {key: value for key, value in message.items() if value is not None}
    reasoning = next((message[key] for key in _REASONING if key in message), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}
