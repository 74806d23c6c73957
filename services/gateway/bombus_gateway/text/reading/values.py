"""Values as models write them in tool calls: JSON, and text whose type is determined by a schema.

For invalid text, everything here raises `ValueError` and nothing else.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from bombus_gateway import limits
from bombus_gateway.text.deltas import ToolCallDelta
from bombus_gateway.text.reading.literals import DEPTH_MAX, PYTHON_CONSTANTS, Literals

Schema = Mapping[str, Any]  # the schema of one parameter
Schemas = Callable[[str], Mapping[str, Schema]]  # takes a tool's name; returns the schemas of its parameters by name

_STRING_OR_BRACKET = re.compile(r'"(?:[^"\\]|\\(?:.|\Z))*+(?:"|\Z)|([\[{])|([\]}])', re.DOTALL)


def schemas_of(tools: Sequence[Mapping[str, Any]], name: str) -> Mapping[str, Schema]:
    """Return the schemas of a tool's parameters by name. Malformed parts count as empty."""
    for tool in reversed(tools):
        function = as_mapping(tool.get("function")) or tool
        if function.get("name") == name:
            properties = as_mapping(as_mapping(function.get("parameters")).get("properties"))
            return {parameter: as_mapping(schema) for parameter, schema in properties.items()}
    return {}


def make_call(name: object, arguments: object, call_id: object = "") -> ToolCallDelta:
    """Return a call. Raises `ValueError` for a call that would be refused if a later request echoed it.

    Such a call has an empty name or one that is too long, arguments that are not an object, or values that JSON cannot
    represent. Refusing the later request would end the episode.
    """
    if not isinstance(name, str) or not 0 < len(name.strip()) <= limits.NAME_CHARACTERS:
        raise ValueError(f"the name of a call must have 1 to {limits.NAME_CHARACTERS} characters")
    if not isinstance(arguments, dict):
        raise ValueError("the arguments of a call must be an object")
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    (name + text).encode()  # raises for half a surrogate pair, which cannot be sent or stored
    return ToolCallDelta(name.strip(), text, call_id if isinstance(call_id, str) else "")


def json_value(text: str) -> Any:
    """Decode one JSON value. Raises `ValueError` for anything else, or if the value is nested too deeply."""
    depth = 0
    for bracket in _STRING_OR_BRACKET.finditer(text):
        depth += 1 if bracket[1] else -1 if bracket[2] else 0
        if depth > DEPTH_MAX:
            raise ValueError("nested too deeply")
    return msgspec.json.decode(text.strip())


def json_object(text: str) -> dict[str, Any]:
    """Decode a JSON object; empty text counts as an empty object."""
    found = json_value(text) if text.strip() else {}
    if not isinstance(found, dict):
        raise ValueError("not an object")
    return found


# ---- text whose type is determined by a schema ----

_TYPES: dict[str, tuple[type, ...]] = {
    "null": (type(None),),
    "boolean": (bool,),
    "integer": (int,),
    "number": (int, float),
    "array": (list,),
    "object": (dict,),
}


def typed_value(text: str, schema: Schema | None) -> Any:
    """Return the value of a parameter's text, for formats that do not quote strings.

    The schema determines the type. Without a schema, text that is JSON is decoded, unless it is a JSON string.
    """
    types = _types_of(schema or {})
    if types == {"string"}:
        return text
    try:
        value = _unquoted_value(text, "string" not in types and bool(types))
    except ValueError:
        return text
    if not types:
        return text if isinstance(value, str) else value
    fits = any(type(value) in _TYPES.get(name, ()) for name in types)
    return text if not fits and ("string" in types or isinstance(value, str)) else value


def _unquoted_value(text: str, may_be_python: bool) -> Any:
    """Decode JSON, or Python literals, which some templates write for lists, objects and constants."""
    try:
        return json_value(text)
    except ValueError:
        if text.strip() in PYTHON_CONSTANTS:
            return PYTHON_CONSTANTS[text.strip()]
        if not may_be_python:
            raise
    code = Literals(text)
    value = code.value()
    if not code.done():
        raise ValueError("text after the value")
    return value


def _types_of(schema: Schema) -> set[str]:
    named = schema.get("type")
    types = {named} if isinstance(named, str) else {str(name) for name in named} if isinstance(named, list) else set()
    for key in ("anyOf", "oneOf"):
        choices = schema.get(key)
        for choice in choices if isinstance(choices, list) else ():
            inner = as_mapping(choice).get("type")
            types |= {inner} if isinstance(inner, str) else set()
    choices = schema.get("enum")
    if not types and isinstance(choices, list) and choices and all(isinstance(choice, str) for choice in choices):
        return {"string"}
    return types


def as_mapping(found: object) -> Mapping[str, Any]:
    """Return `found` if it is a mapping, else an empty mapping."""
    return found if isinstance(found, Mapping) else {}
