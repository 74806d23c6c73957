"""Runs a model's own chat template, with the filters and globals that transformers gives it, in jinja2's sandbox."""

import copy
import datetime
import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial, wraps
from typing import Any, Literal, Self

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import do_format, do_round, do_striptags
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from bombus.config.template_variables import GIVEN
from bombus.errors import EngineFault

SWITCHES_MAX = 8
COUNT_MAX = 100_000  # of characters or places that a template asks for at once
NUMBER_BITS_MAX = 1 << 12
PLACES_MAX = 100
TEXT_MAX = 10_000_000  # characters of a text, or members of a list, that is a repetition
_REASONING = ("reasoning_content", "thinking", "reasoning")
_SWITCHES = ("think", "reason", "enable")
_WIDE_FORMAT = re.compile(r"%[^%A-Za-z]*(?:\d{6}|\*)")


class TemplateRefused(ValueError):
    """Raised when a template cannot render a conversation: it says so itself, or fails at it."""


class _Generation(Extension):
    """Renders what stands in `{% generation %}`, a block that marks what the model writes, for training on text.

    Variables that are set in the block end with it.
    """

    tags = {"generation"}  # noqa: RUF012  the base class has a set

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Macro) -> str:
        return caller()


class _Namespace(Namespace):
    """A namespace whose attributes have no leading underscore, as in transformers."""

    def __init__(*args: Any, **attributes: Any) -> None:
        self, *given = args
        Namespace.__init__(self, *given, **attributes)
        for name in dict(*given, **attributes):
            _check_attribute(name)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_attribute(name)
        super().__setitem__(name, value)


def _check_attribute(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"an attribute of a namespace begins with an underscore: {name}")


class _Sandbox(ImmutableSandboxedEnvironment):
    """Bounds what an expression can make, such as `7 ** 10 ** 8`, which would stop the process for hours.

    Operators that are intercepted are not folded when a template is compiled either.
    """

    intercepted_binops = frozenset({"**", "*", "%"})

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            _check_power(left, right)
        elif operator == "*":
            _check_product(left, right)
        elif isinstance(left, str):
            _check_format(left)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(getattr(__obj, "__self__", None), str):
            _check_counts(args, kwargs)
        return super().call(__context, __obj, *args, **kwargs)


def _check_power(base: Any, exponent: Any) -> None:
    if isinstance(base, int) and isinstance(exponent, int) and base.bit_length() * exponent > NUMBER_BITS_MAX:
        raise SecurityError(f"a power is longer than {NUMBER_BITS_MAX} bits")


def _check_product(left: Any, right: Any) -> None:
    for one, other in ((left, right), (right, left)):
        if not isinstance(other, int):
            continue
        if isinstance(one, str | list | tuple) and len(one) * other > TEXT_MAX:
            raise SecurityError(f"a repetition is longer than {TEXT_MAX}")
        if isinstance(one, int) and one.bit_length() + other.bit_length() > NUMBER_BITS_MAX:
            raise SecurityError(f"a product is longer than {NUMBER_BITS_MAX} bits")


def _check_format(text: str) -> None:
    if _WIDE_FORMAT.search(text):
        raise SecurityError("a format has a width that is too large, or that is not in it")


def _check_counts(args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    if any(isinstance(value, int) and abs(value) > COUNT_MAX for value in (*args, *kwargs.values())):
        raise SecurityError(f"a width or count is over {COUNT_MAX}")


def _counting(filter: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter that refuses numbers with which it would make very long texts, lists or numbers."""

    @wraps(filter)
    def checked(value: Any, *args: Any, **kwargs: Any) -> Any:
        _check_counts(args, kwargs)
        return filter(value, *args, **kwargs)

    return checked


def _format(value: Any, *args: Any, **kwargs: Any) -> str:
    _check_format(str(value))
    return do_format(value, *args, **kwargs)


def _round(value: float, precision: int = 0, method: Literal["common", "ceil", "floor"] = "common") -> float:
    if abs(precision) > PLACES_MAX:
        raise SecurityError(f"a number is rounded to more than {PLACES_MAX} places")
    return do_round(value, precision, method)


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
            compiled = [_environment().from_string(each) for each in self._sources]
        except Exception as error:  # jinja2 lets errors of Python's own compiler through
            raise EngineFault(f"the model's chat template cannot be compiled: {error}") from error
        self._template, self._template_with_tools = compiled[0], compiled[-1]

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
            return template.render(
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
        """Return the variables that the template looks up and that may turn reasoning on, by their names.

        A gateway renders with each of them, so they are few, whatever a template looks up.
        """
        trees = (_environment().parse(source) for source in self._sources)
        looked_up = set().union(*map(find_undeclared_variables, trees))
        free = looked_up - GIVEN - _environment().globals.keys()
        return sorted(name for name in free if any(part in name for part in _SWITCHES))[:SWITCHES_MAX]

    def remakers(self) -> list[Callable[[str], str]]:
        """Return what the template may do to a text, other than to trim it, cut it, or change its case.

        These are replacements of texts that it names, and splits at them, of which it may join the parts.
        """
        trees = [_environment().parse(source) for source in self._sources]
        calls = [call for tree in trees for call in tree.find_all(nodes.Call)]
        filters = [filter for tree in trees for filter in tree.find_all(nodes.Filter)]
        given = [call.args for call in calls if getattr(call.node, "attr", "") in ("replace", "split", "rsplit")]
        given += [filter.args for filter in filters if filter.name == "replace"]
        found = dict.fromkeys((_constant(args[:1]), _constant(args[1:2])) for args in given)
        made: list[Callable[[str], str]] = [partial(_replaced, old=old, new=new) for old, new in found if old]
        return [*made, do_striptags] if any(filter.name == "striptags" for filter in filters) else made

    def looked_for(self) -> list[str]:
        """Return the texts that the template looks for in others, or compares with them: no words, no single signs."""
        trees = [_environment().parse(source) for source in self._sources]
        places = [place for tree in trees for place in tree.find_all((nodes.Compare, nodes.Call, nodes.Filter))]
        constants = [node.value for place in places for node in place.find_all(nodes.Const)]
        texts = {value.strip() for value in constants if isinstance(value, str)}
        return sorted(text for text in texts if len(text) > 1 and not text.isalpha())

    def literals(self) -> str:
        """Return the texts that the template itself can write, with NUL between them."""
        trees = [_environment().parse(source) for source in self._sources]
        texts = [node.data for tree in trees for node in tree.find_all(nodes.TemplateData)]
        constants = [node.value for tree in trees for node in tree.find_all(nodes.Const)]
        return "\0".join([*texts, *(constant for constant in constants if isinstance(constant, str))])


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


@cache
def _environment() -> _Sandbox:
    made = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    for name in ("batch", "center", "indent", "slice"):
        made.filters[name] = _counting(made.filters[name])
    made.filters["format"] = _format
    made.filters["round"] = _round
    made.filters["tojson"] = _counting(_to_json)
    made.globals["raise_exception"] = _raise_exception
    made.globals["strftime_now"] = _strftime_now
    made.globals["namespace"] = _Namespace
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
