"""The requests that OpenAI's SDK sends: decoded strictly, and converted to a neutral `CompletionRequest`. Pure.

Parameters that do not affect sampling may have any value. A client may request sampling parameters; the job determines
whether they are used. Unsupported and unknown parameters are listed as `unsupported`; the job determines whether they
are refused or ignored. Unknown fields in messages are always ignored.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, NoReturn

import msgspec
from msgspec import Meta

from bombus.errors import Code
from bombus_gateway import limits
from bombus_gateway.call.prefixes import NOTHING_READ, BodyPrefix
from bombus_gateway.call.request import CompletionRequest, RequestedSampling, Unsupported, requested_top_p
from bombus_gateway.decoding.items import ItemReader
from bombus_gateway.decoding.json_body import (
    ANY_OBJECT,
    STRICT,
    Asked,
    BadParameter,
    BodyDecoder,
    arguments_of_text,
    check_count_of_tools,
    checked_arguments,
    decode_body,
    decode_field,
    demand_of_calls,
    demand_of_json,
    function_tool,
    split_asked,
    stop_strings,
    stop_tokens,
    thinking_of_effort,
)
from bombus_gateway.decoding.json_parts import RememberedParts
from bombus_gateway.decoding.parameters import AnswerLength, ModelName, Name, Streamed, Temperature, TopP
from bombus_gateway.text.message import ChatMessage

Unused = Any  # type of known fields whose value is only checked, or does not matter


class OpenAIRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request to either route: its neutral part, and the fields that only the response needs.

    `prefix` is the beginning of the body, which need not be read again for the conversation's next request.
    """

    completion: CompletionRequest
    model: str
    include_usage: bool = False
    prefix: BodyPrefix = NOTHING_READ


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class _Function(msgspec.Struct):
    name: Name
    arguments: str | None = None


class _Custom(msgspec.Struct):
    name: Name
    input: str | None = None


class _ToolCall(msgspec.Struct):
    """A call to a function, or to a tool that takes free text."""

    function: _Function | None = None
    custom: _Custom | None = None
    id: Name | None = None
    type: Unused = None
    index: Unused = None


class _Message(msgspec.Struct):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[dict[str, Any]] | None = None
    name: Name | None = None
    tool_calls: Annotated[list[_ToolCall], Meta(max_length=limits.CALLS_IN_MESSAGE)] | None = None
    tool_call_id: Name | None = None
    refusal: str | None = None
    annotations: Unused = None
    audio: Unused = None
    function_call: Unused = None
    reasoning_content: str | None = None
    reasoning: Any = None  # an object in some versions of OpenRouter's API


_Penalty = Annotated[float, Meta(ge=-2, le=2)]


class _Common(msgspec.Struct, kw_only=True):
    model: ModelName
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    stop: str | list[str | int] | None = None
    stop_token_ids: list[int] | None = None
    stream: Streamed | None = None
    stream_options: StreamOptions | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: int | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    max_tokens: AnswerLength | None = None
    frequency_penalty: _Penalty | None = None
    presence_penalty: _Penalty | None = None
    repetition_penalty: float | None = None
    min_p: float | None = None
    logit_bias: dict[str, float] | None = None
    user: Unused = None


class ChatBody(_Common, kw_only=True):
    messages: Annotated[list[msgspec.Raw], Meta(min_length=1)]  # list of `_Message`
    tools: msgspec.Raw = msgspec.Raw(b"null")  # list of objects, or null
    tool_choice: str | dict[str, Any] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    max_completion_tokens: AnswerLength | None = None
    chat_template_kwargs: dict[str, bool | int | float | str] | None = None
    functions: list[Unused] | None = None
    function_call: Unused = None
    audio: Unused = None
    modalities: list[str] | None = None
    prediction: Unused = None
    response_format: dict[str, Any] | None = None
    reasoning_effort: Any = None
    web_search_options: Unused = None
    metadata: Unused = None
    parallel_tool_calls: bool | None = None
    store: Unused = None
    service_tier: str | None = None
    verbosity: str | None = None
    prompt_cache_key: Unused = None
    prompt_cache_retention: Unused = None
    safety_identifier: Unused = None


class CompletionBody(_Common, kw_only=True):
    prompt: str | list[Unused]
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    best_of: int | None = None
    echo: bool | None = None
    suffix: str | None = None


