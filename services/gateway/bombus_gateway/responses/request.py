"""The requests of OpenAI's Responses API: decoded, and converted to a neutral `CompletionRequest`. Pure.

Fields that do not affect sampling may have any value. A client may request sampling parameters; the job determines
whether they are used. Unsupported and unknown parts are listed as `unsupported`; the job determines whether they are
refused or ignored.
"""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from bombus.errors import Code
from bombus_gateway import limits
from bombus_gateway.call.prefixes import NOTHING_READ, BodyPrefix
from bombus_gateway.call.request import CompletionRequest, RequestedSampling, Unsupported, requested_top_p
from bombus_gateway.decoding.items import ItemReader
from bombus_gateway.decoding.json_body import (
    ANY_OBJECT,
    Asked,
    BadParameter,
    BodyDecoder,
    decode_body,
    decode_field,
    demand_of_calls,
    demand_of_json,
    split_asked,
    thinking_of_effort,
    unknown_parts,
)
from bombus_gateway.decoding.json_parts import RememberedParts
from bombus_gateway.decoding.parameters import AnswerLength, ModelName, Streamed, Temperature, TopP
from bombus_gateway.responses.items import InputItem, InputReader
from bombus_gateway.responses.tools import RequestTools, ToolForm, read_tools
from bombus_gateway.text.message import ChatMessage

RESPONSE_ID = "resp_"  # followed by the id of the call
ENCRYPTED = "reasoning.encrypted_content"
LOGPROBS = "message.output_text.logprobs"
# Accepted values of `include`: reasoning for the client to send back, and parts of items that only server-side tools
# make.
_OF_ITEMS = frozenset(
    {
        ENCRYPTED,
        "code_interpreter_call.outputs",
        "computer_call_output.output.image_url",
        "file_search_call.results",
        "message.input_image.image_url",
        "web_search_call.action.sources",
        "web_search_call.results",
    }
)

Ignored = Any  # type of known fields whose value does not change what is sampled
_response_id = re.compile(RESPONSE_ID + "([0-9a-f]{32})")


class ResponsesRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request: its neutral part, and the data that its response needs.

    `echo` contains the fields that a response repeats. `forms` contains the tools that are not plain functions, by the
    names that the model sees. `encrypted` says whether reasoning items have content for the client to send back.
    `prefix` is the beginning of the body, which need not be read again for the conversation's next request.
    """

    completion: CompletionRequest
    model: str
    echo: dict[str, Any] = {}
    forms: dict[str, ToolForm] = {}
    encrypted: bool = False
    prefix: BodyPrefix = NOTHING_READ


class ResponsesBody(msgspec.Struct, kw_only=True):
    model: ModelName
    input: str | list[msgspec.Raw] | None = None  # list of `InputItem`
    instructions: str | None = None
    tools: msgspec.Raw = msgspec.Raw(b"null")  # list of objects, or null
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    stream: Streamed | None = None
    stream_options: Ignored = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_logprobs: int | None = None
    max_output_tokens: AnswerLength | None = None
    previous_response_id: str | None = None
    include: list[str] | None = None
    text: dict[str, Any] | None = None
    truncation: str | None = None
    background: bool | None = None
    conversation: Ignored = None
    prompt: Ignored = None
    chat_template_kwargs: dict[str, bool | int | float | str] | None = None
    reasoning: Any = None
    store: Ignored = None
    metadata: Ignored = None
    client_metadata: Ignored = None
    prompt_cache_key: Ignored = None
    prompt_cache_retention: Ignored = None
    prompt_cache_options: Ignored = None
    safety_identifier: Ignored = None
    service_tier: Any = None
    user: Ignored = None
    max_tool_calls: Ignored = None  # concerns server-side tools


_body = BodyDecoder(ResponsesBody, "input", "tools")
_item = msgspec.json.Decoder(InputItem)
_offered = msgspec.json.Decoder(list[dict[str, Any]] | None)
_ECHOED = (
    "instructions", "max_output_tokens", "max_tool_calls", "metadata", "previous_response_id", "prompt_cache_key",
    "reasoning", "safety_identifier", "service_tier", "store", "temperature", "text", "tool_choice", "top_p",
    "truncation", "user",
)  # fmt: skip
ECHO_DEFAULTS: dict[str, Any] = {
    "metadata": {},
    "reasoning": {"effort": None, "summary": None},
    "service_tier": "default",
    "store": True,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "truncation": "disabled",
}


class _ReadTools(NamedTuple):
    """The tools of a request, as given and as read."""

    given: list[dict[str, Any]]
    read: RequestTools


def _placed(given: list[dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    return [(f"tools.{at}", tool) for at, tool in enumerate(given)]


def _read_tools(part: bytes) -> _ReadTools:
    given = decode_field(_offered, part, "tools") or []
    return _ReadTools(given, read_tools(_placed(given)))


_remembered_tools = RememberedParts(_read_tools)


def _read_items(before: InputReader | None, items: Sequence[bytes], at: int) -> InputReader:
    reader = InputReader() if before is None else before.forked()
    for index, item in enumerate(items, at):
        reader.read(decode_body(_item, item, f"input[{index}]"), f"input.{index}")
    return reader


_read_body = ItemReader(_body, "input", _read_items)


def read_response_request(body: bytes, before: BodyPrefix = NOTHING_READ) -> ResponsesRequest:
    """Decode the body of `POST /v1/responses`, which begins with the prefix `before`.

    Raises `Refused`, naming the parameter that is invalid.
    """
    found, unknown, reader, prefix = _read_body(body, before)
    _check_form(found)
    if isinstance(found.input, str):
        reader.messages.append({"role": "user", "content": found.input})
    reader.end_answer()
    if not reader.messages and not found.instructions and not found.previous_response_id:
        why = "input is empty: send a text, or items with at least one message."
        raise BadParameter(Code.MALFORMED, "input", why)
    given, tools = _remembered_tools(bytes(found.tools))
    if reader.tools:
        tools = read_tools([*_placed(given), *reader.tools])
    unsupported = [*tools.unsupported, *reader.unsupported, *_beyond(found), *unknown]
    return ResponsesRequest(
        completion=_completion(found, reader, tools, unsupported),
        model=found.model,
        echo={**ECHO_DEFAULTS, **_echoed(found), "tools": given},
        forms=tools.forms,
        encrypted=ENCRYPTED in (found.include or ()),
        prefix=prefix,
    )


def _echoed(found: ResponsesBody) -> dict[str, Any]:
    return {name: value for name in _ECHOED if (value := getattr(found, name)) is not None}


def call_of(response_id: str) -> str:
    """Return the id of the call that a response belongs to. Raises `BadParameter` UNKNOWN_CALL if the response's id
    does not contain one."""
    named = _response_id.fullmatch(response_id)
    if named is None:
        why = f"Response {response_id[: limits.NAME_CHARACTERS]!r} does not exist."
        raise BadParameter(Code.UNKNOWN_CALL, "previous_response_id", why)
    return named.group(1)


def _completion(
    found: ResponsesBody, reader: InputReader, tools: RequestTools, unsupported: list[Unsupported]
) -> CompletionRequest:
    instructions: list[ChatMessage] = []
    form = (found.text or {}).get("format")
    demands, unmet = split_asked([_forced_call(found.tool_choice, tools), _form_of_answer(form)])
    thinking, unthought = thinking_of_effort("reasoning.effort", _effort(found.reasoning))
    if found.instructions:
        instructions.append({"role": "system", "content": found.instructions})
    return CompletionRequest(
        chat=True,
        messages=(*instructions, *reader.messages),
        tools=tuple(tools.functions),
        parse_tool_calls=bool(tools.functions) and found.tool_choice != "none",
        stream=bool(found.stream),
        sampling=RequestedSampling(
            temperature=found.temperature,
            top_p=requested_top_p(found.top_p),
            max_tokens=found.max_output_tokens,
        ),
        chat_template_kwargs=found.chat_template_kwargs or {},
        thinking=thinking,
        continues=call_of(found.previous_response_id) if found.previous_response_id else "",
        answers={len(instructions) + at: call for at, call in reader.answers.items()},
        demands=demands,
        one_call="parallel_tool_calls" if found.parallel_tool_calls is False else "",
        unsupported=(*unmet, *unthought, *unsupported),
        length_field="max_output_tokens",
    )


def _check_form(found: ResponsesBody) -> None:
    """Raise `BadParameter` for requests that ask to be answered later, and for requests whose input would have to be
    stored on the server."""
    refused = (
        ("background", bool(found.background), "an answer is returned only by its own request; leave it out"),
        ("conversation", found.conversation is not None, "send the items, or previous_response_id"),
        ("prompt", found.prompt is not None, "no prompts are stored; send instructions and input"),
    )
    for name, is_asked, why in refused:
        if is_asked:
            raise BadParameter(Code.UNSUPPORTED, name, f"{name} is not supported here: {why}.")


def _beyond(found: ResponsesBody) -> list[Unsupported]:
    """Return the unsupported options of a request that would change its answer."""
    included, verbosity = found.include or (), (found.text or {}).get("verbosity")
    logprobs = bool(found.top_logprobs) or LOGPROBS in included
    others = any(each != LOGPROBS and each not in _OF_ITEMS for each in included)
    asked = (
        ("truncation", found.truncation not in (None, "disabled"), "the input is never truncated"),
        ("top_logprobs", logprobs, "use chat completions for logprobs"),
        ("include", others, "it has a value that is not known here"),
        ("service_tier", found.service_tier not in (None, "auto", "default"), "there is only one tier"),
        ("text.verbosity", verbosity not in (None, "medium"), "the model has no such setting"),
    )
    return [
        *(Unsupported(name, why) for name, is_asked, why in asked if is_asked),
        *unknown_parts("reasoning", found.reasoning, ("effort", "summary", "generate_summary")),
        *unknown_parts("text", found.text, ("format", "verbosity")),
    ]


def _effort(reasoning: Any) -> Any:
    return reasoning.get("effort") if isinstance(reasoning, dict) else None


def _forced_call(choice: str | dict[str, Any] | None, tools: RequestTools) -> Asked | None:
    """Return what a tool choice requires, or None if the model may choose whether to call a tool."""
    match choice:
        case None | "auto" | "none":
            return None
        case "required":
            return demand_of_calls("tool_choice", tools.functions, None)
        case {"type": "function" | "custom", "name": str(name)}:
            return demand_of_calls("tool_choice", tools.functions, _known_as(name, tools), once=True)
        case {"type": "allowed_tools", "mode": "required", "tools": [*allowed]}:
            given = [str(tool.get("name")) for tool in allowed if isinstance(tool, dict)]
            names = [known for name in given for known in _known_as(name, tools)]
            return demand_of_calls("tool_choice", tools.functions, names)
        case _:
            return Unsupported("tool_choice", "this choice of tools is not known here")


def _known_as(name: str, tools: RequestTools) -> list[str]:
    """Return the names under which the model knows a tool: the tool's own name or, failing that, its names in
    namespaces."""
    if any(function["function"]["name"] == name for function in tools.functions):
        return [name]
    return [known for known, form in tools.forms.items() if form.name == name]


def _form_of_answer(form: Any) -> Asked | None:
    """Return what a text format requires, or None if the answer may be any text."""
    match form or None:
        case None | {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return demand_of_json("text.format", ANY_OBJECT)
        case {"type": "json_schema", "schema": schema}:
            return demand_of_json("text.format", schema)
        case _:
            return Unsupported("text.format", "answers are text, json_object or json_schema")
