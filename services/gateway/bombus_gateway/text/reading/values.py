"""Values as models write them in tool calls: JSON, and text that a schema types.

Everything here raises `ValueError`, and nothing else, for what cannot be read.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from bombus_gateway import limits
from bombus_gateway.text.deltas import ToolCallDelta
from bombus_gateway.text.reading.literals import DEPTH_MAX, PYTHON_CONSTANTS, Literals

Schema = Mapping[str, Any]  # of one parameter
Schemas = Callable[[str], Mapping[str, Schema]]  # of the parameters of a tool, by the name of that

_STRING_OR_BRACKET = re.compile(r'"(?:[^"\\]|\\(?:.|\Z))*+(?:"|\Z)|([\[{])|([\]}])', re.DOTALL)


def schemas_of(tools: Sequence[Mapping[str, Any]], name: str) -> Mapping[str, Schema]:
    """Return the schemas of a tool's parameters, by their names. What is not as it should be is left out."""
    for tool in reversed(tools):
        function = as_mapping(tool.get("function")) or tool
        if function.get("name") == name:
            properties = as_mapping(as_mapping(function.get("parameters")).get("properties"))
            return {parameter: as_mapping(schema) for parameter, schema in properties.items()}
    return {}


def make_call(name: object, arguments: object, call_id: object = "") -> ToolCallDelta:
    """Return a call. Raises `ValueError` for what no request may send back to us, which would end the episode.

    That is an empty or very long name, arguments that are not an object, or values unknown to JSON.
    """
    if not isinstance(name, str) or not 0 < len(name.strip()) <= limits.NAME_CHARACTERS:
        raise ValueError(f"the name of a call has 1 to {limits.NAME_CHARACTERS} characters")
    if not isinstance(arguments, dict):
        raise ValueError("the arguments of a call are an object")
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    (name + text).encode()  # half a surrogate pair cannot be sent or stored
    return ToolCallDelta(name.strip(), text, call_id if isinstance(call_id, str) else "")


def json_value(text: str) -> Any:
    """Decode one JSON value. Raises `ValueError` for anything else, and for one that is too deep."""
    depth = 0
    for bracket in _STRING_OR_BRACKET.finditer(text):
        depth += 1 if bracket[1] else -1 if bracket[2] else 0
        if depth > DEPTH_MAX:
            raise ValueError("nested too deeply")
    return msgspec.json.decode(text.strip())


def json_object(text: str) -> dict[str, Any]:
    """Decode a JSON object; nothing stands for an empty one."""
    found = json_value(text) if text.strip() else {}
    if not isinstance(found, dict):
        raise ValueError("not an object")
    return found


# ---- text typed by a schema ----

_TYPES: dict[str, tuple[type, ...]] = {
    "null": (type(None),),
    "boolean": (bool,),
    "integer": (int,),
    "number": (int, float),
    "array": (list,),
    "object": (dict,),
}


def typed_value(text: str, schema: Schema | None) -> Any:
    """Return the value that a parameter's text stands for: formats of this kind do not quote strings.

    A schema decides; without one, text that is JSON and not a JSON string is that value, as templates write it.
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
    """Decode JSON. Some templates write Python's form of lists, objects and constants."""
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
        raise ValueError("more than a value")
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
    """Return a mapping itself, and an empty one for anything else."""
    return found if isinstance(found, Mapping) else {}
