"""The OpenAPI description of Anthropic's routes, which are answered outside FastAPI."""

from collections.abc import Sequence
from typing import Annotated

from msgspec import Meta

from bombus_gateway import limits
from bombus_gateway.anthropic.request import MessagesBody, ToolChoice
from bombus_gateway.schemas import (
    BEARER,
    NAME,
    X_API_KEY,
    Described,
    DescribedAPI,
    JsonSchema,
    add_routes,
    answered,
    any_of,
    array_of,
    event_of,
    object_of,
    one_of,
    request_of,
    schema_of,
)


def _block(kind: str, **fields: Described) -> JsonSchema:
    """Describe a content block of type `kind` that has all of these fields."""
    return object_of(type=one_of(kind), **fields)


_TEXT = _block("text", text=str)
_THINKING = _block("thinking", thinking=str, signature={"type": "string", "description": "to be sent back"})
_TOOL_USE = _block("tool_use", id=NAME, name=NAME, input=dict)
_TEXTS = any_of(str, array_of(_TEXT))
_TOOL_RESULT = _block("tool_result", tool_use_id=NAME, content=_TEXTS)
_CONTENT = any_of(str, array_of(any_of(_TEXT, _THINKING, _TOOL_USE, _TOOL_RESULT)))
_MESSAGE = object_of(
    role=one_of("user", "assistant", "system"),
    content={"description": "text, or blocks of these types; others are not supported", **_CONTENT},
)
_TOOL = object_of(
    "description",
    "defer_loading",
    name=NAME,
    description=str,
    input_schema=dict,
    defer_loading={"type": "boolean", "description": "not shown to the model until a tool_reference names it"},
)
_Stops = Annotated[
    list[Annotated[str, Meta(min_length=1, max_length=limits.STOP_CHARACTERS)]], Meta(max_length=limits.STOPS)
]
_REQUEST = request_of(
    MessagesBody,
    ("container", "mcp_servers"),
    messages=array_of(_MESSAGE, minItems=1),
    system=_TEXTS,
    tools=array_of(_TOOL),
    tool_choice=request_of(ToolChoice, type=one_of("auto", "any", "tool", "none")),
    top_k={"description": "only in eval episodes, unless the job allows it"},
    stop_sequences=schema_of(_Stops),
)
_OF_PROMPT = ("model", "messages", "system", "tools", "tool_choice")
_PROMPT = _REQUEST | {"properties": {name: _REQUEST["properties"][name] for name in _OF_PROMPT}}
_EVENT = event_of(
    *("message_start", "content_block_start", "content_block_delta", "content_block_stop", "message_delta"),
    *("message_stop", "ping", "error"),
)


def add_anthropic_paths(document: JsonSchema, prefixes: Sequence[str]) -> None:
    """Add Anthropic's routes under each prefix to an OpenAPI document."""
    agents = DescribedAPI("anthropic", [X_API_KEY, BEARER], answered("Anthropic's error body", "AnthropicError"))
    message = answered("A message, or its events", "AnthropicMessage", _EVENT)
    counted = answered("The number of tokens; nothing is recorded", "AnthropicTokens")
    routes = {
        "/v1/messages": {"post": agents.route("Messages", message, _REQUEST)},
        "/v1/messages/count_tokens": {"post": agents.route("The tokens of a prompt", counted, _PROMPT)},
    }
    usage = object_of(
        input_tokens={"type": "integer", "description": "without cached tokens"},
        cache_creation_input_tokens=int,
        cache_read_input_tokens=int,
        output_tokens=int,
    )
    answer = object_of(
        id=str,
        type=one_of("message"),
        role=one_of("assistant"),
        model=str,
        content=array_of(any_of(_TEXT, _THINKING, _TOOL_USE)),
        stop_reason=one_of("end_turn", "max_tokens", "stop_sequence", "tool_use"),
        stop_sequence=str | None,
        usage=usage,
    )
    add_routes(
        document,
        prefixes,
        routes,
        AnthropicError=object_of(type=one_of("error"), error=object_of(type=str, message=str)),
        AnthropicMessage=answer,
        AnthropicTokens=object_of(input_tokens=int),
    )
