"""The OpenAPI description of the OpenAI routes, written by hand because they are answered outside FastAPI."""

from typing import Any

from bombus.config.template_variables import VARIABLES_MAX

_ERROR = {
    "description": "OpenAI's error body",
    "content": {"application/json": {"schema": {"$ref": "#/components/schemas/OpenAIError"}}},
}
_ERRORS = {"400": _ERROR, "401": _ERROR, "403": _ERROR, "413": _ERROR, "503": _ERROR}
_NUMBER: dict[str, Any] = {"type": "number"}
_INTEGER: dict[str, Any] = {"type": "integer"}
_SAMPLING: dict[str, Any] = {
    "model": {"type": "string", "description": "any name; the key leads to the engine"},
    "n": {**_INTEGER, "default": 1, "minimum": 1},
    "max_tokens": {**_INTEGER, "description": "default and limit: the job's max_response_length_in_one_turn"},
    "temperature": {**_NUMBER, "minimum": 0, "maximum": 2, "description": "default: the job's"},
    "top_p": {**_NUMBER, "default": 1, "description": "below 1 only in eval episodes, unless the job allows it"},
    "seed": _INTEGER,
    "stop": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]},
    "stream": {"type": "boolean", "default": False},
    "stream_options": {"type": "object", "properties": {"include_usage": {"type": "boolean"}}},
}
_CHAT: dict[str, Any] = {
    "type": "object",
    "required": ["model", "messages"],
    "properties": {
        "messages": {"type": "array", "items": {"type": "object"}, "minItems": 1},
        "tools": {"type": "array", "items": {"type": "object"}},
        "tool_choice": {"type": "string", "enum": ["auto", "none"]},
        "logprobs": {"type": "boolean", "default": False},
        "top_logprobs": {**_INTEGER, "minimum": 0, "maximum": 20},
        "max_completion_tokens": _INTEGER,
        "chat_template_kwargs": {
            "type": "object",
            "description": "variables of the chat template, which win over the job's; where the job allows them",
            "additionalProperties": {"anyOf": [{"type": "boolean"}, _NUMBER, {"type": "string"}]},
            "maxProperties": VARIABLES_MAX,
        },
        **_SAMPLING,
    },
}
_COMPLETION: dict[str, Any] = {
    "type": "object",
    "required": ["model", "prompt"],
    "properties": {
        "prompt": {"anyOf": [{"type": "string"}, {"type": "array", "items": _INTEGER}]},
        "logprobs": {**_INTEGER, "minimum": 0, "maximum": 20},
        **_SAMPLING,
    },
}
_ERROR_BODY: dict[str, Any] = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": "string", "nullable": True},
                "code": {"type": "string"},
            },
        }
    },
}


def add_openai_paths(schema: dict[str, Any], prefix: str) -> None:
    """Add the OpenAI routes under `prefix` to an OpenAPI document."""
    paths = schema.setdefault("paths", {})
    paths[f"{prefix}/v1/chat/completions"] = {"post": _post("Chat", _CHAT, "chat.completion")}
    paths[f"{prefix}/v1/completions"] = {"post": _post("Plain completion", _COMPLETION, "text_completion")}
    paths[f"{prefix}/v1/models"] = {
        "get": {"tags": ["openai"], "summary": "The engine's model", "responses": {"200": {"description": "A list"}}}
    }
    components = schema.setdefault("components", {})
    components.setdefault("schemas", {})["OpenAIError"] = _ERROR_BODY
    components.setdefault("securitySchemes", {})["episode_key"] = {"type": "http", "scheme": "bearer"}


def _post(summary: str, body: dict[str, Any], answer: str) -> dict[str, Any]:
    return {
        "tags": ["openai"],
        "summary": summary,
        "security": [{"episode_key": []}],
        "requestBody": {"required": True, "content": {"application/json": {"schema": body}}},
        "responses": {"200": {"description": f"A {answer}, or its chunks as server-sent events"}, **_ERRORS},
    }
