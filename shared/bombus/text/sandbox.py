"""The sandbox in which chat templates run: jinja2's sandbox, with the filters and globals that transformers adds.

A template's work is bounded, since it is third-party code and a thread that runs it cannot be stopped.
"""

import datetime
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from functools import cache, wraps
from typing import Any, Literal, ParamSpec, TypeVar

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import do_format, do_round
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Macro, str_join
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

COUNT_MAX = 100_000  # largest width or count that a template may pass to a filter or a string method
NUMBER_BITS_MAX = 1 << 12
PLACES_MAX = 100
TEXT_MAX = 10_000_000  # characters in a text, or members of a list, made by repetition or concatenation
# Filters that take no longer for larger values, or that count their own steps.
QUICK_FILTERS = {"abs", "attr", "count", "d", "default", "first", "float", "int", "items", "last", "length", "tojson"}
STEP_CHARACTERS = 256  # characters of text that are read or made in one step
MACRO_STEPS = 10  # steps counted for each call of a macro
_WIDE_FORMAT = re.compile(r"%[^%A-Za-z]*(?:\d{6}|\*)")

# ---- steps --------------------------------------------------------------------------------------------------------


class Steps:
    """Limits templates to this many steps while the block runs. Templates that exceed the limit raise `SecurityError`.

    Each item that is looped over counts as one step, each call of a macro as `MACRO_STEPS`, and every `STEP_CHARACTERS`
    characters of a text as one. All other work is bounded by the length of a template's source.
    """

    def __init__(self, count: float) -> None:
        self.count = count
        self.left = count

    def __enter__(self) -> None:
        self._token = _budget.set(self)

    def __exit__(self, *_: object) -> None:
        _budget.reset(self._token)


# There is no limit while a template is compiled.
_budget: ContextVar[Steps] = ContextVar("_budget", default=Steps(float("inf")))  # noqa: B039  it stays as it is


def _take(count: int) -> None:
    budget = _budget.get()
    budget.left -= count
    if budget.left < 0:
        raise SecurityError(
            f"it takes more than {budget.count} steps; send fewer messages, or give the job a model.chat_template with "
            f"fewer nested loops"
        )


def _size(value: object) -> int:
    """Return how many steps it takes to read or copy a value."""
    if isinstance(value, str):
        return len(value) // STEP_CHARACTERS
    return len(value) if isinstance(value, list | tuple | dict | range) else 0


def _looped(iterable: Iterable[Any]) -> Iterable[Any]:
    """Return a loop's iterable, counting a step for each item."""
    try:
        _take(len(iterable))  # type: ignore[arg-type]
    except TypeError:
        return _each(iterable)
    return iterable


def _each(iterable: Iterable[Any]) -> Iterator[Any]:
    for member in iterable:
        _take(1)
        yield member


def _concatenated(parts: Sequence[Any]) -> str:
    made = str_join(parts)
    if len(made) > STEP_CHARACTERS:
        _check_length(made)
        _take(_size(made))
    return made


