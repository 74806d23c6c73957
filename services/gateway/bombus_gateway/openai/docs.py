"""The OpenAPI description of the OpenAI routes, written by hand because they are answered outside FastAPI."""

from collections.abc import Mapping
from typing import Any

from bombus.config.template_variables import VARIABLES_MAX
from bombus_gateway.schemas import (
    BOOLEAN,
    INTEGER,
    NULL,
    NUMBER,
    OBJECT,
    OVERRIDDEN,
    STRING,
    array_of,
    object_of,
    one_of,
    or_null,
)
from bombus_gateway.text.thinking import NEAREST, NO_EFFORT

# ---- requests -----------------------------------------------------------------------------------------------------

_TEXTS: dict[str, Any] = {
    "description": "text, or parts of type text; others are not understood",
    "anyOf": [STRING, array_of(object_of({"type": one_of("text"), "text": STRING}))],
}
_FUNCTION = object_of(
    {"name": {**STRING, "minLength": 1, "maxLength": 256}, "description": STRING, "parameters": OBJECT},
    "description",
    "parameters",
)
_CALLED = object_of({"name": {**STRING, "maxLength": 256}, "arguments": {**STRING, "description": "JSON"}})
_CALL = object_of({"id": {**STRING, "maxLength": 256}, "type": one_of("function"), "function": _CALLED})
_MESSAGE: dict[str, Any] = {
    "anyOf": [
        object_of({"role": one_of("system", "developer", "user"), "content": _TEXTS}),
        object_of(
            {
                "role": one_of("assistant"),
                "content": {"anyOf": [*_TEXTS["anyOf"], NULL]},
                "reasoning_content": STRING,
                "tool_calls": array_of(_CALL, maxItems=256),
            },
            "reasoning_content",
            "tool_calls",
        ),
        object_of({"role": one_of("tool"), "content": _TEXTS, "tool_call_id": {**STRING, "maxLength": 256}}),
    ]
}
_TOOLS = array_of(object_of({"type": one_of("function"), "function": _FUNCTION}))
_SAMPLING: dict[str, Any] = {
    "model": {**STRING, "maxLength": 256, "description": "any name; the key leads to the engine"},
    "n": {**INTEGER, "default": 1, "minimum": 1, "maximum": 64},
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
    "seed": {**INTEGER, "minimum": -(2**63), "maximum": 2**63 - 1},
    "stop": {
        "anyOf": [
            {**STRING, "minLength": 1, "maxLength": 256},
            array_of({**STRING, "minLength": 1, "maxLength": 256}, maxItems=16),
        ]
    },
    "stream": {**BOOLEAN, "default": False},
    "stream_options": {**object_of({"include_usage": BOOLEAN}, "include_usage"), "description": "only with stream"},
}
_STREAMED: dict[str, Any] = {"required": ["stream"], "properties": {"stream": {"const": True}}}
_CHAT: dict[str, Any] = {
    "type": "object",
    "required": ["model", "messages"],
    "properties": {
        "messages": array_of(_MESSAGE, minItems=1),
        "tools": _TOOLS,
        "tool_choice": {**one_of("auto", "none"), "description": "only with tools"},
        "logprobs": {**BOOLEAN, "default": False},
        "top_logprobs": {**INTEGER, "minimum": 0, "maximum": 20, "description": "only with logprobs"},
        "max_completion_tokens": {**INTEGER, "minimum": 1},
        "chat_template_kwargs": {
            "type": "object",
            "description": "variables of the chat template, which win over the job's; where the job allows them",
            "additionalProperties": {"anyOf": [BOOLEAN, NUMBER, STRING]},
            "maxProperties": VARIABLES_MAX,
        },
        "reasoning_effort": {
            **one_of(NO_EFFORT, *NEAREST),
            "description": "given to the chat template, by the names that it reads",
        },
        **_SAMPLING,
    },
    "dependentRequired": {"tool_choice": ["tools"], "top_logprobs": ["logprobs"]},
    "dependentSchemas": {"stream_options": _STREAMED},
}
_COMPLETION: dict[str, Any] = {
    "type": "object",
    "required": ["model", "prompt"],
    "properties": {
        "prompt": {"anyOf": [{**STRING, "minLength": 1}, array_of({**INTEGER, "minimum": 0}, minItems=1)]},
        "logprobs": {**INTEGER, "minimum": 0, "maximum": 20},
        **_SAMPLING,
    },
    "dependentSchemas": {"stream_options": _STREAMED},
}
_TOKENIZE: dict[str, Any] = {
    "type": "object",
    "oneOf": [{"required": ["prompt"]}, {"required": ["messages"]}],
    "properties": {
        "prompt": STRING,
        "messages": array_of(_MESSAGE, minItems=1),
        "tools": _TOOLS,
        "add_generation_prompt": {**BOOLEAN, "default": True},
        "return_token_strs": {**BOOLEAN, "default": False},
    },
}
_DETOKENIZE = object_of({"tokens": array_of({**INTEGER, "minimum": 0})})

# ---- answers ------------------------------------------------------------------------------------------------------

_FINISH = one_of("stop", "length", "tool_calls")
_TOKEN = {"token": STRING, "logprob": NUMBER, "bytes": array_of(INTEGER)}
_CHAT_LOGPROBS = object_of(
    {"content": array_of(object_of({**_TOKEN, "top_logprobs": array_of(object_of(_TOKEN))})), "refusal": NULL}
)
_TEXT_LOGPROBS = object_of(
    {
        "tokens": array_of(STRING),
        "token_logprobs": array_of(NUMBER),
        "top_logprobs": or_null(array_of({"type": "object", "additionalProperties": NUMBER})),
        "text_offset": array_of(INTEGER),
    }
)
_ANSWER = object_of(
    {
        "role": one_of("assistant"),
        "content": or_null(STRING),
        "refusal": NULL,
        "tool_calls": array_of(_CALL),
        "reasoning_content": STRING,
    },
    "tool_calls",
    "reasoning_content",
)
_USAGE = object_of(
    {
        "prompt_tokens": INTEGER,
        "completion_tokens": INTEGER,
        "total_tokens": INTEGER,
        "prompt_tokens_details": object_of({"cached_tokens": INTEGER}),
        "completion_tokens_details": object_of({"reasoning_tokens": INTEGER}),
    }
)


