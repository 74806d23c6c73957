"""Turns a client's demands on the form of an answer into a constraint that an engine can enforce. Pure."""

import json
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from bombus.hive.generation import CallShape, Constraint
from bombus_gateway.call.request import CompletionRequest
from bombus_gateway.text.renderer import TemplateRenderer

_PLAIN_NAME = re.compile(r"[\w.:/-]+", re.ASCII)  # these are written the same in JSON, in a tag, and on their own
_ANY_OBJECT: dict[str, Any] = {"type": "object"}


def why_not_held(request: CompletionRequest, renderer: TemplateRenderer) -> str:
    """Return, as a clause, why no constraint can express the request's demands, or "" if one can."""
    reading, names = renderer.reading, _callable(request)
    if reading.channels or reading.frames:
        return "this model divides its answers into parts whose form is not known"
    if not renderer.stop_token_ids:
        return "this model has no token that ends an answer"
    if names and renderer.call_text is None:
        return "this model does not write its tool calls as JSON, or gives them ids"
    strange = next((name for name in names if not _PLAIN_NAME.fullmatch(name)), "")
    return f"the tool name {strange!r} has characters that can be written in several ways" if strange else ""


def constraint_of(request: CompletionRequest, renderer: TemplateRenderer, prompt: bytes) -> Constraint:
    """Return the constraint that makes an answer to `prompt` (int32) meet all demands.

    If JSON is demanded and tools may be called, the answer is either JSON or calls. Call `why_not_held` first.
    """
    names, text = _callable(request), renderer.call_text
    forced = any(demand.tools for demand in request.demands)
    schemas = [demand.schema for demand in request.demands if demand.schema is not None and not forced]
    thinking = renderer.reasoning_after(prompt)
    constraint = Constraint(
        schema=json.dumps(schemas[0]) if schemas else "",
        thinks=thinking.open if thinking else "",
        thought=thinking.close if thinking else "",
    )
    if not names or text is None:
        return constraint
    functions = {tool["function"]["name"]: tool["function"] for tool in request.tools}
    once = bool(request.one_call) or any(demand.once for demand in request.demands)
    return msgspec.structs.replace(
        constraint,
        calls=tuple(CallShape(text.head(name), _arguments_schema(functions[name])) for name in names),
        opens=text.opens,
        between="" if once else text.between,
        closes=text.closes,
    )


def _callable(request: CompletionRequest) -> tuple[str, ...]:
    """Return the names of the tools that an answer may call."""
    forced = [demand.tools for demand in request.demands if demand.tools]
    if forced:
        return forced[0]
    return tuple(tool["function"]["name"] for tool in request.tools) if request.parse_tool_calls else ()


def _arguments_schema(function: Mapping[str, Any]) -> str:
    """Return the JSON Schema of a tool's arguments: an object, even if the tool's schema does not say so."""
    given = function.get("parameters")
    return json.dumps({**_ANY_OBJECT, **given} if isinstance(given, Mapping) else _ANY_OBJECT)
