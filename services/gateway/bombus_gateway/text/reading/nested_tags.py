"""Reads tool calls whose arguments are tagged elements, possibly nested, with a mark before each tag."""

import re
from collections import deque
from typing import Any

from bombus_gateway.text.deltas import ToolCallDelta
from bombus_gateway.text.reading.literals import DEPTH_MAX
from bombus_gateway.text.reading.syntax import ReadBody
from bombus_gateway.text.reading.values import Schema, Schemas, as_mapping, make_call, typed_value

_CALL = re.compile(r'<invoke name="([^"\n]+)">\s*')
_ELEMENT = re.compile(r"<([^<>/][^<>]*)>(.*)", re.DOTALL)
_EMPTY: dict[str, Any] = {"array": [], "object": {}}


def nested_tags(mark: str) -> ReadBody:
    """Return a reader of `<invoke name="f"><key>value</key></invoke>` with `mark` before each tag.

    A value is either text, whose type the tool's schema determines, or nested elements. Elements that are all named
    `item` form a list, unless the schema says `object`.
    """

    def read(body: str, schemas: Schemas) -> list[ToolCallDelta]:
        before, *tags = body.split(mark)
        if before.strip():
            raise ValueError("text before a call")
        rest, calls = deque(tags), []
        while rest:
            opened = _CALL.fullmatch(rest.popleft())
            if opened is None:
                raise ValueError("not a call")
            schema = {"properties": schemas(opened[1].strip())}
            calls.append(make_call(opened[1], dict(_elements(rest, "invoke", schema, 0))))
        if not calls:
            raise ValueError("no call")
        return calls

    return read


def _elements(tags: deque[str], parent: str, schema: Schema, depth: int) -> list[tuple[str, Any]]:
    """Remove the elements up to and including the parent's end tag from `tags`, and return the elements' names and
    values.

    Each entry of `tags` is a tag and the text after it.
    """
    if depth > DEPTH_MAX:
        raise ValueError("nested too deeply")
    found = []
    while tags and not tags[0].startswith("</"):
        opened = _ELEMENT.fullmatch(tags.popleft())
        if opened is None:
            raise ValueError("not a tag")
        name, text = opened.groups()
        found.append((name, _value(tags, name, text, _schema_of(name, schema), depth)))
    if not tags or tags.popleft().rstrip() != f"</{parent}>":
        raise ValueError(f"{parent!r} is not closed")
    return found


def _value(tags: deque[str], name: str, text: str, schema: Schema, depth: int) -> Any:
    found = _elements(tags, name, schema, depth + 1)
    if not found:
        return typed_value(text, schema) if text else _EMPTY.get(str(schema.get("type")), "")
    if text.strip():
        raise ValueError("text beside elements")
    is_list = schema.get("type") != "object" and all(key == "item" for key, _ in found)
    return [value for _, value in found] if is_list else dict(found)


def _schema_of(name: str, schema: Schema) -> Schema:
    """Return the schema of the element `name` in a value that has the schema `schema`."""
    return as_mapping(as_mapping(schema.get("properties")).get(name)) or as_mapping(schema.get("items"))
