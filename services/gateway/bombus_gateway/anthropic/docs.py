"""The OpenAPI description of Anthropic's routes, written by hand because they are answered outside FastAPI."""

from typing import Any

from bombus_gateway.schemas import (
    INTEGER,
    NAME,
    NUMBER,
    OBJECT,
    OVERRIDDEN,
    STRING,
    array_of,
    object_of,
    one_of,
    or_null,
)


def _block(kind: str, **fields: Any) -> dict[str, Any]:
    """Describe a block of content of a type, with all of these fields."""
    return object_of({"type": one_of(kind), **fields})


_TEXT = _block("text", text=STRING)
_THINKING = _block("thinking", thinking=STRING, signature={**STRING, "description": "to be sent back"})
_TOOL_USE = _block("tool_use", id=NAME, name=NAME, input=OBJECT)
_TEXTS: dict[str, Any] = {"anyOf": [STRING, array_of(_TEXT)]}
_TOOL_RESULT = _block("tool_result", tool_use_id=NAME, content=_TEXTS)
_CONTENT: dict[str, Any] = {
    "description": "text, or blocks; those of other types are not understood",
    "anyOf": [STRING, array_of({"anyOf": [_TEXT, _THINKING, _TOOL_USE, _TOOL_RESULT]})],
}
_MESSAGE = object_of({"role": one_of("user", "assistant", "system"), "content": _CONTENT})
_TOOL: dict[str, Any] = {
    "type": "object",
    "required": ["name", "input_schema"],
    "properties": {
        "name": NAME,
        "description": STRING,
        "input_schema": OBJECT,
        "defer_loading": {"type": "boolean", "description": "not shown to the model until a tool_reference names it"},
    },
}
_PROMPT: dict[str, Any] = {
    "model": {**STRING, "maxLength": 256, "description": "any name; the key leads to the engine"},
    "messages": array_of(_MESSAGE, minItems=1),
    "system": _TEXTS,
    "tools": array_of(_TOOL),
    "tool_choice": {
        "type": "object",
        "required": ["type"],
        "properties": {"type": one_of("auto", "none")},
    },
}
_MESSAGES: dict[str, Any] = {
    "type": "object",
    "required": ["model", "messages"],
    "properties": {
        **_PROMPT,
        "max_tokens": {
            **INTEGER,
            "minimum": 1,
            "description": "default and limit: the job's max_response_length_in_one_turn",
        },
        "temperature": {**NUMBER, "minimum": 0, "maximum": 2, "description": "default: the job's"},
        "top_p": {
            **NUMBER,
            "exclusiveMinimum": 0,
            "maximum": 1,
            "default": 1,
            "description": "below 1 only in eval episodes, unless the job allows it",
        },
        "top_k": {**INTEGER, "description": "only in eval episodes, unless the job allows it"},
        "stop_sequences": array_of({**STRING, "minLength": 1, "maxLength": 256}, maxItems=16),
        "stream": {"type": "boolean", "default": False},
    },
}
_COUNT: dict[str, Any] = {"type": "object", "required": ["model", "messages"], "properties": _PROMPT}
_USAGE = object_of(
    {
        "input_tokens": {**INTEGER, "description": "without those that were cached"},
        "cache_creation_input_tokens": INTEGER,
        "cache_read_input_tokens": INTEGER,
        "output_tokens": INTEGER,
    }
)
_ANSWER = object_of(
    {
        "id": STRING,
        "type": one_of("message"),
        "role": one_of("assistant"),
        "model": STRING,
        "content": array_of({"anyOf": [_TEXT, _THINKING, _TOOL_USE]}),
        "stop_reason": one_of("end_turn", "max_tokens", "stop_sequence", "tool_use"),
        "stop_sequence": or_null(STRING),
        "usage": _USAGE,
    }
)
_COUNTED = object_of({"input_tokens": INTEGER})
_ERROR_BODY = object_of({"type": one_of("error"), "error": object_of({"type": STRING, "message": STRING})})
_ERROR = {
    "description": "Anthropic's error body",
    "content": {"application/json": {"schema": {"$ref": "#/components/schemas/AnthropicError"}}},
}
_EVENT_NAMES = (
    *("message_start", "content_block_start", "content_block_delta", "content_block_stop", "message_delta"),
    *("message_stop", "ping", "error"),
)
_EVENT = object_of({"event": one_of(*_EVENT_NAMES), "data": {**STRING, "contentMediaType": "application/json"}})
_ERRORS = dict.fromkeys(("400", "401", "403", "404", "405", "413", "503"), _ERROR)


def add_anthropic_paths(schema: dict[str, Any], prefix: str) -> None:
    """Add Anthropic's routes under `prefix` to an OpenAPI document."""
    paths = schema.setdefault("paths", {})
    message = {
        "description": "A message, or its events",
        "content": {
            **_json({"$ref": "#/components/schemas/AnthropicMessage"}),
            "text/event-stream": {"itemSchema": _EVENT},
        },
        "headers": OVERRIDDEN,
    }
    counted = {
        "description": "The number of tokens; nothing is recorded",
        "content": _json({"$ref": "#/components/schemas/AnthropicTokens"}),
    }
    paths[f"{prefix}/v1/messages"] = {"post": _post("Messages", _MESSAGES, message)}
    paths[f"{prefix}/v1/messages/count_tokens"] = {"post": _post("The tokens of a prompt", _COUNT, counted)}
    components = schema.setdefault("components", {})
    named = {"AnthropicError": _ERROR_BODY, "AnthropicMessage": _ANSWER, "AnthropicTokens": _COUNTED}
    components.setdefault("schemas", {}).update(named)
    components.setdefault("securitySchemes", {})["episode_key"] = {"type": "http", "scheme": "bearer"}
    components["securitySchemes"]["episode_x_api_key"] = {"type": "apiKey", "in": "header", "name": "x-api-key"}


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


def _post(summary: str, body: dict[str, Any], answered: dict[str, Any]) -> dict[str, Any]:
    return {
        "tags": ["anthropic"],
        "summary": summary,
        "security": [{"episode_x_api_key": []}, {"episode_key": []}],
        "requestBody": {"required": True, "content": _json(body)},
        "responses": {"200": answered, **_ERRORS},
    }