class _Messages(NamedTuple):
    """Messages in the form in which they are stored, compared and rendered, and the parts of them that are not text."""

    messages: tuple[ChatMessage, ...] = ()
    left_out: tuple[Unsupported, ...] = ()


class _ReadTools(NamedTuple):
    """The functions that the model may call, and the unsupported parts of the tools."""

    functions: tuple[dict[str, Any], ...]
    unsupported: tuple[Unsupported, ...]


_chat = BodyDecoder(ChatBody, "messages", "tools")
_chat_message = msgspec.json.Decoder(_Message)
_chat_tools = msgspec.json.Decoder(list[dict[str, Any]] | None)
_completion = BodyDecoder(CompletionBody, "prompt")


def read_chat(body: bytes, before: BodyPrefix = NOTHING_READ) -> OpenAIRequest:
    """Decode the body of `POST /v1/chat/completions`. `before` is the beginning of the body, which was read earlier.

    Raises `Refused`, naming the parameter that is invalid.
    """
    found, unknown, read, prefix = _read_chat(body, before)
    _check_stream_options(found)
    tools = _remembered_tools(bytes(found.tools))
    if found.tool_choice == "auto" and not (tools.functions or tools.unsupported):
        raise BadParameter(Code.MALFORMED, "tool_choice", "tool_choice is only allowed when tools are specified.")
    if found.top_logprobs and not found.logprobs:
        raise BadParameter(Code.MALFORMED, "top_logprobs", "top_logprobs needs logprobs to be true.")
    if found.max_tokens and found.max_completion_tokens and found.max_tokens != found.max_completion_tokens:
        raise BadParameter(
            Code.MALFORMED, "max_tokens", "max_tokens and max_completion_tokens differ: send only one of them."
        )
    thinking, unthought = thinking_of_effort("reasoning_effort", found.reasoning_effort)
    demands, unmet = split_asked(
        [_forced_call(found.tool_choice, tools.functions), _form_of_answer(found.response_format)]
    )
    unsupported = [
        *tools.unsupported,
        *read.left_out,
        *unmet,
        *unthought,
        *_beyond_chat(found),
        *unknown,
    ]
    completion = CompletionRequest(
        chat=True,
        messages=read.messages,
        tools=tools.functions,
        parse_tool_calls=bool(tools.functions) and found.tool_choice != "none",
        logprobs=bool(found.logprobs),
        top_logprobs=found.top_logprobs or 0,
        sampling=_sampling(found, found.max_completion_tokens or found.max_tokens),
        chat_template_kwargs=found.chat_template_kwargs or {},
        thinking=thinking,
        demands=demands,
        one_call="parallel_tool_calls" if found.parallel_tool_calls is False else "",
        unsupported=tuple(unsupported),
        length_field="max_completion_tokens" if found.max_completion_tokens else "max_tokens",
        **_common_fields(found),
    )
    return OpenAIRequest(completion=completion, model=found.model, include_usage=_wants_usage(found), prefix=prefix)


def read_completion(body: bytes) -> OpenAIRequest:
    """Decode the body of `POST /v1/completions`. Raises `Refused`, naming the parameter that is invalid."""
    found, unsupported = _completion(body)
    _check_stream_options(found)
    if found.echo:
        _refuse("echo", "prompts are not scored")
    if found.suffix:
        _refuse("suffix", "text is not inserted")
    if found.best_of not in (None, 1, found.n or 1):
        unsupported.append(Unsupported("best_of", "only as many completions are sampled as are returned"))
    completion = CompletionRequest(
        chat=False,
        prompt=_prompt(found.prompt),
        logprobs=found.logprobs is not None,
        top_logprobs=found.logprobs or 0,
        sampling=_sampling(found, found.max_tokens),
        unsupported=tuple(unsupported),
        **_common_fields(found),
    )
    return OpenAIRequest(completion=completion, model=found.model, include_usage=_wants_usage(found))


def _wants_usage(found: _Common) -> bool:
    return bool(found.stream_options and found.stream_options.include_usage)


def _common_fields(found: _Common) -> dict[str, Any]:
    texts, tokens = _stops(found.stop, found.stop_token_ids or ())
    return {"n": found.n or 1, "stops": texts, "stop_token_ids": tokens, "stream": bool(found.stream)}


