"""The requests of OpenAI's SDK: decoded strictly, and turned into a neutral `CompletionRequest`. Pure.

A parameter that does not change what is sampled may have any value; one that would change it is obeyed or refused by
name, never ignored.
"""

import json
import re
from typing import Annotated, Any, Literal, NoReturn, TypeVar

import msgspec
from msgspec import Meta

from bombus.errors import Code, Refused
from bombus.hive.records import TEMPERATURE_MIN
from bombus_gateway import limits
from bombus_gateway.call.request import CompletionRequest
from bombus_gateway.text.message import ChatMessage

Unused = Any  # a known name whose value is only checked, or does not matter


class BadParameter(Refused):
    """A refusal that names the parameter of the request, as OpenAI's error bodies do."""

    def __init__(self, code: Code, param: str, why: str) -> None:
        super().__init__(code, why)
        self.param = param


class OpenAIRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request of either route: the neutral part, and what only the response needs."""

    completion: CompletionRequest
    model: str
    include_usage: bool = False


class _StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


_Name = Annotated[str, Meta(max_length=limits.NAME_CHARACTERS)]


class _Function(msgspec.Struct, forbid_unknown_fields=True):
    name: _Name
    arguments: str = ""


class _ToolCall(msgspec.Struct, forbid_unknown_fields=True):
    function: _Function
    id: _Name | None = None
    type: Literal["function"] = "function"
    index: int | None = None


class _Message(msgspec.Struct, forbid_unknown_fields=True):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[dict[str, Any]] | None = None
    name: _Name | None = None
    tool_calls: Annotated[list[_ToolCall], Meta(max_length=limits.CALLS_IN_MESSAGE)] | None = None
    tool_call_id: _Name | None = None
    refusal: str | None = None
    annotations: list[Unused] | None = None
    audio: Unused = None
    function_call: Unused = None
    reasoning_content: str | None = None
    reasoning: str | None = None


_Probability = Annotated[float, Meta(gt=0, le=1)]
_Penalty = Annotated[float, Meta(ge=-2, le=2)]
_Count = Annotated[int, Meta(ge=1)]


class _Common(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    model: _Name
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: _Probability | None = None
    top_k: int | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    max_tokens: _Count | None = None
    frequency_penalty: _Penalty | None = None
    presence_penalty: _Penalty | None = None
    repetition_penalty: float | None = None
    min_p: float | None = None
    logit_bias: dict[str, float] | None = None
    user: str | None = None


class _ChatBody(_Common, forbid_unknown_fields=True, kw_only=True):
    messages: Annotated[list[_Message], Meta(min_length=1)]
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    max_completion_tokens: _Count | None = None
    chat_template_kwargs: dict[str, bool | int | float | str] | None = None
    functions: list[Unused] | None = None
    function_call: Unused = None
    audio: Unused = None
    modalities: list[str] | None = None
    prediction: Unused = None
    response_format: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    web_search_options: Unused = None
    metadata: dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    store: bool | None = None
    service_tier: str | None = None
    verbosity: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None


class _CompletionBody(_Common, forbid_unknown_fields=True, kw_only=True):
    prompt: str | list[Unused]
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    best_of: int | None = None
    echo: bool | None = None
    suffix: str | None = None


_Body = TypeVar("_Body", bound=_Common)
_chat = msgspec.json.Decoder(_ChatBody)
_completion = msgspec.json.Decoder(_CompletionBody)
_packed = msgspec.msgpack.Encoder().encode  # as the log has it
_unknown = re.compile(r"unknown field `([^`]+)`")
_may_be_surrogate = re.compile(r"\\u[dD][89a-fA-F]")
_place = re.compile(r" - at `\$\.?([^`]*)`$")


def read_chat(body: bytes) -> OpenAIRequest:
    """Decode the body of `POST /v1/chat/completions`. Raises `Refused`, naming the parameter."""
    found = _decode(_chat, body)
    _check_common(found)
    _check_tools(found)
    _check_output(found)
    if found.top_logprobs and not found.logprobs:
        raise BadParameter(Code.MALFORMED, "top_logprobs", "top_logprobs needs logprobs to be true.")
    if found.max_tokens and found.max_completion_tokens and found.max_tokens != found.max_completion_tokens:
        raise BadParameter(
            Code.MALFORMED, "max_tokens", "max_tokens and max_completion_tokens differ: give only one of them."
        )
    tools = tuple(_tool(tool, index) for index, tool in enumerate(found.tools or ()))
    completion = CompletionRequest(
        chat=True,
        messages=tuple([_message(message, index) for index, message in enumerate(found.messages)]),
        tools=tools,
        parse_tool_calls=bool(tools) and found.tool_choice != "none",
        logprobs=bool(found.logprobs),
        top_logprobs=found.top_logprobs or 0,
        max_tokens=found.max_completion_tokens or found.max_tokens,
        chat_template_kwargs=found.chat_template_kwargs or {},
        **_common_fields(found),
    )
    return OpenAIRequest(completion=completion, model=found.model, include_usage=_wants_usage(found))


def read_completion(body: bytes) -> OpenAIRequest:
    """Decode the body of `POST /v1/completions`. Raises `Refused`, naming the parameter."""
    found = _decode(_completion, body)
    _check_common(found)
    if found.best_of not in (None, 1, found.n or 1):
        _unsupported("best_of", "only as many completions are sampled as are returned; leave best_of out")
    if found.echo:
        _unsupported("echo", "prompts are not scored")
    if found.suffix:
        _unsupported("suffix", "text is not inserted")
    completion = CompletionRequest(
        chat=False,
        prompt=_prompt(found.prompt),
        logprobs=found.logprobs is not None,
        top_logprobs=found.logprobs or 0,
        max_tokens=found.max_tokens,
        **_common_fields(found),
    )
    return OpenAIRequest(completion=completion, model=found.model, include_usage=_wants_usage(found))


def _wants_usage(found: _Common) -> bool:
    return bool(found.stream_options and found.stream_options.include_usage)


def _common_fields(found: _Common) -> dict[str, Any]:
    if found.temperature is not None and 0 < found.temperature < TEMPERATURE_MIN:
        why = f"temperature is {found.temperature}: give 0 for the most likely token, or at least {TEMPERATURE_MIN}."
        raise BadParameter(Code.MALFORMED, "temperature", why)
    return {
        "n": found.n or 1,
        "stops": _stops(found.stop),
        "stream": bool(found.stream),
        "temperature": found.temperature,
        "top_p": 1.0 if found.top_p is None else found.top_p,
        "top_k": max(found.top_k or 0, 0),
        "seed": found.seed,
    }


def _decode(decoder: msgspec.json.Decoder[_Body], body: bytes) -> _Body:
    try:
        return decoder.decode(body)
    except msgspec.MsgspecError as error:
        _refuse_body(error)
    except UnicodeDecodeError as error:
        raise Refused(Code.MALFORMED, f"The body is not UTF-8: {error}.") from None
    except RecursionError:
        raise Refused(Code.MALFORMED, "The body is nested too deeply.") from None


def _refuse_body(error: msgspec.MsgspecError) -> NoReturn:
    text = str(error)
    unknown = _unknown.search(text)
    place = _place.search(text)
    where = place.group(1) if place else ""
    if unknown:
        name = f"{where}.{unknown.group(1)}" if where else unknown.group(1)
        raise BadParameter(Code.UNKNOWN_FIELD, name, f"Unrecognized request argument supplied: {name}.") from None
    if isinstance(error, msgspec.ValidationError):
        problem = _place.sub("", text)
        raise BadParameter(Code.MALFORMED, where, f"{where or 'The body'}: {problem}.") from None
    raise Refused(Code.MALFORMED, f"The body could not be read as JSON: {text}.") from None


def _unsupported(param: str, why: str) -> NoReturn:
    raise BadParameter(Code.UNSUPPORTED, param, f"{param} is not supported here: {why}.")


def _check_common(found: _Common) -> None:
    for name in ("frequency_penalty", "presence_penalty", "min_p"):
        if getattr(found, name):
            _unsupported(name, "recorded probabilities would not be those of the model; leave it out or send 0")
    if found.repetition_penalty not in (None, 1):
        _unsupported("repetition_penalty", "recorded probabilities would not be those of the model; leave it out")
    if found.logit_bias:
        _unsupported("logit_bias", "recorded probabilities would not be those of the model; leave it out")
    if found.stream_options is not None and not found.stream:
        raise BadParameter(Code.MALFORMED, "stream_options", "stream_options is only allowed when stream is true.")


def _check_tools(found: _ChatBody) -> None:
    if found.functions:
        _unsupported("functions", "it is the old form of tools; send tools")
    if found.function_call not in (None, "none", "auto"):
        _unsupported("function_call", "it is the old form of tool_choice; send tools and leave it out")
    if found.tool_choice not in (None, "auto", "none"):
        _unsupported("tool_choice", "a call cannot be forced on the model; send 'auto' or 'none'")
    if found.tool_choice == "auto" and not found.tools:
        raise BadParameter(Code.MALFORMED, "tool_choice", "tool_choice is only allowed when tools are specified.")


def _check_output(found: _ChatBody) -> None:
    """Refuse what would constrain or change the output."""
    if found.response_format is not None and found.response_format.get("type") != "text":
        _unsupported("response_format", "the output is not constrained; ask for the format in the prompt")
    if found.modalities not in (None, ["text"]):
        _unsupported("modalities", "this is a model of text")
    if found.reasoning_effort not in (None, "none"):
        _unsupported("reasoning_effort", "the model's template decides; leave it out, or send chat_template_kwargs")
    if found.verbosity not in (None, "medium"):
        _unsupported("verbosity", "the model has no such setting; leave it out")
    if found.service_tier not in (None, "auto", "default"):
        _unsupported("service_tier", "there is only one; leave it out")
    for name in ("audio", "prediction", "web_search_options"):
        if getattr(found, name) is not None:
            _unsupported(name, "the model has nothing of the kind; leave it out")


def _stops(stop: str | list[str] | None) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(stops) > limits.STOPS or any(not text or len(text) > limits.STOP_CHARACTERS for text in stops):
        raise BadParameter(
            Code.MALFORMED,
            "stop",
            f"stop takes up to {limits.STOPS} texts of 1 to {limits.STOP_CHARACTERS} characters.",
        )
    return stops


def _prompt(prompt: str | list[Any]) -> str | list[int]:
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if not prompt:
        raise BadParameter(Code.MALFORMED, "prompt", "prompt is empty.")
    if isinstance(prompt, list) and not all(type(token) is int and token >= 0 for token in prompt):
        _unsupported("prompt", "send one text, or the token ids of one; several prompts are several requests")
    return prompt


def _check_message(found: _Message, place: str) -> None:
    if found.role == "function":
        _unsupported(f"{place}.role", "'function' is the old form of 'tool'")
    for name in ("audio", "function_call"):
        if getattr(found, name):
            _unsupported(f"{place}.{name}", "only text and tool calls are understood")


def _message(found: _Message, index: int) -> ChatMessage:
    """Return a message as it is stored, compared and rendered: text content, null only beside calls."""
    place = f"messages.{index}"
    _check_message(found, place)
    content = None if found.content is None and found.tool_calls else _text(found.content, f"{place}.content")
    message: ChatMessage = {"role": found.role, "content": content}
    if found.refusal and not content:
        message["content"] = found.refusal
    if found.name:
        message["name"] = found.name
    if found.role == "assistant":
        reasoning = found.reasoning_content or found.reasoning
        if reasoning:
            message["reasoning_content"] = reasoning
        if found.tool_calls:
            message["tool_calls"] = [
                _tool_call(call, f"{place}.tool_calls.{at}") for at, call in enumerate(found.tool_calls)
            ]
    elif found.tool_calls:
        raise BadParameter(Code.MALFORMED, f"{place}.tool_calls", "Only an assistant's message has tool_calls.")
    if found.tool_call_id is not None:
        message["tool_call_id"] = found.tool_call_id
    elif found.role == "tool":
        raise BadParameter(Code.MALFORMED, f"{place}.tool_call_id", "A tool's message names the call that it answers.")
    return message


def _text(content: str | list[dict[str, Any]] | None, place: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    texts: list[str] = []
    for index, part in enumerate(content):
        kind = part.get("type")
        text = part.get("text" if kind == "text" else "refusal")
        if kind not in ("text", "refusal") or not isinstance(text, str):
            _unsupported(f"{place}.{index}", f"a content part of type {kind!r} is not text")
        texts.append(text)
    return "".join(texts)


def _tool_call(call: _ToolCall, place: str) -> dict[str, Any]:
    _check_arguments(call.function.arguments, f"{place}.function.arguments")
    function = {"name": call.function.name, "arguments": call.function.arguments}
    return {"id": call.id or "", "type": "function", "function": function}


def _check_arguments(arguments: str, place: str) -> None:
    """Refuse arguments that are JSON with half a character, or too deep: they would fail where they are rendered.

    What is not JSON is rendered as text.
    """
    if arguments.count("[") + arguments.count("{") <= limits.DEPTH and not _may_be_surrogate.search(arguments):
        return
    try:
        value = json.loads(arguments)
        if limits.is_deeper(value):
            raise RecursionError
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise BadParameter(Code.MALFORMED, place, f"{place} has half of a surrogate pair.") from None
    except ValueError:
        return
    except RecursionError:
        raise BadParameter(Code.MALFORMED, place, f"{place} is nested deeper than {limits.DEPTH}.") from None


def _tool(tool: dict[str, Any], index: int) -> dict[str, Any]:
    place = f"tools.{index}"
    if index >= limits.TOOLS:
        raise BadParameter(Code.MALFORMED, "tools", f"More than {limits.TOOLS} tools.")
    function = tool.get("function")
    if tool.get("type", "function") != "function" or not isinstance(function, dict):
        _unsupported(f"{place}.type", "a tool is a function")
    name = function.get("name")
    if not isinstance(name, str) or not 0 < len(name) <= limits.NAME_CHARACTERS:
        why = f"A tool has a name, of up to {limits.NAME_CHARACTERS} characters."
        raise BadParameter(Code.MALFORMED, f"{place}.function.name", why)
    kept = {key: value for key, value in function.items() if value is not None}
    if limits.is_deeper(kept):
        raise BadParameter(
            Code.MALFORMED, f"{place}.function", f"{place}.function is nested deeper than {limits.DEPTH}."
        )
    try:
        _packed(kept)
    except OverflowError:
        raise BadParameter(
            Code.MALFORMED, f"{place}.function", f"{place}.function has a whole number of more than 64 bits."
        ) from None
    return {"type": "function", "function": kept}
