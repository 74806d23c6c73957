"""Reads tool calls that are written as code: `[f(a=1), g()]`, and Gemma's `call:f{a:1}`."""

from typing import Any

from bombus_gateway.text.deltas import ToolCallDelta
from bombus_gateway.text.reading.literals import Literals
from bombus_gateway.text.reading.syntax import ReadBody
from bombus_gateway.text.reading.values import Schemas, make_call


def read_pythonic(body: str, schemas: Schemas) -> list[ToolCallDelta]:
    """Read calls with keyword arguments: a list of them, or one on each line."""
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


def gemma(quote: str) -> ReadBody:
    """Return a reader of `call:f{key:value}`, whose strings stand between two of `quote`."""

    def read(body: str, schemas: Schemas) -> list[ToolCallDelta]:
        code = Literals(body, quote)
        calls = []
        while not code.done():
            code.expect("call:")
            name = code.name()
            code.expect("{")
            calls.append(make_call(name, code.rest_of_object()))
        if not calls:
            raise ValueError("no call")
        return calls

    return read
