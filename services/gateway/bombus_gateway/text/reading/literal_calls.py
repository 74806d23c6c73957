"""Reads tool calls that are written as code: `[f(a=1), g()]`, and Gemma's `call:f{a:1}`."""

from collections.abc import Mapping
from typing import Any

from bombus_gateway.text.deltas import ToolCallDelta
from bombus_gateway.text.reading.literals import Literals
from bombus_gateway.text.reading.syntax import ReadBody
from bombus_gateway.text.reading.values import Schema, Schemas, make_call, typed_value


def read_pythonic(body: str, schemas: Schemas) -> list[ToolCallDelta]:
    """Read calls with keyword arguments: a list of calls, or one call per line."""
    code = Literals(body)
    listed = code.take("[")
    calls: list[ToolCallDelta] = []
    while not (code.take("]") if listed else code.done()):
        if calls and listed:
            code.expect(",")
        calls.append(_pythonic_call(code))
    if not calls or not code.done():
        raise ValueError("not a list of calls")
    return calls


def _pythonic_call(code: Literals) -> ToolCallDelta:
    name = code.name()
    code.expect("(")
    arguments: dict[str, Any] = {}
    for _ in code.items(")"):
        key = code.name()
        code.expect("=")
        arguments[key] = code.value()
    return make_call(name, arguments)


def gemma(quote: str, typed: bool = False) -> ReadBody:
    """Return a reader of `call:f{key:value}`, with strings enclosed in `quote`.

    If `typed` is true, the template writes all values as strings, and the tool's schema says which of them are not
    strings.
    """

    def read(body: str, schemas: Schemas) -> list[ToolCallDelta]:
        code = Literals(body, quote)
        calls = []
        while not code.done():
            code.expect("call:")
            name = code.name()
            code.expect("{")
            arguments = code.rest_of_object()
            calls.append(make_call(name, _typed(arguments, schemas(name)) if typed else arguments))
        if not calls:
            raise ValueError("no call")
        return calls

    return read


def _typed(arguments: dict[str, Any], schemas: Mapping[str, Schema]) -> dict[str, Any]:
    return {
        key: typed_value(value, schemas[key]) if isinstance(value, str) and key in schemas else value
        for key, value in arguments.items()
    }
