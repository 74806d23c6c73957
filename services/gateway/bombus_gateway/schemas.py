"""Parts of JSON schemas, for the routes that are described by hand because they are answered outside FastAPI."""

from collections.abc import Mapping
from typing import Any

from bombus_gateway.limits import NAME_CHARACTERS

STRING: dict[str, Any] = {"type": "string"}
NUMBER: dict[str, Any] = {"type": "number"}
INTEGER: dict[str, Any] = {"type": "integer"}
BOOLEAN: dict[str, Any] = {"type": "boolean"}
NULL: dict[str, Any] = {"type": "null"}
OBJECT: dict[str, Any] = {"type": "object"}
NAME: dict[str, Any] = {**STRING, "minLength": 1, "maxLength": NAME_CHARACTERS}

OVERRIDDEN: dict[str, Any] = {  # headers of an answer
    "x-bombus-overridden": {"schema": STRING, "description": "the names of what was asked for and is not done"}
}


def object_of(properties: Mapping[str, Any], *optional: str) -> dict[str, Any]:
    """Describe an object that has all of these fields but the optional ones."""
    required = [name for name in properties if name not in optional]
    return {"type": "object", "required": required, "properties": dict(properties)}


def array_of(items: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "array", "items": dict(items), **more}


def one_of(*values: str) -> dict[str, Any]:
    return {"type": "string", "enum": [*values]}


def or_null(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {"anyOf": [dict(schema), NULL]}
