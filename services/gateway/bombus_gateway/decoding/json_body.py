"""Reads the JSON bodies of model calls, for all dialects. Types are strict; unknown fields are listed."""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Generic, NoReturn, TypeVar

import msgspec

from bombus.errors import Code, Refused
from bombus_gateway import limits
from bombus_gateway.call.request import Demand, Unsupported
from bombus_gateway.decoding.json_shape import is_deeper, is_flat, marks_of
from bombus_gateway.text.thinking import NEAREST, NO_EFFORT, RequestedThinking

Asked = Demand | Unsupported  # what a client requires beyond tools, messages and sampling parameters
ANY_OBJECT: dict[str, Any] = {"type": "object"}  # a JSON Schema

_Body = TypeVar("_Body")
_StructT = TypeVar("_StructT", bound=msgspec.Struct)
raw_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
_anything = msgspec.json.Decoder()
_packed = msgspec.msgpack.Encoder().encode  # the log's encoding
_may_be_half = re.compile(r"\\u[dD][89a-fA-F]")
# Escaped backslashes, whole surrogate pairs, or one unpaired half.
_escapes = re.compile(
    r"(?:\\\\)++|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(?P<half>\\u[dD][89a-fA-F][0-9a-fA-F]{2})"
)
_place = re.compile(r" - at `\$\.?([^`]*)`$")
_NULL = msgspec.Raw(b"null")  # a Raw never equals bytes
FREE_TEXT = "input"  # the argument that carries a custom tool's text
STRICT = Unsupported("tools.strict", "call arguments are not constrained to their schema")
UNKNOWN = "this field is not known here"


class BadParameter(Refused):
    """A refusal that names the parameter of the request, for the error body."""

    def __init__(self, code: Code, param: str, why: str) -> None:
        super().__init__(code, why)
        self.param = param


def decode_body(decoder: msgspec.json.Decoder[_Body], body: bytes, place: str = "") -> _Body:
    """Decode the body of a request, or the part of it at `place`.

    An unpaired half of a surrogate pair becomes U+FFFD. Harnesses cut texts in the middle of characters, and JavaScript
    then writes such a half. The text stays in the conversation, so refusing it would end the episode. Raises `Refused`
    MALFORMED, with the place of the error if it is known.
    """
    try:
        try:
            return decoder.decode(body)
        except msgspec.DecodeError as error:
            text = body.decode()
            whole = _without_halves(text)
            if isinstance(error, msgspec.ValidationError) or whole == text:
                raise
            return decoder.decode(whole)
    except msgspec.MsgspecError as error:
        _refuse_body(error, place)
    except UnicodeDecodeError as error:
        raise Refused(Code.MALFORMED, f"The body is not UTF-8: {error}.") from None
    except RecursionError:
        raise Refused(Code.MALFORMED, "The body is nested too deeply.") from None


def repaired(body: bytes) -> bytes:
    """Replace unpaired surrogate halves in a body with U+FFFD, as `decode_body` does. The body's length does not
    change."""
    escaped = "surrogateescape"  # preserves bytes that are not UTF-8
    return _without_halves(body.decode(errors=escaped)).encode(errors=escaped)


def decode_field(decoder: msgspec.json.Decoder[_Body], text: bytes, place: str) -> _Body:
    """Decode a field that a `BodyDecoder` left to its reader. Raises the same errors as `decode_body`."""
    check_depth(text, around=1)
    return decode_body(decoder, text, place)


def check_depth(text: bytes, around: int = 0) -> None:
    """Raise `Refused` MALFORMED if this JSON, which is already inside `around` lists and objects, is nested too
    deeply."""
    depth = limits.DEPTH - around
    if not is_flat(text, depth) and is_deeper(marks_of(text), depth):
        _refuse_depth()


