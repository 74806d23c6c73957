"""Values as models write them in tool calls: JSON, Python's literals, Gemma's objects, and text typed by a schema.

Everything here raises `ValueError`, and nothing else, for what cannot be read: depth is limited before Python's is.
"""

import json
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from bombus_gateway.text.deltas import ToolCallDelta

DEPTH_MAX = 64  # of lists and objects within each other

Schema = Mapping[str, Any]  # of one parameter
Schemas = Mapping[str, Mapping[str, Schema]]  # by the names of tool and parameter

_STRING_OR_BRACKET = re.compile(r'"(?:[^"\\]|\\(?:.|\Z))*+(?:"|\Z)|([\[{])|([\]}])', re.DOTALL)


def schemas_of(tools: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Schema]]:
    """Return the schemas of the tools' parameters. What is not as it should be is left out."""
    found: dict[str, Mapping[str, Schema]] = {}
    for tool in tools:
        function = _mapping(tool.get("function")) or tool
        properties = _mapping(_mapping(function.get("parameters")).get("properties"))
        found[str(function.get("name"))] = {name: _mapping(schema) for name, schema in properties.items()}
    return found


def make_call(name: object, arguments: object, call_id: object = "") -> ToolCallDelta:
    """Return a call. Raises `ValueError` for an empty name, arguments that are no object, or values unknown to JSON."""
    if not isinstance(name, str) or not name.strip() or not isinstance(arguments, dict):
        raise ValueError("a call has a name and an object of arguments")
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
_PYTHON_CONSTANTS = {"True": True, "False": False, "None": None}


def typed_value(text: str, schema: Schema | None) -> Any:
    """Return the value that a parameter's text stands for: formats of this kind do not quote strings.

    A schema decides; without one, text that is JSON and not a JSON string is that value, as templates write it.
    """
    types = _types_of(schema or {})
    if types == {"string"}:
        return text
    try:
        value = _PYTHON_CONSTANTS[text.strip()] if text.strip() in _PYTHON_CONSTANTS else json_value(text)
    except ValueError:
        return text
    if not types:
        return text if isinstance(value, str) else value
    fits = any(type(value) in _TYPES.get(name, ()) for name in types)
    return text if not fits and ("string" in types or isinstance(value, str)) else value


def _types_of(schema: Schema) -> set[str]:
    named = schema.get("type")
    types = {named} if isinstance(named, str) else {str(name) for name in named} if isinstance(named, list) else set()
    for key in ("anyOf", "oneOf"):
        choices = schema.get(key)
        for choice in choices if isinstance(choices, list) else ():
            inner = _mapping(choice).get("type")
            types |= {inner} if isinstance(inner, str) else set()
    choices = schema.get("enum")
    if not types and isinstance(choices, list) and choices and all(isinstance(choice, str) for choice in choices):
        return {"string"}
    return types


def _mapping(found: object) -> Mapping[str, Any]:
    return found if isinstance(found, Mapping) else {}


# ---- literals ----

_SPACE = re.compile(r"\s*")
_NAME = re.compile(r"[^\W\d][\w.\-]*")
_NUMBER = re.compile(r"[+-]?\d+(\.\d*)?([eE][+-]?\d+)?(?![\w.])")
_CONSTANTS = {**_PYTHON_CONSTANTS, "true": True, "false": False, "null": None, "none": None}
_GEMMA_KEY = re.compile(r"[^:{}\[\],]+")
_PYTHON_STRING = re.compile(r"""'((?:[^'\\]|\\.)*+)'|"((?:[^"\\]|\\.)*+)\"""", re.DOTALL)
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", re.DOTALL)
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "\\": "\\", "'": "'", '"': '"', "/": "/", "\n": ""}


class Literals:
    """A cursor over literals: lists, objects, numbers, constants, and strings, which differ.

    Strings are Python's, or, where `quote` is given, whatever stands between two of it; keys of objects are then bare.
    """

    def __init__(self, text: str, quote: str = "") -> None:
        self._text = text
        self._quote = quote
        self._at = 0

    def done(self) -> bool:
        """Skip white space. Returns whether nothing is left."""
        self._skip()
        return self._at == len(self._text)

    def take(self, mark: str) -> bool:
        """Move beyond white space and `mark`, if it comes next."""
        self._skip()
        found = self._text.startswith(mark, self._at)
        self._at += len(mark) if found else 0
        return found

    def expect(self, mark: str) -> None:
        if not self.take(mark):
            raise ValueError(f"{mark!r} is missing")

    def name(self) -> str:
        """Take the name of a function or a parameter."""
        self._skip()
        return self._match(_NAME)[0]

    def value(self, depth: int = 0) -> Any:
        if depth > DEPTH_MAX:
            raise ValueError("nested too deeply")
        if self.take("["):
            return self._list(depth + 1)
        if self.take("{"):
            return self.rest_of_object(depth + 1)
        return self._scalar()

    def rest_of_object(self, depth: int = 1) -> dict[str, Any]:
        """Take an object whose brace has been taken."""
        found: dict[str, Any] = {}
        while not self.take("}"):
            if found:
                self.expect(",")
            key = self._key()
            self.expect(":")
            found[key] = self.value(depth)
        return found

    def _list(self, depth: int) -> list[Any]:
        found: list[Any] = []
        while not self.take("]"):
            if found:
                self.expect(",")
            found.append(self.value(depth))
        return found

    def _key(self) -> str:
        self._skip()
        if self._quote and not self._text.startswith(self._quote, self._at):
            return self._match(_GEMMA_KEY)[0].strip()
        return self._string()

    def _scalar(self) -> Any:
        self._skip()
        if self._text[self._at : self._at + 1] in ("'", '"') or (self._quote and self._ahead(self._quote)):
            return self._string()
        if number := _NUMBER.match(self._text, self._at):
            self._at = number.end()
            return float(number[0]) if number[1] or number[2] else int(number[0])
        word = self._match(_NAME)[0]
        if word not in _CONSTANTS:
            raise ValueError(f"{word!r} is not a value")
        return _CONSTANTS[word]

    def _string(self) -> str:
        if self._quote:
            self.expect(self._quote)
            end = self._text.index(self._quote, self._at)
            found = self._text[self._at : end]
            self._at = end + len(self._quote)
            return found
        match = self._match(_PYTHON_STRING)
        text = _ESCAPE.sub(_unescaped, match[1] if match[1] is not None else match[2])
        # As in JSON, two escapes may be the halves of one character.
        return text.encode("utf-16", "surrogatepass").decode("utf-16")

    def _match(self, pattern: re.Pattern[str]) -> re.Match[str]:
        match = pattern.match(self._text, self._at)
        if match is None:
            raise ValueError(f"unexpected text at {self._at}")
        self._at = match.end()
        return match

    def _ahead(self, mark: str) -> bool:
        return self._text.startswith(mark, self._at)

    def _skip(self) -> None:
        match = _SPACE.match(self._text, self._at)
        self._at = match.end() if match else self._at


def _unescaped(escape: re.Match[str]) -> str:
    number = escape[1] or escape[2] or escape[3]
    if number:
        return chr(min(int(number, 16), sys.maxunicode + 1))  # `chr` refuses this one with a `ValueError`
    return _ESCAPED.get(escape[4], "\\" + escape[4])
