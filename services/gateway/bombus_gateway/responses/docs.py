"""The OpenAPI description of the Responses routes, which are answered outside FastAPI."""

from collections.abc import Sequence
from typing import Any

from bombus_gateway.responses.request import RESPONSE_ID, ResponsesBody
from bombus_gateway.schemas import (
    BEARER,
    CHOICES_OF_TOOLS,
    NAME,
    SOME_TEXT,
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
)

# ---- requests -----------------------------------------------------------------------------------------------------


def _texts(*kinds: str) -> JsonSchema:
    return any_of(str, array_of(object_of(type=one_of(*kinds), text=str)))


_SUMMARY = array_of(object_of(type=one_of("summary_text"), text=str))
_INPUT_ITEM = any_of(
    object_of(
        "type",
        type=one_of("message"),
        role=one_of("user", "system", "developer", "assistant"),
        content=_texts("input_text", "output_text"),
    ),
    object_of(type=one_of("reasoning"), summary=_SUMMARY),
    object_of(type=one_of("function_call"), call_id=NAME, name=NAME, arguments=str),
    object_of(type=one_of("custom_tool_call"), call_id=NAME, name=NAME, input=str),
    object_of(
        type=one_of("function_call_output", "custom_tool_call_output"), call_id=NAME, output=_texts("input_text")
    ),
)
_FUNCTION = object_of("description", "parameters", type=one_of("function"), name=NAME, description=str, parameters=dict)
_CUSTOM = object_of("description", "format", type=one_of("custom"), name=NAME, description=str, format=dict)
_NAMESPACE = object_of(type=one_of("namespace"), name=NAME, tools=array_of(any_of(_FUNCTION, _CUSTOM)))
_REQUEST = request_of(
    ResponsesBody,
    ("background", "conversation", "prompt"),
    input={
        **any_of(SOME_TEXT, array_of(_INPUT_ITEM, minItems=1)),
        "description": "a text, or items; it may be missing only if previous_response_id is given",
    },
    instructions={"description": "the system message, for this request only"},
    previous_response_id={
        "pattern": f"^{RESPONSE_ID}[0-9a-f]{{32}}$",
        "description": "the response to an earlier call of the episode, whose conversation the input continues",
    },
    tools={
        **array_of(any_of(_FUNCTION, _CUSTOM, _NAMESPACE)),
        "description": "functions, custom tools, and namespaces of these",
    },
    tool_choice=any_of(one_of(*CHOICES_OF_TOOLS), dict),
)

# ---- answers ------------------------------------------------------------------------------------------------------

_STATUS = one_of("completed", "incomplete")
_CALLED: dict[str, Any] = {"id": str, "status": _STATUS, "call_id": str, "name": str, "namespace": str}
_Objects = list[dict[str, Any]]
_TEXT_PART = object_of(type=one_of("output_text"), text=str, annotations=_Objects, logprobs=_Objects)
_ITEM = any_of(
    object_of(id=str, type=one_of("message"), status=_STATUS, role=one_of("assistant"), content=array_of(_TEXT_PART)),
    object_of(
        "encrypted_content",
        id=str,
        type=one_of("reasoning"),
        summary=_SUMMARY,
        encrypted_content={"type": "string", "description": "the call's id, if `include` asks for it"},
    ),
    object_of("namespace", **_CALLED, type=one_of("function_call"), arguments=str),
    object_of("namespace", **_CALLED, type=one_of("custom_tool_call"), input=str),
)
_USAGE = object_of(
    input_tokens=int,
    input_tokens_details=object_of(cached_tokens=int, cache_write_tokens=int),
    output_tokens=int,
    output_tokens_details=object_of(reasoning_tokens=int),
    total_tokens=int,
)
_AS_ASKED = {"description": "as it was in the request"}
_ECHOED = ("max_tool_calls", "prompt_cache_key", "safety_identifier", "user")  # only if the request has them
_RESPONSE = object_of(
    *_ECHOED,
    id=str,
    object=one_of("response"),
    created_at=int,
    status=_STATUS,
    background={"type": "boolean", "enum": [False]},
    error=None,
    incomplete_details=any_of(object_of(reason=one_of("max_output_tokens")), None),
    instructions=str | None,
    max_output_tokens=int | None,
    previous_response_id=str | None,
    temperature=float | None,
    top_p=float | None,
    metadata=_AS_ASKED,
    reasoning=_AS_ASKED,
    service_tier=_AS_ASKED,
    store=_AS_ASKED,
    text=_AS_ASKED,
    tool_choice=any_of(str, dict),
    tools=_Objects,
    truncation=str,
    **dict.fromkeys(_ECHOED, _AS_ASKED),
    model=str,
    output=array_of(_ITEM),
    parallel_tool_calls={"type": "boolean", "enum": [True]},
    usage=_USAGE,
)
_OF_RESPONSE = (
    *("created", "in_progress", "completed", "incomplete", "output_item.added", "output_item.done"),
    *("content_part.added", "content_part.done", "output_text.delta", "output_text.done"),
    *("reasoning_summary_part.added", "reasoning_summary_part.done"),
    *("reasoning_summary_text.delta", "reasoning_summary_text.done"),
    *("function_call_arguments.delta", "function_call_arguments.done"),
    *("custom_tool_call_input.delta", "custom_tool_call_input.done"),
)
_EVENT = event_of(*(f"response.{name}" for name in _OF_RESPONSE), "keepalive", "error")


def add_responses_paths(document: JsonSchema, prefixes: Sequence[str]) -> None:
    """Add the Responses routes under each prefix to an OpenAPI document that already has OpenAI's error body."""
    agents = DescribedAPI("openai", [BEARER], answered("OpenAI's error body", "OpenAIError"))
    created = agents.route("Response", answered("A response, or its events", "OpenAIResponse", _EVENT), _REQUEST)
    stored = answered("The response as it was recorded", "OpenAIResponse")
    earlier = agents.route("An earlier response of the key's episode", stored, place="response_id")
    routes = {"/v1/responses": {"post": created}, "/v1/responses/{response_id}": {"get": earlier}}
    add_routes(document, prefixes, routes, OpenAIResponse=_RESPONSE)