class BodyDecoder(Generic[_StructT]):
    """Decodes the bodies of one route, which are objects with the fields of `kind`, and checks their depth.

    Bodies may be long, so they are parsed in one pass. For the fields named in `parts`, the depth is checked by the
    fields' readers. Only a body that is invalid or has unknown fields is parsed a second time.
    """

    def __init__(self, kind: type[_StructT], *parts: str) -> None:
        strict = msgspec.defstruct(kind.__name__, [], bases=(kind,), kw_only=True, forbid_unknown_fields=True)
        self._strict: msgspec.json.Decoder[_StructT] = msgspec.json.Decoder(strict)
        self._lenient = msgspec.json.Decoder(kind)
        self._known = field_names(kind)
        self._names = [field.name for field in msgspec.structs.fields(kind) if field.name not in parts]

    def __call__(self, body: bytes) -> tuple[_StructT, list[Unsupported]]:
        """Return a body, and those of its unknown fields that are not null. Raises the same errors as `decode_body`."""
        try:
            found = self._strict.decode(body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            check_depth(body)
            return decode_body(self._lenient, body), _unknown_fields(body, self._known)
        if not is_flat(body) and any(limits.is_deeper(getattr(found, name), limits.DEPTH - 1) for name in self._names):
            _refuse_depth()
        return found, []


def _unknown_fields(body: bytes, known: Collection[str]) -> list[Unsupported]:
    given = decode_body(raw_fields, body)  # the first pass skipped unknown fields
    if len(given) > limits.FIELDS:
        raise Refused(Code.TOO_LARGE, f"The body has {len(given)} fields, but the limit is {limits.FIELDS}.")
    return [Unsupported(name, UNKNOWN) for name, raw in given.items() if name not in known and raw != _NULL]


def refuse_unknown(body: bytes, known: Collection[str]) -> None:
    """Raise `Refused` UNSUPPORTED for an unknown field of an object, unless it is null, false, zero or empty."""
    for name, raw in decode_body(raw_fields, body).items():
        if name not in known and decode_body(_anything, bytes(raw)):
            raise Refused(Code.UNSUPPORTED, f"{name[:40]} is not offered here: leave it out.")


def unknown_parts(field: str, given: Any, known: Collection[str]) -> list[Unsupported]:
    """Return the unknown parts of a field's object that are not null, or the field itself if it is not an object."""
    if not isinstance(given, dict):
        return [] if given is None else [Unsupported(field, "it must be an object")]
    return [Unsupported(f"{field}.{name}", UNKNOWN) for name in given if name not in known and given[name] is not None]


def thinking_of_effort(field: str, effort: Any) -> tuple[RequestedThinking | None, list[Unsupported]]:
    """Return the thinking requested by an `effort` field in OpenAI's APIs, and any unsupported values of the field."""
    if effort is None:
        return None, []
    if effort == NO_EFFORT:
        return RequestedThinking(on=False, on_field=field), []
    if not isinstance(effort, str) or effort not in NEAREST:
        return None, [Unsupported(field, f"it must be one of {NO_EFFORT}, {', '.join(NEAREST)}")]
    return RequestedThinking(on=True, effort=effort, effort_field=field), []


def field_names(kind: type[msgspec.Struct]) -> set[str]:
    """Return the JSON names of a struct's fields."""
    return {field.encode_name for field in msgspec.structs.fields(kind)}


def checked_arguments(arguments: str, place: str) -> str:
    """Return a call's arguments without unpaired surrogate halves, which cannot be rendered.

    Arguments that are not JSON are returned unchanged, to be rendered as text. Raises `BadParameter` if they are nested
    too deeply.
    """
    is_flat = arguments.count("[") + arguments.count("{") <= limits.DEPTH
    if is_flat and not _may_be_half.search(arguments):
        return arguments
    try:
        if limits.is_deeper(json.loads(arguments)):
            raise RecursionError
    except ValueError:
        return arguments
    except RecursionError:
        raise BadParameter(Code.MALFORMED, place, f"{place} is nested deeper than {limits.DEPTH}.") from None
    return _without_halves(arguments)


def arguments_of_text(text: str) -> str:
    """Return the arguments for a free-text tool. Such a tool is shown to the model as a function with one argument."""
    return msgspec.json.encode({FREE_TEXT: text}).decode()


def stop_strings(given: Sequence[str], param: str) -> tuple[str, ...]:
    """Return the texts that end an answer. Raises `BadParameter` if there are too many, or if one is empty or too
    long."""
    if len(given) > limits.STOPS or any(not text or len(text) > limits.STOP_CHARACTERS for text in given):
        why = f"{param} takes up to {limits.STOPS} texts of 1 to {limits.STOP_CHARACTERS} characters."
        raise BadParameter(Code.MALFORMED, param, why)
    return tuple(given)


def stop_tokens(given: Sequence[int], param: str) -> tuple[int, ...]:
    """Return the token ids that end an answer. Raises `BadParameter` if there are too many, or if one is negative."""
    if len(given) > limits.STOPS or any(token < 0 for token in given):
        why = f"{param} takes up to {limits.STOPS} token ids, which must not be negative."
        raise BadParameter(Code.MALFORMED, param, why)
    return tuple(given)


def check_count_of_tools(count: int) -> None:
    if count > limits.TOOLS:
        raise BadParameter(Code.MALFORMED, "tools", f"There are {count} tools, but the limit is {limits.TOOLS}.")


def function_tool(function: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Return a tool in the form that templates expect: a function without null fields. Raises `BadParameter` for an
    invalid tool."""
    name = function.get("name")
    if not isinstance(name, str) or not 0 < len(name) <= limits.NAME_CHARACTERS:
        why = f"A tool needs a name of up to {limits.NAME_CHARACTERS} characters."
        raise BadParameter(Code.MALFORMED, f"{place}.name", why)
    kept = {key: value for key, value in function.items() if value is not None}
    try:
        _packed(kept)
    except OverflowError:
        raise BadParameter(Code.MALFORMED, place, f"{place} has an integer of more than 64 bits.") from None
    return {"type": "function", "function": kept}


def demand_of_json(field: str, schema: Any) -> Demand:
    """Return the demand that an answer be JSON that matches a schema. Raises `BadParameter` if the schema is not an
    object."""
    if not isinstance(schema, dict):
        raise BadParameter(Code.MALFORMED, field, f"{field} needs a JSON schema, which must be an object.")
    return Demand(field, schema=schema)


def demand_of_calls(
    field: str, tools: Sequence[Mapping[str, Any]], wanted: Sequence[Any] | None, *, once: bool = False
) -> Asked:
    """Return the demand that an answer call one of the `wanted` functions or, if `wanted` is None, any of `tools`.

    If there is no such function, return an `Unsupported` instead.
    """
    known = tuple(dict.fromkeys(tool["function"]["name"] for tool in tools))
    names = known if wanted is None else tuple(name for name in known if name in wanted)
    if not names:
        return Unsupported(field, "there is no such function to call")
    return Demand(field, tools=names, once=once)


def split_asked(asked: Sequence[Asked | None]) -> tuple[tuple[Demand, ...], list[Unsupported]]:
    """Return the demands and the unsupported requirements separately."""
    demands = tuple(each for each in asked if isinstance(each, Demand))
    return demands, [each for each in asked if isinstance(each, Unsupported)]


def _without_halves(text: str) -> str:
    """Return JSON with each unpaired half of a surrogate pair replaced with U+FFFD."""
    if r"\u" not in text:  # this holds for most bodies; the substitution takes seconds for a large body
        return text
    return _escapes.sub(lambda found: r"\ufffd" if found["half"] else found[0], text)


def _refuse_depth() -> NoReturn:
    raise Refused(Code.MALFORMED, f"The body is nested deeper than {limits.DEPTH}.")


def _refuse_body(error: msgspec.MsgspecError, before: str) -> NoReturn:
    text = str(error)
    if isinstance(error, msgspec.ValidationError):
        place = _place.search(text)
        within = place.group(1) if place else ""
        where = f"{before}.{within}" if before and within and not within.startswith("[") else before + within
        raise BadParameter(Code.MALFORMED, where, f"{where or 'The body'}: {_place.sub('', text)}.") from None
    raise Refused(Code.MALFORMED, f"The body could not be read as JSON: {text}.") from None