def _completion_of(kind: str, choice: Mapping[str, Any]) -> dict[str, Any]:
    """Describe the answer of a model call, with its choices."""
    choices = array_of(object_of({"index": INTEGER, "finish_reason": _FINISH, **choice}))
    head = {"id": STRING, "object": one_of(kind), "created": INTEGER, "model": STRING}
    sampled_by = {**or_null(STRING), "description": "bombus-V, or bombus-V-W where policy versions V to W sampled it"}
    return object_of({**head, "choices": choices, "usage": _USAGE, "system_fingerprint": sampled_by})


_MODEL = object_of({"id": STRING, "object": one_of("model"), "created": INTEGER, "owned_by": STRING})
_TOKENS = object_of(
    {
        "count": INTEGER,
        "max_model_len": INTEGER,
        "tokens": array_of(INTEGER),
        "token_strs": or_null(array_of(STRING)),
    }
)
_ERROR_BODY = object_of(
    {"error": object_of({"message": STRING, "type": STRING, "param": or_null(STRING), "code": STRING})}
)
_SCHEMAS: dict[str, Any] = {
    "OpenAIError": _ERROR_BODY,
    "OpenAIUsage": _USAGE,
    "ChatCompletion": _completion_of("chat.completion", {"logprobs": or_null(_CHAT_LOGPROBS), "message": _ANSWER}),
    "TextCompletion": _completion_of("text_completion", {"logprobs": or_null(_TEXT_LOGPROBS), "text": STRING}),
    "OpenAIModel": _MODEL,
    "OpenAIModels": object_of(
        {"object": one_of("list"), "data": array_of({"$ref": "#/components/schemas/OpenAIModel"})}
    ),
    "TokenizedText": _TOKENS,
    "DetokenizedText": object_of({"prompt": STRING}),
}
_EVENTS = {"text/event-stream": {"itemSchema": object_of({"data": {**STRING, "description": "a chunk, or [DONE]"}})}}
_BEARER: list[dict[str, list[str]]] = [{"episode_key": []}]
_KEYS: list[dict[str, list[str]]] = [*_BEARER, {"client_key": []}]


def add_openai_paths(schema: dict[str, Any], prefix: str) -> None:
    """Add the OpenAI routes under `prefix` to an OpenAPI document."""
    components = schema.setdefault("components", {})
    components.setdefault("schemas", {}).update(_SCHEMAS)
    components.setdefault("securitySchemes", {})["episode_key"] = {"type": "http", "scheme": "bearer"}
    paths = schema.setdefault("paths", {})
    paths[f"{prefix}/v1/chat/completions"] = {"post": _call("Chat", _CHAT, "ChatCompletion")}
    paths[f"{prefix}/v1/completions"] = {"post": _call("Plain completion", _COMPLETION, "TextCompletion")}
    paths[f"{prefix}/v1/models"] = {"get": _route("The engine's model", _KEYS, _answered("A list", "OpenAIModels"))}
    name = {"name": "model", "in": "path", "required": True, "schema": {**STRING, "minLength": 1}}
    model = _route("A model, by any name that calls may give", _KEYS, _answered("The model", "OpenAIModel"))
    paths[f"{prefix}/v1/models/{{model}}"] = {"get": {**model, "parameters": [name]}}
    paths[f"{prefix}/v1/embeddings"] = {
        "post": {**_route("Embeddings are refused: the model makes text", [], None), "requestBody": _body(OBJECT)}
    }
    tokenized, text = _answered("The tokens", "TokenizedText"), _answered("The text", "DetokenizedText")
    for below in (prefix, f"{prefix}/v1"):
        tokenize = _route("The tokens of a text or chat, as in vLLM", _BEARER, tokenized)
        paths[f"{below}/tokenize"] = {"post": {**tokenize, "requestBody": _body(_TOKENIZE)}}
        detokenize = _route("The text of tokens, as in vLLM", _BEARER, text)
        paths[f"{below}/detokenize"] = {"post": {**detokenize, "requestBody": _body(_DETOKENIZE)}}


def _call(summary: str, body: dict[str, Any], answer: str) -> dict[str, Any]:
    """Describe a route of model calls, whose answer comes whole or as events."""
    answered = _answered("The answer, or its chunks as server-sent events", answer)
    answered = {**answered, "content": {**answered["content"], **_EVENTS}, "headers": OVERRIDDEN}
    return {**_route(summary, _BEARER, answered), "requestBody": _body(body)}


def _route(summary: str, security: list[dict[str, list[str]]], answer: dict[str, Any] | None) -> dict[str, Any]:
    """Describe a route; `answer` is that to a request which is not refused, None where all are."""
    error = _answered("OpenAI's error body", "OpenAIError")
    errors = dict.fromkeys(("400", "401", "403", "404", "405", "413", "503"), error)
    responses = {**({"200": answer} if answer is not None else {}), **errors}
    return {"tags": ["openai"], "summary": summary, "security": security, "responses": responses}


def _answered(description: str, schema: str) -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{schema}"}}}
    return {"description": description, "content": content}


def _body(schema: dict[str, Any]) -> dict[str, Any]:
    return {"required": True, "content": {"application/json": {"schema": schema}}}
