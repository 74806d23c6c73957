"""Translates the constraint on an answer to vLLM's `structured_outputs`."""

import json

from bombus.hive.generation import CallShape, Constraint

_Format = dict[str, object]  # part of a structural tag, xgrammar's own language

# Models write a line break or two between their reasoning and what follows it.
_AFTER_REASONING: _Format = {"type": "regex", "pattern": "[ \\n]{0,4}"}
_ANY_TEXT: _Format = {"type": "any_text"}


def structured_outputs(constraint: Constraint) -> dict[str, object]:
    """Return the constraint in vLLM's format.

    JSON without other parts is sent as a schema: vLLM refuses a schema with keywords that it cannot enforce, but does
    not check for such keywords in a structural tag.
    """
    if not constraint.calls and not constraint.thought:
        return {"json": constraint.schema}
    parts = [_json(constraint.schema)] if constraint.schema else []
    parts += [_calls(constraint)] if constraint.calls else []
    form = {"type": "structural_tag", "format": _in_order(*_reasoning(constraint), _one_of(parts))}
    return {"structural_tag": json.dumps(form)}


def _reasoning(constraint: Constraint) -> list[_Format]:
    if not constraint.thought:
        return []
    tag: _Format = {"type": "tag", "begin": constraint.thinks, "content": _ANY_TEXT, "end": constraint.thought}
    whole = _in_order(tag, _AFTER_REASONING)
    return [{"type": "optional", "content": whole} if constraint.thinks else whole]


def _calls(constraint: Constraint) -> _Format:
    call = _one_of([_call(shape) for shape in constraint.calls])
    parts = [_text(constraint.opens), call]
    if constraint.between:
        parts.append({"type": "star", "content": _in_order(_text(constraint.between), call)})
    return _in_order(*parts, _text(constraint.closes))


def _call(shape: CallShape) -> _Format:
    return _in_order(_text(shape.head), _json(shape.schema))


def _json(schema: str) -> _Format:
    return {"type": "json_schema", "json_schema": json.loads(schema)}


def _text(value: str) -> _Format:
    return {"type": "const_string", "value": value}


def _in_order(*parts: _Format) -> _Format:
    shown = [part for part in parts if part.get("value") != ""]
    return shown[0] if len(shown) == 1 else {"type": "sequence", "elements": shown}


def _one_of(parts: list[_Format]) -> _Format:
    return parts[0] if len(parts) == 1 else {"type": "or", "elements": parts}
