"""The OpenAPI description of the Responses routes, written by hand because they are answered outside FastAPI."""

from typing import Any

from bombus_gateway.schemas import INTEGER, NAME, NULL, OBJECT, OVERRIDDEN, STRING, array_of, object_of, one_of, or_null

# ---- requests -----------------------------------------------------------------------------------------------------


def _texts(*kinds: str) -> dict[str, Any]:
    return {"anyOf": [STRING, array_of(object_of({"type": one_of(*kinds), "text": STRING}))]}


_SUMMARY = array_of(object_of({"type": one_of("summary_text"), "text": STRING}))
_INPUT_ITEM: dict[str, Any] = {
    "anyOf": [
        object_of(
            {
                "type": one_of("message"),
                "role": one_of("user", "system", "developer", "assistant"),
                "content": _texts("input_text", "output_text"),
            },
            "type",
        ),
        object_of({"type": one_of("reasoning"), "summary": _SUMMARY}),
        object_of({"type": one_of("function_call"), "call_id": NAME, "name": NAME, "arguments": STRING}),
        object_of({"type": one_of("custom_tool_call"), "call_id": NAME, "name": NAME, "input": STRING}),
        object_of(
            {
                "type": one_of("function_call_output", "custom_tool_call_output"),
                "call_id": NAME,
                "output": _texts("input_text"),
            }
        ),
    ]
}
_FUNCTION = object_of(
    {"type": one_of("function"), "name": NAME, "description": STRING, "parameters": OBJECT},
    "description",
    "parameters",
)
_CUSTOM = object_of(
    {"type": one_of("custom"), "name": NAME, "description": STRING, "format": OBJECT}, "description", "format"
)
_NAMESPACE = object_of(
    {"type": one_of("namespace"), "name": NAME, "tools": array_of({"anyOf": [_FUNCTION, _CUSTOM]})},
)
_REQUEST: dict[str, Any] = {
    "type": "object",
    "required": ["model"],
    "properties": {
        "model": {**STRING, "maxLength": 256, "description": "any name; the key leads to the engine"},
        "input": {
            "anyOf": [{**STRING, "minLength": 1}, array_of(_INPUT_ITEM, minItems=1)],
            "description": "a text, or items; only after previous_response_id it may be missing",
        },
        "instructions": {**STRING, "description": "the system's message, of this request alone"},
        "previous_response_id": {
            **STRING,
            "pattern": "^resp_[0-9a-f]{32}$",
            "description": "the response to an earlier call of the episode, after whose conversation the input comes",
        },
        "tools": {
            **array_of({"anyOf": [_FUNCTION, _CUSTOM, _NAMESPACE]}),
            "description": "functions, custom tools, and namespaces of these",
        },
        "tool_choice": one_of("auto", "none"),
        "max_output_tokens": {
            **INTEGER,
            "minimum": 1,
            "description": "default and limit: the job's max_response_length_in_one_turn",
        },
        "temperature": {"type": "number", "minimum": 0, "maximum": 2, "description": "default: the job's"},
        "top_p": {"type": "number", "exclusiveMinimum": 0, "maximum": 1, "default": 1},
        "stream": {"type": "boolean", "default": False},
        "include": array_of(STRING),
    },
}

# ---- answers ------------------------------------------------------------------------------------------------------

