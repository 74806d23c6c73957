"""The OpenAPI description of the OpenAI routes, which are answered outside FastAPI."""

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any

from msgspec import Meta

from bombus.config.template_variables import VARIABLES_MAX
from bombus_gateway import limits
from bombus_gateway.decoding.parameters import Name
from bombus_gateway.openai.request import ChatBody, CompletionBody, StreamOptions
from bombus_gateway.openai.tokenizing import DetokenizeBody, TokenizeBody
from bombus_gateway.schemas import (
    BEARER,
    CHOICES_OF_TOOLS,
    NAME,
    SOME_TEXT,
    Described,
    DescribedAPI,
    JsonSchema,
    add_routes,
    answered,
    any_of,
    array_of,
    named,
    object_of,
    one_of,
    request_of,
    schema_of,
)
from bombus_gateway.text.thinking import NEAREST, NO_EFFORT

# ---- requests -----------------------------------------------------------------------------------------------------

_PARTS = array_of(object_of(type=one_of("text"), text=str))
_TEXTS = any_of(str, _PARTS) | {"description": "text, or parts of type text; other parts are not supported"}
_CALLED = object_of(name=Name, arguments={"type": "string", "description": "JSON"})
_CALL = object_of(id=Name, type=one_of("function"), function=_CALLED)
_ASSISTANT = object_of(
    "reasoning_content",
    "tool_calls",
    role=one_of("assistant"),
    content=any_of(str, _PARTS, None),
    reasoning_content=str,
    tool_calls=array_of(_CALL, maxItems=limits.CALLS_IN_MESSAGE),
)
_MESSAGE = any_of(
    object_of(role=one_of("system", "developer", "user"), content=_TEXTS),
    _ASSISTANT,
    object_of(role=one_of("tool"), content=_TEXTS, tool_call_id=Name),
)
_MESSAGES = array_of(_MESSAGE, minItems=1)
_FUNCTION = object_of("description", "parameters", name=NAME, description=str, parameters=dict)
_TOOLS = array_of(object_of(type=one_of("function"), function=_FUNCTION))
_Stop = Annotated[str, Meta(max_length=limits.STOP_CHARACTERS)]
_TokenId = Annotated[int, Meta(ge=0)]
_SAMPLING: dict[str, JsonSchema] = {
    "n": {"default": 1, "maximum": limits.CHOICES},
    "stop": any_of(_Stop, Annotated[list[_Stop | _TokenId], Meta(max_length=limits.STOPS)]),
    "stream_options": request_of(StreamOptions) | {"description": "only with stream"},
}
_STREAMED = {"stream_options": {"required": ["stream"], "properties": {"stream": {"const": True}}}}
_CHAT = request_of(
    ChatBody,
    ("functions", "function_call", "audio", "prediction", "web_search_options"),
    **_SAMPLING,
    messages=_MESSAGES,
    tools=_TOOLS,
    tool_choice=any_of(one_of(*CHOICES_OF_TOOLS), dict) | {"description": "only with tools"},
    logprobs={"default": False},
    top_logprobs={"description": "only with logprobs"},
    chat_template_kwargs={
        "description": "variables of the chat template, which override the job's; only if the job allows them",
        "maxProperties": VARIABLES_MAX,
    },
    reasoning_effort={
        **one_of(NO_EFFORT, *NEAREST),
        "description": "passed to the chat template, in the variables that the template reads",
    },
) | {
    "dependentRequired": {"tool_choice": ["tools"], "top_logprobs": ["logprobs"]},
    "dependentSchemas": _STREAMED,
}
_SomeTokens = Annotated[list[Annotated[int, Meta(ge=0)]], Meta(min_length=1)]
_COMPLETION = request_of(
    CompletionBody, ("best_of", "echo", "suffix"), **_SAMPLING, prompt=any_of(SOME_TEXT, _SomeTokens)
) | {"dependentSchemas": _STREAMED}
_TOKENIZE = request_of(TokenizeBody, messages=_MESSAGES, tools=_TOOLS, return_token_strs={"default": False}) | {
    "oneOf": [{"required": ["prompt"]}, {"required": ["messages"]}]
}

