"""Runs a model's own chat template, with the filters and globals that transformers gives it, in jinja2's sandbox."""

import copy
import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any, Self

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from bombus.config.template_variables import GIVEN
from bombus.errors import EngineFault

_REASONING = ("reasoning_content", "thinking", "reasoning")


class TemplateRefused(ValueError):
    """Raised when a template cannot render a conversation: it says so itself, or fails at it."""


class _Generation(Extension):
    """Renders what stands in `{% generation %}`, a block that marks what the model writes, for training on text."""

    tags = {"generation"}  # noqa: RUF012  the base class has a set

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """A compiled chat template. `variables` are there in each rendering: the names of special tokens, and the job's."""

    def __init__(self, source: str, variables: Mapping[str, Any]) -> None:
        """Raises `EngineFault` when the source is not a template."""
        self.source = source
        self.variables = dict(variables)
        try:
            self._template = _environment().from_string(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise EngineFault(f"the model's chat template cannot be compiled: {error}") from error

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
        try:
            return self._template.render(
                {
                    **self.variables,
                    "messages": [_for_template(message) for message in messages],
                    "tools": list(tools) or None,
                    "documents": None,
                    "add_generation_prompt": add_generation_prompt,
                }
            )
        except jinja2.TemplateError as error:
            raise TemplateRefused(str(error.message or type(error).__name__)) from error
        except Exception as error:  # a template is a program: it can fail in any way that a program can
            raise TemplateRefused(f"{type(error).__name__}: {error}") from error

    def switches(self) -> list[str]:
        """Return the variables that the template looks up and that a request might give: nothing else gives them."""
        looked_up = find_undeclared_variables(_environment().parse(self.source))
        return sorted(looked_up - GIVEN - _environment().globals.keys())

    def literals(self) -> str:
        """Return the texts that the template itself can write, with NUL between them."""
        tree = _environment().parse(self.source)
        texts = [node.data for node in tree.find_all(nodes.TemplateData)]
        constants = [node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)]
        return "\0".join([*texts, *constants])


def _for_template(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message without keys that are null, and with its reasoning under each name that templates read."""
    message = {key: value for key, value in message.items() if value is not None}
    reasoning = next((message[key] for key in _REASONING if key in message), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _environment() -> ImmutableSandboxedEnvironment:
    made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    made.filters["tojson"] = _to_json
    made.globals["raise_exception"] = _raise_exception
    made.globals["strftime_now"] = _strftime_now
    return made


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Replace jinja2's filter, which escapes characters of HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)
