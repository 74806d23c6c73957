"""Reads tool calls whose bodies are JSON: an object, one object per line, or a list of objects."""

import re
from typing import Any

from bombus_gateway.text.deltas import ToolCallDelta
from bombus_gateway.text.reading.syntax import ReadBody
from bombus_gateway.text.reading.values import Schemas, json_object, json_value, make_call

_NAMES = ("name", "tool_name")
_ARGUMENTS = ("arguments", "parameters")


def read_json(body: str, schemas: Schemas) -> list[ToolCallDelta]:
    """Read one or more objects with a name and arguments."""
    try:
        found = json_value(body)
    except ValueError:
        lines = [line for line in body.splitlines() if line.strip()]
        if len(lines) < 2:
            raise
        found = [json_value(line) for line in lines]
    calls = [_call(item) for item in (found if isinstance(found, list) else [found])]
    if not calls:
        raise ValueError("no call")
    return calls


def _call(item: Any) -> ToolCallDelta:
    if not isinstance(item, dict):
        raise ValueError("a call must be an object")
    item = item["function"] if isinstance(item.get("function"), dict) else item
    name = next((item[key] for key in _NAMES if key in item), None)
    arguments: Any = next((item[key] for key in _ARGUMENTS if key in item), {})
    if isinstance(arguments, str):
        arguments = json_value(arguments)
    return make_call(name, arguments, item.get("id"))


def read_json_by_name(body: str, schemas: Schemas) -> list[ToolCallDelta]:
    """Read a list of objects, each with a tool's name as its only key and the tool's arguments as the value."""
    found = json_value(body)
    if not isinstance(found, list) or not found:
        raise ValueError("not a list of calls")
    return [make_call(*pair) for item in found for pair in _one_pair(item)]


def _one_pair(item: Any) -> list[tuple[str, Any]]:
    if not isinstance(item, dict) or len(item) != 1:
        raise ValueError("a call must be an object with one key")
    return list(item.items())


# All quantifiers are possessive: backtracking through long white space would take too long.
_NAMED = re.compile(r"\s*+([^\s\[{]++)\s*+(?:\[CALL_ID\]\s*+([^\s\[{]++)\s*+)?(?:\[ARGS\])?+\s*+(?=\{)")


def read_named(body: str, schemas: Schemas) -> list[ToolCallDelta]:
    """Read Mistral's `name[CALL_ID]id[ARGS]{...}`. The id may be missing."""
    head = _NAMED.match(body)
    if head is None:
        raise ValueError("no name")
    return [make_call(head[1], json_object(body[head.end() :]), head[2] or "")]


def sections(pattern: str) -> ReadBody:
    """Return a reader of consecutive calls. `pattern` has the groups `name`, `arguments` and optionally `id`."""
    compiled = re.compile(rf"\s*{pattern}\s*", re.DOTALL)

    def read(body: str, schemas: Schemas) -> list[ToolCallDelta]:
        calls = []
        at = 0
        while at < len(body):
            found = compiled.match(body, at)
            if found is None:
                raise ValueError(f"not a call at {at}")
            groups = found.groupdict()
            calls.append(make_call(groups["name"], json_object(groups["arguments"]), groups.get("id")))
            at = found.end()
        if not calls:
            raise ValueError("no call")
        return calls

    return read
