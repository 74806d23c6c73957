"""The ways in which harnesses spell the text and the arguments of an answer anew. Pure."""

import json
from typing import Any

from tests.histories.answers import STOP
from tests.histories.entries import SaidCall, Style


def spelled(text: str, style: Style) -> str:
    """Return the text of an answer as a harness writes it back."""
    match style.spaces:
        case "stripped":
            return text.strip()
        case "carriage returns":
            return text.replace("\n", "\r\n")
        case "wrapped":
            return " \n".join(text.split())
        case "stop put back":
            return f"{text.strip()}{STOP}"
        case "as it was":
            return text


def call_name(call: SaidCall, style: Style) -> str:
    return "invalid" if style.arguments == "renamed" else call.name


def arguments_text(call: SaidCall, style: Style) -> str:
    """Return the arguments of a call as a harness writes them back, as text."""
    text = call.arguments
    value = json.loads(text)
    match style.arguments:
        case "as they were":
            return text
        case "written anew":
            return json.dumps(value, separators=(",", ":"), sort_keys=True) if value else "null"
        case "whole numbers":
            return json.dumps(_whole(value), ensure_ascii=False) if value else ""
        case "by a schema":
            return json.dumps({**{key: str(each) for key, each in value.items()}, "replace_all": False})
        case "renamed":
            return json.dumps({"tool": call.name, "error": "no such tool"})


def arguments_object(call: SaidCall, style: Style) -> Any:
    """Return the arguments of a call as an object, for dialects that send one."""
    text = arguments_text(call, style)
    return (json.loads(text) if text else None) or {}


def _whole(value: Any) -> Any:
    """Return a value as JavaScript writes it, in which 5.0 is 5."""
    if isinstance(value, dict):
        return {key: _whole(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_whole(each) for each in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value
