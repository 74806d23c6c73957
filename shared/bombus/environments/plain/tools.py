"""Methods as tools: the JSON schema of their arguments, from type hints and docstring, and validation against it."""

import inspect
import math
import re
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import Annotated, Any, get_type_hints

import msgspec
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from bombus.environments.kinds import ToolSchema, Transcript
from bombus.errors import in_one_line, without_surrogates
from bombus.sdk.types import Task

PROBLEMS_SHOWN = 5  # the most problems reported about one call's arguments
ARRAY_NUMBERS_MAX = 1000  # the largest array shown in full; larger ones are shortened as NumPy prints them
_SECTION = re.compile(r"^(Args|Arguments|Parameters|Returns|Raises|Yields|Examples?):\s*$", re.MULTILINE)
_ARGUMENT = re.compile(r"^(\w+)(?:\s*\([^)]*\))?:\s*(.*)$")


class BadArguments(ValueError):
    """The arguments of a call do not fit its tool. The text tells the model which arguments do not."""


class NoTool(ValueError):
    """A method cannot be a tool. The text gives the reason as a clause."""


class MethodTool(msgspec.Struct, frozen=True, kw_only=True):
    """A public method of a plain class that the model can call."""

    schema: ToolSchema
    arguments: type[BaseModel]  # its fields are p0, p1, ..., with the method's own names as aliases
    names: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.schema.name

    def read(self, text: str) -> dict[str, Any]:
        """Parse the JSON in `text`, and return the arguments by name. Raises `BadArguments` if they do not fit the
        tool."""
        try:
            found = self.arguments.model_validate_json(text.strip() or "{}")
        except ValidationError as error:
            raise BadArguments(_why_not(error)) from error
        except Exception as error:  # raised by the types' own code, such as `__post_init__`: the model chose the values
            raise BadArguments(in_one_line(error)) from error
        return {name: getattr(found, f"p{index}") for index, name in enumerate(self.names)}


def tool_of(name: str, method: Callable[..., Any]) -> MethodTool:
    """Return the function stored in a class under `name`, whose first parameter is `self`, as a tool.

    The function's `__name__` may differ, for example if another function created it. Raises `NoTool` if the function
    cannot be a tool.
    """
    if inspect.isgeneratorfunction(method) or inspect.isasyncgenfunction(method):
        raise NoTool("it is a generator, which cannot be shown to the model: return a list or a text")
    hints = _hints_of(method)
    documented = _read_docstring(inspect.getdoc(method) or "")
    if not documented.summary:
        raise NoTool("it has no docstring: write one that tells the model what the tool does")
    parameters = list(inspect.signature(method).parameters.values())
    if not parameters:
        raise NoTool("it has no parameter `self`")
    fields: dict[str, Any] = {}
    names: list[str] = []
    for parameter in parameters[1:]:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise NoTool(
                f"its argument `{parameter.name}` is positional-only or variadic: the model gives arguments by name"
            )
        if parameter.name not in hints:
            raise NoTool(f"its argument `{parameter.name}` has no type hint")
        if hints[parameter.name] in (Task, Transcript):
            raise NoTool(
                f"its argument `{parameter.name}` is a {hints[parameter.name].__name__}, which the model would have to "
                "write: only decorated methods can take one, so store what the tool needs in `reset`"
            )
        default = ... if parameter.default is parameter.empty else parameter.default
        about = documented.arguments.get(parameter.name)
        fields[f"p{len(names)}"] = (
            Annotated[hints[parameter.name], Field(alias=parameter.name, description=about)]
            if about
            else Annotated[hints[parameter.name], Field(alias=parameter.name)],
            default,
        )
        names.append(parameter.name)
    try:
        arguments = create_model(name, __config__=ConfigDict(extra="forbid"), **fields)
        schema = arguments.model_json_schema(by_alias=True)
    except Exception as error:  # raised by pydantic or by the types' own code: either way there is no schema
        raise NoTool(f"its arguments have no JSON schema: {in_one_line(error)}") from error
    return MethodTool(
        schema=ToolSchema(name=name, description=documented.summary, parameters=_without_titles(schema)),
        arguments=arguments,
        names=tuple(names),
    )


