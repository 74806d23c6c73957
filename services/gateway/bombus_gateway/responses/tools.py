"""The tools of a request. The model sees only functions; their calls are returned in the client's own forms. Pure.

A custom tool takes free text: the model sees a function with one text argument. Names of functions in a namespace are
prefixed with the namespace's name.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from bombus.errors import Code
from bombus_gateway.call.request import Unsupported
from bombus_gateway.decoding.json_body import FREE_TEXT, STRICT, BadParameter, check_count_of_tools, function_tool

FREE_TEXT_PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {FREE_TEXT: {"type": "string", "description": "The whole input of the tool, as plain text."}},
    "required": [FREE_TEXT],
}
_SHOWN = ("name", "description", "parameters")
_SERVER_TOOL = "a tool of type {!r} runs on the server, which has no tools"


class ToolForm(msgspec.Struct, frozen=True):
    """The client's form of a tool: its name, its namespace if any, and whether it takes free text (`is_custom`)."""

    name: str
    namespace: str = ""
    is_custom: bool = False


class RequestTools(msgspec.Struct, frozen=True):
    """The tools of a request. The model sees `functions`; `forms` contains the tools that are not plain functions.

    The keys of `forms` are the names that the model sees.
    """

    functions: list[dict[str, Any]] = []
    forms: dict[str, ToolForm] = {}
    unsupported: list[Unsupported] = []


def name_for_model(name: str, namespace: str | None) -> str:
    return f"{namespace}__{name}" if namespace else name


def read_tools(given: Sequence[tuple[str, Mapping[str, Any]]]) -> RequestTools:
    """Read tools, each with its place in the body. Raises `BadParameter`."""
    tools = RequestTools([], {}, [])
    for place, tool in given:
        if tool.get("type") != "namespace":
            _add(tools, tool, place, "")
            continue
        namespace, inner = tool.get("name"), tool.get("tools")
        if not isinstance(namespace, str) or not isinstance(inner, list) or not all(isinstance(t, dict) for t in inner):
            raise BadParameter(Code.MALFORMED, place, "A namespace needs a name and a list of tools.")
        for index, each in enumerate(inner):
            _add(tools, each, f"{place}.tools.{index}", namespace)
    check_count_of_tools(len(tools.functions))
    return tools


def forms_of(functions: Sequence[Mapping[str, Any]]) -> dict[str, ToolForm]:
    """Return the custom tools among recorded functions. Namespaces cannot be recognised from names."""
    named = [tool["function"] for tool in functions]
    custom = [each["name"] for each in named if each.get("parameters") == FREE_TEXT_PARAMETERS]
    return {name: ToolForm(name, is_custom=True) for name in custom}


def text_of_arguments(arguments: str) -> str:
    """Return the text that a model passed to a custom tool. If the arguments have another form, return everything that
    the model wrote."""
    try:
        value = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        return arguments
    text = value.get(FREE_TEXT) if isinstance(value, dict) else value
    return text if isinstance(text, str) else arguments


def _add(tools: RequestTools, tool: Mapping[str, Any], place: str, namespace: str) -> None:
    kind = tool.get("type", "function")
    if kind not in ("function", "custom"):
        tools.unsupported.append(Unsupported(f"{place}.type", _SERVER_TOOL.format(str(kind)[:40])))
        return
    if tool.get("strict"):
        tools.unsupported.append(STRICT)
    is_custom = kind == "custom"
    shown = {key: tool.get(key) for key in _SHOWN} | (_as_function(tool) if is_custom else {})
    name = tool.get("name")
    known = name_for_model(name, namespace) if isinstance(name, str) else name
    tools.functions.append(function_tool({**shown, "name": known}, place))
    if isinstance(name, str) and isinstance(known, str) and (is_custom or namespace):
        tools.forms[known] = ToolForm(name, namespace, is_custom)


def _as_function(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a custom tool's description and parameters as shown to the model, including the grammar for its text."""
    texts = [tool.get("description") or ""]
    grammar = tool.get("format")
    if isinstance(grammar, Mapping) and isinstance(grammar.get("definition"), str):
        texts.append(f"The input follows this {grammar.get('syntax') or ''} grammar:\n{grammar['definition']}")
    return {"description": "\n\n".join(filter(None, map(str, texts))) or None, "parameters": FREE_TEXT_PARAMETERS}
