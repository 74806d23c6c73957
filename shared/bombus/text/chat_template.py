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
STEPS_MAX = 200_000  # of a rendering of nothing, which is some 50 ms
STEPS_OF_PAIR = 4  # more for each pair of messages or tools, as a template may look at all messages for each of them
STEPS_OF_CHARACTER = 1 / 8  # more for each character of the messages, as it may read a text several times
_REASONING = ("reasoning_content", "thinking", "reasoning")
_SWITCHES = ("think", "reason", "enable")


class TemplateRefused(ValueError):
    """Raised when a template cannot render a conversation: it says so itself, or fails at it."""


class ChatTemplate:
    """A compiled chat template.

    `variables` are there in each rendering: the names of special tokens, and the job's. Some models have a template of
    its own for conversations with tools: `source_with_tools`.
    """

    def __init__(self, source: str, variables: Mapping[str, Any], source_with_tools: str = "") -> None:
        """Raises `EngineFault` when a source is not a template."""
        self.variables = dict(variables)
        self._sources = [source, source_with_tools] if source_with_tools else [source]
        try:
            compiled = [environment().from_string(each) for each in self._sources]
        except Exception as error:  # jinja2 lets errors of Python's own compiler through
            raise EngineFault(f"the model's chat template cannot be compiled: {error}") from error
        self._template, self._template_with_tools = compiled[0], compiled[-1]
        self._globals = dict(environment().globals)
        for template in compiled:
            template.globals = self._globals  # jinja2's own mapping is looked through for each rendering

    def given(self, variables: Mapping[str, Any]) -> Self:
        """Return this template with further variables, or other values of those that it has."""
        made = copy.copy(self)
        made.variables = {**self.variables, **variables}
        return made

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
    ) -> str:
        """Return the text of a conversation, with special tokens by their names. Raises `TemplateRefused`."""
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
                context = template.new_context(given, shared=True)  # not copied once more
                return environment().concat(template.root_render_func(context))
        except jinja2.TemplateError as error:
            raise TemplateRefused(str(error.message or type(error).__name__)) from error
        except Exception as error:  # a template is a program: it can fail in any way that a program can
            raise TemplateRefused(f"{type(error).__name__}: {error}") from error

    def switches(self) -> list[str]:
        """Return the variables that the template looks up and that may turn reasoning on, by their names.

        A gateway renders with each of them, so they are few, whatever a template looks up.
        """
        return sorted(name for name in self.looked_up() if any(part in name for part in _SWITCHES))[:SWITCHES_MAX]

    def looked_up(self) -> set[str]:
        """Return the variables that the template looks up in addition to those that rendering gives; it may set some
        itself."""
        trees = (environment().parse(source) for source in self._sources)
        return set().union(*map(find_undeclared_variables, trees)) - GIVEN - environment().globals.keys()

    def remakers(self) -> list[Callable[[str], str]]:
        """Return what the template may do to a text, other than to trim it, cut it, or change its case.

        These are replacements of texts that it names, and splits at them, of which it may join the parts.
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
        """Return the texts that the template looks for in others, or compares with them: no words, no single signs."""
        trees = [environment().parse(source) for source in self._sources]
        places = [place for tree in trees for place in tree.find_all((nodes.Compare, nodes.Call, nodes.Filter))]
        constants = [node.value for place in places for node in place.find_all(nodes.Const)]
        texts = {value.strip() for value in constants if isinstance(value, str)}
        return sorted(text for text in texts if len(text) > 1 and not text.isalpha())

    def literals(self) -> str:
        """Return the texts that the template itself can write, with NUL between them."""
        trees = [environment().parse(source) for source in self._sources]
        texts = [node.data for tree in trees for node in tree.find_all(nodes.TemplateData)]
        return "\0".join([*texts, *self.words()])

    def words(self) -> list[str]:
        """Return the texts in the template's expressions."""
        trees = [environment().parse(source) for source in self._sources]
        constants = [node.value for tree in trees for node in tree.find_all(nodes.Const)]
        return [constant for constant in constants if isinstance(constant, str)]


def _steps_max(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> int:
    characters = sum(len(message.get("content") or ()) for message in messages)
    pairs = (len(messages) + len(tools)) ** 2
    return STEPS_MAX + STEPS_OF_PAIR * pairs + int(STEPS_OF_CHARACTER * characters)


def _constant(args: Sequence[nodes.Node]) -> str:
    """Return the text that an argument in a template's source is; empty where it is no text, or there is none."""
    return str(args[0].value) if args and isinstance(args[0], nodes.Const) and isinstance(args[0].value, str) else ""


def _replaced(text: str, old: str, new: str) -> str:
    return text.replace(old, new)


def _for_template(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message without keys that are null, and with its reasoning under each name that templates read."""
    message = {key: value for key, value in message.items() if value is not None}
    reasoning = next((message[key] for key in _REASONING if key in message), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}