class _Counting(NodeTransformer):
    """Adds step-counting filters to a template before it is compiled."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        node.iter = _filtered(node.iter, "looped")
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:
        self.generic_visit(node)
        return _filtered(nodes.List(node.nodes, lineno=node.lineno, environment=node.environment), "concatenated")


def _filtered(node: nodes.Node, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno, environment=node.environment)


# ---- the sandbox --------------------------------------------------------------------------------------------------


class _Generation(Extension):
    """Renders the contents of `{% generation %}`, a block that marks the model's own text, for training on text.

    Variables that are set in the block are local to it.
    """

    tags = {"generation"}  # noqa: RUF012  the base class has a set

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Macro) -> str:
        return caller()


class _Namespace(Namespace):
    """A namespace that rejects attributes with a leading underscore, as in transformers."""

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
    """Bounds the values of expressions such as `7 ** 10 ** 8`, which would block the process for hours.

    The operators are intercepted, which also keeps them from being constant-folded when a template is compiled.
    """

    intercepted_binops = frozenset({"**", "*", "%", "+"})

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        return super()._generate(_Counting().visit(source), *args, **kwargs)

    @staticmethod
    def concat(parts: Iterable[str]) -> str:
        """Join the output of a template, a macro or a block."""
        listed = list(parts)
        length = sum(map(len, listed))
        if length > TEXT_MAX:
            raise SecurityError(f"it writes more than {TEXT_MAX} characters")
        _take(length // STEP_CHARACTERS)
        return "".join(listed)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "+":
            made = left + right
        else:
            _check_operation(operator, left, right)
            made = super().call_binop(context, operator, left, right)
        if not isinstance(made, int) and (size := _size(made)):
            _check_length(made)
            _take(size)
        return made

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str):
            _check_counts(args, kwargs)
            if len(owner) > STEP_CHARACTERS:
                _take(_size(owner))
        elif isinstance(__obj, Macro | LoopContext):
            _take(MACRO_STEPS + sum(map(_size, args)))
        return super().call(__context, __obj, *args, **kwargs)


def _check_operation(operator: str, left: Any, right: Any) -> None:
    if operator == "**":
        _check_power(left, right)
    elif operator == "*":
        _check_product(left, right)
    elif isinstance(left, str):
        _check_format(left)


def _check_length(made: Any) -> None:
    if len(made) > TEXT_MAX:
        raise SecurityError(f"a text or list is longer than {TEXT_MAX}")


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
        raise SecurityError("a format has a width that is too large, or that is an argument (*)")


def _check_counts(args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    if any(isinstance(value, int) and abs(value) > COUNT_MAX for value in (*args, *kwargs.values())):
        raise SecurityError(f"a width or count is over {COUNT_MAX}")


def _counting(filter: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter that rejects arguments that would make very long texts, lists or numbers."""

    @wraps(filter)
    def checked(value: Any, *args: Any, **kwargs: Any) -> Any:
        _check_counts(args, kwargs)
        return filter(value, *args, **kwargs)

    return checked


def _charged(filter: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter that counts steps according to the size of its value."""
    place = 1 if hasattr(filter, "jinja_pass_arg") else 0  # the value follows the context or environment

    @wraps(filter)
    def charged(*args: Any, **kwargs: Any) -> Any:
        if size := _size(args[place]):
            _take(size)
        return filter(*args, **kwargs)

    return charged


def _format(value: Any, *args: Any, **kwargs: Any) -> str:
    _check_format(str(value))
    return do_format(value, *args, **kwargs)


def _round(value: float, precision: int = 0, method: Literal["common", "ceil", "floor"] = "common") -> float:
    if abs(precision) > PLACES_MAX:
        raise SecurityError(f"a number is rounded to more than {PLACES_MAX} places")
    return do_round(value, precision, method)


@cache
def environment() -> ImmutableSandboxedEnvironment:
    """Return the jinja2 environment in which chat templates run."""
    made = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    for name in ("batch", "center", "indent", "slice"):
        made.filters[name] = _counting(made.filters[name])
    made.filters["format"] = _format
    made.filters["round"] = _round
    made.filters["tojson"] = _counting(_to_json)
    charged = made.filters.keys() - QUICK_FILTERS
    made.filters |= {name: _charged(made.filters[name]) for name in charged}
    made.filters |= {"looped": _looped, "concatenated": _concatenated}
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
    """Encode as JSON without escaping HTML characters, unlike jinja2's filter, which this replaces."""
    made = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    _take(_size(made))
    return made


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


_P = ParamSpec("_P")
_T = TypeVar("_T")
_now: ContextVar[datetime.datetime | None] = ContextVar("_now", default=None)


def at_one_time(work: Callable[_P, _T]) -> Callable[_P, _T]:
    """Wrap a function so that templates see one fixed time while it runs, which makes their renderings comparable."""

    @wraps(work)
    def held(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        if _now.get() is not None:
            return work(*args, **kwargs)
        token = _now.set(datetime.datetime.now())
        try:
            return work(*args, **kwargs)
        finally:
            _now.reset(token)

    return held


def _strftime_now(format: str) -> str:
    return (_now.get() or datetime.datetime.now()).strftime(format)