_STATUS = one_of("completed", "incomplete")
_CALLED = {"id": STRING, "status": _STATUS, "call_id": STRING, "name": STRING, "namespace": STRING}
_TEXT_PART = object_of(
    {"type": one_of("output_text"), "text": STRING, "annotations": array_of(OBJECT), "logprobs": array_of(OBJECT)}
)
_ITEM: dict[str, Any] = {
    "anyOf": [
        object_of(
            {
                "id": STRING,
                "type": one_of("message"),
                "status": _STATUS,
                "role": one_of("assistant"),
                "content": array_of(_TEXT_PART),
            }
        ),
        object_of(
            {
                "id": STRING,
                "type": one_of("reasoning"),
                "summary": _SUMMARY,
                "encrypted_content": {**STRING, "description": "the call's id, where `include` asks for it"},
            },
            "encrypted_content",
        ),
        object_of({**_CALLED, "type": one_of("function_call"), "arguments": STRING}, "namespace"),
        object_of({**_CALLED, "type": one_of("custom_tool_call"), "input": STRING}, "namespace"),
    ]
}
_USAGE = object_of(
    {
        "input_tokens": INTEGER,
        "input_tokens_details": object_of({"cached_tokens": INTEGER, "cache_write_tokens": INTEGER}),
        "output_tokens": INTEGER,
        "output_tokens_details": object_of({"reasoning_tokens": INTEGER}),
        "total_tokens": INTEGER,
    }
)
_AS_ASKED: dict[str, Any] = {"description": "as it was in the request"}
_ECHOED = ("max_tool_calls", "prompt_cache_key", "safety_identifier", "user")  # only where the request has them
_RESPONSE = object_of(
    {
        "id": STRING,
        "object": one_of("response"),
        "created_at": INTEGER,
        "status": _STATUS,
        "background": {"type": "boolean", "enum": [False]},
        "error": NULL,
        "incomplete_details": or_null(object_of({"reason": one_of("max_output_tokens")})),
        "instructions": or_null(STRING),
        "max_output_tokens": or_null(INTEGER),
        "previous_response_id": or_null(STRING),
        "temperature": or_null({"type": "number"}),
        "top_p": or_null({"type": "number"}),
        "metadata": _AS_ASKED,
        "reasoning": _AS_ASKED,
        "service_tier": _AS_ASKED,
        "store": _AS_ASKED,
        "text": _AS_ASKED,
        "tool_choice": {"anyOf": [STRING, OBJECT]},
        "tools": array_of(OBJECT),
        "truncation": STRING,
        **dict.fromkeys(_ECHOED, _AS_ASKED),
        "model": STRING,
        "output": array_of(_ITEM),
        "parallel_tool_calls": {"type": "boolean", "enum": [True]},
        "usage": _USAGE,
    },
    *_ECHOED,
)
_OF_RESPONSE = (
    *("created", "in_progress", "completed", "incomplete", "output_item.added", "output_item.done"),
    *("content_part.added", "content_part.done", "output_text.delta", "output_text.done"),
    *("reasoning_summary_part.added", "reasoning_summary_part.done"),
    *("reasoning_summary_text.delta", "reasoning_summary_text.done"),
    *("function_call_arguments.delta", "function_call_arguments.done"),
    *("custom_tool_call_input.delta", "custom_tool_call_input.done"),
)
_EVENT = object_of(
    {
        "event": one_of(*(f"response.{name}" for name in _OF_RESPONSE), "keepalive", "error"),
        "data": {**STRING, "contentMediaType": "application/json"},
    }
)
_ANSWER = {"application/json": {"schema": {"$ref": "#/components/schemas/OpenAIResponse"}}}
_ERROR = {
    "description": "OpenAI's error body",
    "content": {"application/json": {"schema": {"$ref": "#/components/schemas/OpenAIError"}}},
}
_ERRORS = dict.fromkeys(("400", "401", "403", "404", "405", "413", "503"), _ERROR)


def add_responses_paths(schema: dict[str, Any], prefix: str) -> None:
    """Add the Responses routes under `prefix` to an OpenAPI document, which has OpenAI's error body already."""
    schema["components"]["schemas"]["OpenAIResponse"] = _RESPONSE
    common: dict[str, Any] = {"tags": ["openai"], "security": [{"episode_key": []}]}
    content = {**_ANSWER, "text/event-stream": {"itemSchema": _EVENT}}
    answered = {"description": "A response, or its events", "content": content, "headers": OVERRIDDEN}
    schema["paths"][f"{prefix}/v1/responses"] = {
        "post": {
            **common,
            "summary": "Response",
            "requestBody": {"required": True, "content": {"application/json": {"schema": _REQUEST}}},
            "responses": {"200": answered, **_ERRORS},
        }
    }
    named = {"name": "response_id", "in": "path", "required": True, "schema": {**STRING, "minLength": 1}}
    stored = {"description": "The response as it was recorded", "content": _ANSWER}
    schema["paths"][f"{prefix}/v1/responses/{{response_id}}"] = {
        "get": {
            **common,
            "summary": "An earlier response of the key's episode",
            "parameters": [named],
            "responses": {"200": stored, **_ERRORS},
        }
    }