def _sampling(found: _Common, max_tokens: int | None) -> RequestedSampling:
    return RequestedSampling(
        temperature=found.temperature,
        top_p=requested_top_p(found.top_p),
        top_k=max(found.top_k or 0, 0),
        min_p=found.min_p or 0.0,
        presence_penalty=found.presence_penalty or 0.0,
        frequency_penalty=found.frequency_penalty or 0.0,
        repetition_penalty=1.0 if found.repetition_penalty is None else found.repetition_penalty,
        logit_bias=_logit_bias(found.logit_bias or {}),
        seed=found.seed,
        max_tokens=max_tokens,
    )


def _logit_bias(given: dict[str, float]) -> dict[int, float]:
    try:
        return {int(token): bias for token, bias in given.items() if bias}
    except ValueError:
        raise BadParameter(Code.MALFORMED, "logit_bias", "The keys of logit_bias must be token ids.") from None


def _refuse(param: str, why: str) -> NoReturn:
    raise BadParameter(Code.UNSUPPORTED, param, f"{param} is not supported here: {why}.")


def _check_stream_options(found: _Common) -> None:
    if found.stream_options is not None and not found.stream:
        raise BadParameter(Code.MALFORMED, "stream_options", "stream_options is only allowed when stream is true.")


def _beyond_chat(found: ChatBody) -> list[Unsupported]:
    """Return the unsupported parameters that would change the answer."""
    asked = (
        ("functions", bool(found.functions), "it is the old form of tools; send tools"),
        ("function_call", found.function_call not in (None, "none", "auto"), "it is the old form of tool_choice"),
        ("modalities", found.modalities not in (None, ["text"]), "the model only generates text"),
        ("verbosity", found.verbosity not in (None, "medium"), "the model has no such setting"),
        ("service_tier", found.service_tier not in (None, "auto", "default"), "there is only one tier"),
        ("audio", found.audio is not None, "the model only generates text"),
        ("prediction", found.prediction is not None, "predicted outputs are not used"),
        ("web_search_options", found.web_search_options is not None, "there is no web search"),
    )
    return [Unsupported(name, why) for name, is_asked, why in asked if is_asked]


def _forced_call(choice: str | dict[str, Any] | None, tools: Sequence[Mapping[str, Any]]) -> Asked | None:
    """Return what a tool choice requires, or None if the model may choose whether to call a tool."""
    match choice:
        case None | "auto" | "none":
            return None
        case "required":
            return demand_of_calls("tool_choice", tools, None)
        case {"type": "function", "function": {"name": str(name)}}:
            return demand_of_calls("tool_choice", tools, [name], once=True)
        case {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [*allowed]}}:
            return demand_of_calls("tool_choice", tools, [_name_of(tool) for tool in allowed])
        case _:
            return Unsupported("tool_choice", "this tool choice is not known here")


def _name_of(tool: Any) -> str | None:
    match tool:
        case {"type": "function", "function": {"name": str(name)}}:
            return name
    return None