def text_of(value: object) -> str:
    """Return a tool's result as the text that is shown to the model: JSON, unless the result is a string already.

    Bytes, such as a program's output, are decoded as text. Raises `TypeError` for a generator, and any error that the
    value's own `__str__` raises.
    """
    if value is None:
        return ""
    if isinstance(value, bytes | bytearray):
        return value.decode(errors="replace")
    if isinstance(value, str):
        return without_surrogates(value)
    if isinstance(value, Iterator | AsyncIterator):
        raise TypeError(
            f"it returned {type(value).__name__}, which cannot be shown to the model: return a list or a text"
        )
    try:
        return msgspec.json.encode(value, enc_hook=_plain).decode()
    except (TypeError, ValueError, RecursionError):
        return without_surrogates(str(value))


def _plain(value: object) -> object:
    """Return a JSON-compatible value for a pydantic model, or for a NumPy or torch number or small array.

    Raises `TypeError` for anything else.
    """
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    shape, tolist = getattr(value, "shape", None), getattr(value, "tolist", None)
    if callable(tolist) and isinstance(shape, tuple) and math.prod(shape) <= ARRAY_NUMBERS_MAX:
        return tolist()
    raise TypeError(f"{type(value).__name__} cannot be encoded as JSON")


class _Docstring(msgspec.Struct, frozen=True):
    summary: str
    arguments: Mapping[str, str]


def _hints_of(method: Callable[..., Any]) -> dict[str, Any]:
    try:
        return get_type_hints(method, include_extras=True)
    except (NameError, TypeError, AttributeError) as error:
        raise NoTool(f"its type hints cannot be read: {error}") from error


def _read_docstring(text: str) -> _Docstring:
    """Return the text before the sections of a docstring, and the description of each argument in its arguments
    section."""
    parts = _SECTION.split(text)
    sections = dict(zip(parts[1::2], parts[2::2]))
    about = next((sections[name] for name in ("Args", "Arguments", "Parameters") if name in sections), "")
    return _Docstring(parts[0].strip(), dict(_arguments(about)))


def _arguments(section: str) -> Iterator[tuple[str, str]]:
    """Yield the name and description of each argument. Lines that are indented further continue the previous line."""
    name, words = "", ""
    margin = None
    for line in section.splitlines():
        if not line.strip():
            continue
        indent = len(line) - len(line.lstrip())
        margin = indent if margin is None else margin
        begins = _ARGUMENT.match(line.strip()) if indent <= margin else None
        if begins:
            if name:
                yield name, words
            name, words = begins[1], begins[2]
        else:
            words = f"{words} {line.strip()}".strip()
    if name:
        yield name, words


def _why_not(error: ValidationError) -> str:
    problems = error.errors(include_url=False, include_context=False, include_input=False)
    said = [f"{'.'.join(map(str, each['loc'])) or 'the arguments'}: {each['msg']}" for each in problems]
    more = f"; and {len(said) - PROBLEMS_SHOWN} more" if len(said) > PROBLEMS_SHOWN else ""
    return "; ".join(said[:PROBLEMS_SHOWN]) + more


def _without_titles(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema without the titles that pydantic derives from names. Properties named `title` are kept."""
    found: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "title" and isinstance(value, str):
            continue
        if key in ("properties", "$defs") and isinstance(value, dict):
            found[key] = {name: _without_titles(each) for name, each in value.items()}
        elif isinstance(value, dict) and key not in ("default", "const"):
            found[key] = _without_titles(value)
        elif isinstance(value, list) and key in ("anyOf", "allOf", "oneOf", "prefixItems"):
            found[key] = [_without_titles(each) for each in value]
        else:
            found[key] = value
    return found