# ---- answers ------------------------------------------------------------------------------------------------------

_TOKEN: dict[str, Any] = {"token": str, "logprob": float, "bytes": list[int]}
_CHAT_LOGPROBS = object_of(
    content=array_of(object_of(**_TOKEN, top_logprobs=array_of(object_of(**_TOKEN)))), refusal=None
)
_TEXT_LOGPROBS = object_of(
    tokens=list[str], token_logprobs=list[float], top_logprobs=list[dict[str, float]] | None, text_offset=list[int]
)
_ANSWER = object_of(
    "tool_calls",
    "reasoning_content",
    role=one_of("assistant"),
    content=str | None,
    refusal=None,
    tool_calls=array_of(_CALL),
    reasoning_content=str,
)
_USAGE = object_of(
    prompt_tokens=int,
    completion_tokens=int,
    total_tokens=int,
    prompt_tokens_details=object_of(cached_tokens=int),
    completion_tokens_details=object_of(reasoning_tokens=int),
)


def _completion_of(kind: str, **choice: Described) -> JsonSchema:
    """Describe the answer to a model call, with the given fields in its choices."""
    finish = one_of("stop", "length", "tool_calls")
    return object_of(
        id=str,
        object=one_of(kind),
        created=int,
        model=str,
        choices=array_of(object_of(index=int, finish_reason=finish, **choice)),
        usage=_USAGE,
        system_fingerprint={
            **any_of(str, None),
            "description": "bombus-V, or bombus-V-W if it was sampled by policy versions V to W",
        },
    )


def add_openai_paths(document: JsonSchema, prefixes: Sequence[str]) -> None:
    """Add the OpenAI routes under each prefix to an OpenAPI document."""
    chunk = object_of(data={"type": "string", "description": "a chunk, or [DONE]"})
    called = partial(answered, "The answer, or its chunks as server-sent events", event=chunk)
    agents = DescribedAPI("openai", [BEARER], answered("OpenAI's error body", "OpenAIError"))
    models = agents._replace(keys=[BEARER, "client_key"]).route
    refused = agents._replace(keys=[]).route("Embeddings are refused: the model makes text", None, schema_of(dict))
    tokens, text = answered("The tokens", "TokenizedText"), answered("The text", "DetokenizedText")
    tokenize = agents.route("The tokens of a text or chat, as in vLLM", tokens, _TOKENIZE)
    detokenize = agents.route("The text of tokens, as in vLLM", text, request_of(DetokenizeBody))
    one = models("A model, by any name that calls may use", answered("The model", "OpenAIModel"), place="model")
    routes = {
        "/v1/chat/completions": {"post": agents.route("Chat", called("ChatCompletion"), _CHAT)},
        "/v1/completions": {"post": agents.route("Plain completion", called("TextCompletion"), _COMPLETION)},
        "/v1/models": {"get": models("The engine's model", answered("A list", "OpenAIModels"))},
        "/v1/models/{model}": {"get": one},
        "/v1/embeddings": {"post": refused},
        "/tokenize": {"post": tokenize},
        "/detokenize": {"post": detokenize},
        "/v1/tokenize": {"post": tokenize},
        "/v1/detokenize": {"post": detokenize},
    }
    add_routes(
        document,
        prefixes,
        routes,
        OpenAIError=object_of(error=object_of(message=str, type=str, param=str | None, code=str)),
        OpenAIUsage=_USAGE,
        ChatCompletion=_completion_of("chat.completion", logprobs=any_of(_CHAT_LOGPROBS, None), message=_ANSWER),
        TextCompletion=_completion_of("text_completion", logprobs=any_of(_TEXT_LOGPROBS, None), text=str),
        OpenAIModel=object_of(id=str, object=one_of("model"), created=int, owned_by=str),
        OpenAIModels=object_of(object=one_of("list"), data=array_of(named("OpenAIModel"))),
        TokenizedText=object_of(count=int, max_model_len=int, tokens=list[int], token_strs=list[str] | None),
        DetokenizedText=object_of(prompt=str),
    )
