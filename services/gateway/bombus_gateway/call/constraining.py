"""Turns what a client demands of an answer's form into a constraint that an engine can hold the answer to. Pure."""

import json
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from bombus.hive.generation import CallShape, Constraint
from bombus_gateway.call.request import CompletionRequest
from bombus_gateway.text.renderer import TemplateRenderer

_PLAIN_NAME = re.compile(r"[\w.:/-]+", re.ASCII)  # the same text in JSON, in a tag, and by itself
_ANY_OBJECT: dict[str, Any] = {"type": "object"}


def why_not_held(request: CompletionRequest, renderer: TemplateRenderer) -> str:
    """Return why no constraint can say what the request demands; empty where one can. A clause."""
    reading, names = renderer.reading, _callable(request)
    if reading.channels or reading.frames:
        return "answers of this model are in parts of their own, whose form is not known"
    if not renderer.stop_token_ids:
        return "this model has no token that ends an answer"
    if names and renderer.call_text is None:
        return "this model does not write its calls as JSON, or gives them ids"
    strange = next((name for name in names if not _PLAIN_NAME.fullmatch(name)), "")
    return f"the name of the tool {strange!r} has characters that may be written in several ways" if strange else ""


def constraint_of(request: CompletionRequest, renderer: TemplateRenderer, prompt: bytes) -> Constraint:
    """Return the form that an answer to `prompt` (int32) must have to meet all demands.

    Where JSON is demanded and tools may be called, the answer is one or the other. Call `why_not_held` before.
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
    """Return the JSON Schema of a tool's arguments, which are an object whether or not it says so."""
    given = function.get("parameters")
    return json.dumps({**_ANY_OBJECT, **given} if isinstance(given, Mapping) else _ANY_OBJECT)