def _form_of_answer(response_format: dict[str, Any] | None) -> Asked | None:
    """Return what a response format requires, or None if the answer may be any text."""
    match response_format:
        case None | {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return demand_of_json("response_format", ANY_OBJECT)
        case {"type": "json_schema", "json_schema": {**form}}:
            return demand_of_json("response_format", form.get("schema", ANY_OBJECT))
        case _:
            return Unsupported("response_format", "the type must be text, json_object or json_schema")


def _stops(stop: str | list[str | int] | None, more: Sequence[int]) -> tuple[tuple[str, ...], tuple[int, ...]]:
    given = [stop] if isinstance(stop, str) else stop or []
    texts = [each for each in given if isinstance(each, str) and each]  # empty stop texts are ignored
    return stop_strings(texts, "stop"), stop_tokens([*(each for each in given if isinstance(each, int)), *more], "stop")


def _prompt(prompt: str | list[Any]) -> str | list[int]:
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if not prompt:
        raise BadParameter(Code.MALFORMED, "prompt", "prompt is empty.")
    if isinstance(prompt, list) and not all(type(token) is int and token >= 0 for token in prompt):
        _refuse("prompt", "send one text, or the token ids of one text; send several prompts as separate requests")
    return prompt


def _read_messages(before: _Messages | None, items: Sequence[bytes], at: int) -> _Messages:
    before = before or _Messages()
    left_out: list[Unsupported] = []
    messages = [
        _message(decode_body(_chat_message, item, f"messages[{index}]"), f"messages.{index}", left_out)
        for index, item in enumerate(items, at)
    ]
    return _Messages((*before.messages, *messages), (*before.left_out, *left_out))


def _message(found: _Message, place: str, left_out: list[Unsupported]) -> ChatMessage:
    """Return a message with its text as content. The content is None only if the message has tool calls and no
    content."""
    _check_role(found, place)
    if found.audio:
        left_out.append(Unsupported(f"{place}.audio", "only text and tool calls are understood", is_content=True))
    content = None if found.content is None and found.tool_calls else _text(found.content, f"{place}.content", left_out)
    message: ChatMessage = {"role": found.role, "content": content}
    if found.refusal and not content:
        message["content"] = found.refusal
    if found.name:
        message["name"] = found.name
    if found.role == "assistant":
        reasoning = found.reasoning_content or found.reasoning
        if isinstance(reasoning, str) and reasoning:
            message["reasoning_content"] = reasoning
        if found.tool_calls:
            message["tool_calls"] = [
                _tool_call(call, f"{place}.tool_calls.{at}") for at, call in enumerate(found.tool_calls)
            ]
    if found.tool_call_id is not None:
        message["tool_call_id"] = found.tool_call_id
    return message


def _check_role(found: _Message, place: str) -> None:
    """Raise `BadParameter` for deprecated forms, and for fields that do not match the message's role."""
    if found.role == "function":
        _refuse(f"{place}.role", "'function' is the old form of 'tool'")
    if found.function_call:
        _refuse(f"{place}.function_call", "it is the old form of tool_calls")
    if found.tool_calls and found.role != "assistant":
        raise BadParameter(Code.MALFORMED, f"{place}.tool_calls", "Only an assistant's message may have tool_calls.")
    if found.role == "tool" and found.tool_call_id is None:
        raise BadParameter(Code.MALFORMED, f"{place}.tool_call_id", "A tool message must name the call it answers.")


def _text(content: str | list[dict[str, Any]] | None, place: str, left_out: list[Unsupported]) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    texts: list[str] = []
    for index, part in enumerate(content):
        kind = part.get("type")
        text = part.get("text" if kind == "text" else "refusal")
        if kind in ("text", "refusal") and not isinstance(text, str):
            raise BadParameter(Code.MALFORMED, f"{place}.{index}", "A text part needs text.")
        if isinstance(text, str):
            texts.append(text)
        else:
            why = f"a content part of type {str(kind)[:40]!r} is not text"
            left_out.append(Unsupported(f"{place}.{index}", why, is_content=True))
    return "".join(texts)


def _tool_call(call: _ToolCall, place: str) -> dict[str, Any]:
    if call.custom is not None:
        function = {"name": call.custom.name, "arguments": arguments_of_text(call.custom.input or "")}
    elif call.function is not None:
        arguments = checked_arguments(call.function.arguments or "", f"{place}.function.arguments")
        function = {"name": call.function.name, "arguments": arguments}
    else:
        raise BadParameter(Code.MALFORMED, f"{place}.function", "A call must name the function that it calls.")
    return {"id": call.id or "", "type": "function", "function": function}


def _read_tools(given: bytes) -> _ReadTools:
    tools: list[dict[str, Any]] = []
    others: list[Unsupported] = []
    found = decode_field(_chat_tools, given, "tools") or []
    check_count_of_tools(len(found))
    for index, tool in enumerate(found):
        place = f"tools.{index}"
        function = tool.get("function")
        if tool.get("type", "function") == "function" and isinstance(function, dict):
            tools.append(function_tool(function, f"{place}.function"))
            others += [STRICT] if function.get("strict") else []
        else:
            others.append(Unsupported(f"{place}.type", "only functions can be called"))
    return _ReadTools(tuple(tools), tuple(others))


_read_chat = ItemReader(_chat, "messages", _read_messages)
_remembered_tools = RememberedParts(_read_tools)
