"""The requests of Anthropic's Messages API: decoded, and converted to a neutral `CompletionRequest`. Pure.

Clients of this API send many fields that do not affect sampling: betas, metadata, cache marks. These fields may have
any value. A client may request sampling parameters; the job determines whether they are used. Unsupported and unknown
fields are listed as `unsupported`; the job determines whether they are refused or ignored.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta

from bombus.errors import Code
from bombus_gateway import limits
from bombus_gateway.anthropic.client_tools import CLIENT_TOOLS
from bombus_gateway.anthropic.thinking import beyond_thinking, requested_thinking
from bombus_gateway.call.prefixes import NOTHING_READ, BodyPrefix
from bombus_gateway.call.request import CompletionRequest, RequestedSampling, Unsupported, requested_top_p
from bombus_gateway.decoding.items import ItemReader
from bombus_gateway.decoding.json_body import (
    STRICT,
    Asked,
    BadParameter,
    BodyDecoder,
    check_count_of_tools,
    checked_arguments,
    decode_body,
    decode_field,
    demand_of_calls,
    demand_of_json,
    function_tool,
    split_asked,
    stop_strings,
)
from bombus_gateway.decoding.json_parts import RememberedParts
from bombus_gateway.decoding.parameters import AnswerLength, ModelName, Name, Streamed, Temperature, TopP
from bombus_gateway.text.message import ChatMessage

INVALID_JSON = "INVALID_JSON"  # a tool input's only key if the sampled text is not a JSON object

_SYSTEM = "system"  # the body's field for leading instructions, and the role of system messages
_ours = re.compile("[0-9a-f]{32}")  # a signature made by this gateway: the model call's id
_Unused = Any  # type of known fields whose value does not matter


class MessagesRequest(NamedTuple):
    """A request to either route: its neutral part, and the fields needed for the response and for `marks_of`.

    `server_tools` are the types of the tools that Anthropic's servers run. If the answer must be JSON with certain
    fields, `answer` contains the fields' names; it is None if the answer may be any text. `prefix` is the beginning of
    the body, which need not be read again for the conversation's next request.
    """

    completion: CompletionRequest
    model: str
    server_tools: tuple[str, ...] = ()
    answer: frozenset[str] | None = None
    prefix: BodyPrefix = NOTHING_READ


class _Block(msgspec.Struct):
    """A content block of any type, with the fields of all supported types."""

    type: str = ""
    text: str | None = None
    thinking: str | None = None
    signature: _Unused = None
    id: Name | None = None
    name: Name | None = None
    input: msgspec.Raw = msgspec.Raw(b"{}")
    tool_use_id: Name | None = None
    content: "str | list[_Block] | dict[str, Any] | None" = None
    is_error: bool | None = None
    tool_name: Name | None = None
    source: Any = None
    title: Any = None


_Content = str | list[_Block] | None


class _Message(msgspec.Struct):
    role: Literal["user", "assistant", "system"]
    content: _Content = None


class ToolChoice(msgspec.Struct):
    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class _Tool(msgspec.Struct):
    name: str = ""
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    type: str | None = None
    defer_loading: bool | None = None
    strict: bool | None = None
    input_examples: list[Any] | None = None
    allowed_callers: list[Any] | None = None


class MessagesBody(msgspec.Struct, kw_only=True):
    model: ModelName
    messages: Annotated[list[msgspec.Raw], Meta(min_length=1)]  # list of `_Message`
    max_tokens: AnswerLength | None = None
    system: msgspec.Raw = msgspec.Raw(b"null")  # `_Content`
    tools: msgspec.Raw = msgspec.Raw(b"null")  # list of `_Tool`, or null
    tool_choice: ToolChoice | None = None
    stop_sequences: list[str] | None = None
    stream: Streamed | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: int | None = None
    output_config: dict[str, Any] | None = None
    output_format: dict[str, Any] | None = None
    context_management: dict[str, Any] | None = None
    container: _Unused = None
    mcp_servers: list[_Unused] | None = None
    thinking: Any = None
    metadata: _Unused = None
    cache_control: _Unused = None
    diagnostics: Any = None
    service_tier: Any = None
    speed: Any = None
    inference_geo: Any = None
    betas: _Unused = None


class _Placed(NamedTuple):
    """A block and its position in the body."""

    place: str
    block: _Block


class _Offered(NamedTuple):
    """A tool, and the function that offers it to the model. The function is None for a tool that Anthropic's servers
    run."""

    tool: _Tool
    function: dict[str, Any] | None


class _Turns(NamedTuple):
    """The messages of a request, with consecutive messages of the same role merged into one turn.

    `leading` contains the blocks of the system messages that come before all others and extend the body's own `system`;
    it is None if there are no such messages. `role` and `blocks` belong to the last turn, which later messages may
    extend. `referenced` contains the names of the tools that blocks refer to.
    """

    leading: Sequence[_Placed] | None = None
    messages: tuple[ChatMessage, ...] = ()
    left_out: tuple[Unsupported, ...] = ()
    role: str = ""
    blocks: tuple[_Placed, ...] = ()
    referenced: frozenset[str] = frozenset()


_body = BodyDecoder(MessagesBody, "messages", "system", "tools")
_message = msgspec.json.Decoder(_Message)
_system: msgspec.json.Decoder[_Content] = msgspec.json.Decoder(_Content)
_offered = msgspec.json.Decoder(list[_Tool] | None)


def read_messages(body: bytes, before: BodyPrefix = NOTHING_READ) -> MessagesRequest:
    """Decode the body of `POST /v1/messages` or `/v1/messages/count_tokens`.

    `before` is the beginning of the body, which was read earlier. Raises `Refused` for a body that is not a valid
    request.
    """
    found, unknown, turns, prefix = _read_body(body, before)
    unsupported = [*_beyond_messages(found, turns.role), *unknown]
    offered = _remembered_tools(bytes(found.tools))
    tools = _tools(offered, turns.referenced, unsupported)
    demands, unmet = split_asked([_forced_call(found.tool_choice, tools), *_forms_of_answer(found)])
    completion = CompletionRequest(
        chat=True,
        messages=_messages(_remembered_system(bytes(found.system)), turns, unsupported),
        tools=tuple(tools),
        parse_tool_calls=bool(tools) and (found.tool_choice is None or found.tool_choice.type != "none"),
        stops=stop_strings(found.stop_sequences or (), "stop_sequences"),
        stream=bool(found.stream),
        sampling=RequestedSampling(
            temperature=found.temperature,
            top_p=requested_top_p(found.top_p),
            top_k=max(found.top_k or 0, 0),
            max_tokens=found.max_tokens,
        ),
        thinking=requested_thinking(found.thinking, found.output_config),
        demands=demands,
        one_call=_ONE_CALL if found.tool_choice and found.tool_choice.disable_parallel_tool_use else "",
        unsupported=(*unmet, *unsupported),
    )
    server_tools = tuple(each.tool.type or "" for each in offered if each.function is None)
    fields = _fields_of_answer(found.output_config or {})
    return MessagesRequest(completion, found.model, server_tools, fields, prefix)


def _fields_of_answer(output: dict[str, Any]) -> frozenset[str] | None:
    """Return the names of the JSON fields that the answer must have, or None if `output_config` requires none."""
    form = output.get("format")
    schema = form.get("schema") if isinstance(form, dict) else None
    fields = schema.get("properties") if isinstance(schema, dict) else None
    return frozenset(fields) if isinstance(fields, dict) else None


# ---- requirements -------------------------------------------------------------------------------------------------


def _beyond_messages(found: MessagesBody, last_role: str) -> list[Unsupported]:
    """Return the unsupported fields that would change the answer."""
    asked = (
        ("context_management", _takes_away(found.context_management), "nothing is removed from a conversation"),
        ("container", found.container is not None, "no code is run here"),
        ("mcp_servers", bool(found.mcp_servers), "only the client calls tools"),
        ("messages", last_role == "assistant", "answers begun by the client are not continued"),
        ("diagnostics", found.diagnostics is not None, "cache diagnostics are not offered"),
        ("service_tier", found.service_tier not in (None, "auto", "standard_only"), "there is only one tier"),
        ("speed", found.speed not in (None, "standard"), "there is only one speed"),
        ("inference_geo", found.inference_geo not in (None, "global"), "the model runs where the hive runs"),
    )
    return [
        *(Unsupported(name, why) for name, is_asked, why in asked if is_asked),
        *beyond_thinking(found.thinking, found.output_config),
    ]


_ONE_CALL = "tool_choice.disable_parallel_tool_use"


def _forced_call(choice: ToolChoice | None, tools: Sequence[Mapping[str, Any]]) -> Asked | None:
    """Return what a tool choice requires, or None if the model may choose whether to call a tool."""
    if choice is None or choice.type in ("auto", "none"):
        return None
    if choice.type not in ("any", "tool"):
        return Unsupported("tool_choice", "this tool choice is not known here")
    return demand_of_calls("tool_choice", tools, [choice.name] if choice.type == "tool" else None)


def _forms_of_answer(found: MessagesBody) -> Iterator[Asked]:
    """Yield what the answer's format requires, from `output_config` or the older `output_format`."""
    for field, form in (
        ("output_config.format", (found.output_config or {}).get("format")),
        ("output_format", found.output_format),
    ):
        match form or None:
            case None:
                continue
            case {"type": "json_schema", "schema": schema}:
                yield demand_of_json(field, schema)
            case _:
                yield Unsupported(field, "the format must be json_schema")


def _takes_away(management: dict[str, Any] | None) -> bool:
    """Return whether the request wants the server to remove parts of the conversation. The edit that Claude Code sends
    keeps all of it."""
    edits = (management or {}).get("edits")
    if not isinstance(edits, list):
        return bool(management)
    return not all(isinstance(edit, dict) and edit.get("keep") == "all" for edit in edits)


def _read_tools(given: bytes) -> tuple[_Offered, ...]:
    found = decode_field(_offered, given, "tools") or []
    check_count_of_tools(len(found))
    return tuple(_Offered(tool, _function(tool, f"tools.{index}")) for index, tool in enumerate(found))


def _function(tool: _Tool, place: str) -> dict[str, Any] | None:
    """Return the function that offers a tool to the model, or None if the tool's input schema is unknown."""
    if tool.type in (None, "custom"):
        given: Mapping[str, Any] = {"description": tool.description, "parameters": tool.input_schema}
    else:
        given = CLIENT_TOOLS.get(tool.type, {})
    return function_tool({"name": tool.name, **given}, place) if given else None


_remembered_tools = RememberedParts(_read_tools)


def _tools(
    offered: Sequence[_Offered], referenced: Collection[str], unsupported: list[Unsupported]
) -> list[dict[str, Any]]:
    """Return the functions that the model may call. A deferred function is left out until a reference names it."""
    tools: list[dict[str, Any]] = []
    for index, (tool, function) in enumerate(offered):
        if function is None:
            why = f"{str(tool.type)[:40]!r} runs on Anthropic's servers, or its schema is built into Anthropic's models"
            unsupported.append(Unsupported(f"tools.{index}.type", why))
        elif not tool.defer_loading or tool.name in referenced:
            tools.append(function)
            unsupported += _beyond_function(tool)
    return tools


def _beyond_function(tool: _Tool) -> Iterator[Unsupported]:
    """Yield the options of a tool that are not passed to the model."""
    if tool.strict:
        yield STRICT
    if tool.input_examples:
        yield Unsupported("tools.input_examples", "chat templates have no place for examples")
    if tool.allowed_callers not in (None, [], ["direct"]):
        yield Unsupported("tools.allowed_callers", "no code is run here")


# ---- the conversation ---------------------------------------------------------------------------------------------


def _read_turns(before: _Turns | None, items: Sequence[bytes], at: int) -> _Turns:
    before = before or _Turns()
    leading = None if before.leading is None else [*before.leading]
    role, blocks = before.role, [*before.blocks]
    messages: list[ChatMessage] = []
    left_out: list[Unsupported] = []
    referenced = set[str]()
    for index, item in enumerate(items, at):
        message = decode_body(_message, item, f"messages[{index}]")
        given = _blocks(message.content, f"messages.{index}")
        referenced.update(_referenced(message.content))
        if not role and message.role == _SYSTEM:
            leading = leading or []
            leading += given
            continue
        if message.role != role:
            messages += _turn(role, blocks, left_out) if role else ()
            role, blocks = message.role, []
        blocks += given
    return _Turns(
        leading,
        (*before.messages, *messages),
        (*before.left_out, *left_out),
        role,
        tuple(blocks),
        before.referenced | referenced,
    )


def _referenced(content: _Content) -> Iterator[str]:
    """Yield the names of the tools that this content refers to."""
    for block in content if isinstance(content, list) else ():
        for each in (block, *(block.content if isinstance(block.content, list) else ())):
            if each.type == "tool_reference" and each.tool_name:
                yield each.tool_name


_read_body = ItemReader(_body, "messages", _read_turns)
_remembered_system = RememberedParts[bytes, _Content](lambda given: decode_field(_system, given, _SYSTEM))


def _messages(system: _Content, turns: _Turns, left_out: list[Unsupported]) -> tuple[ChatMessage, ...]:
    """Return the messages as they are stored, compared and rendered."""
    first = [*(_blocks(system, _SYSTEM) if system else ()), *(turns.leading or ())]
    leading = [*_turn(_SYSTEM, first, left_out)] if system or turns.leading is not None else []
    left_out += turns.left_out
    last = _turn(turns.role, turns.blocks, left_out) if turns.role else ()
    return (*leading, *turns.messages, *last)


def _turn(role: str, blocks: Sequence[_Placed], left_out: list[Unsupported]) -> Iterable[ChatMessage]:
    return [_answer(blocks, left_out)] if role == "assistant" else _results_and_text(role, blocks, left_out)


def _blocks(content: _Content, place: str) -> list[_Placed]:
    if not isinstance(content, list):
        return [_Placed(place, _Block("text", content or ""))]
    at = place if place == _SYSTEM else f"{place}.content"
    return [_Placed(f"{at}.{index}", block) for index, block in enumerate(content)]


def _answer(blocks: Sequence[_Placed], left_out: list[Unsupported]) -> ChatMessage:
    """Return the assistant's message. The message's content is None if it has tool calls but no text."""
    calls = [_tool_call(each) for each in blocks if each.block.type == "tool_use"]
    if len(calls) > limits.CALLS_IN_MESSAGE:
        why = f"There are {len(calls)} calls in one turn, but the limit is {limits.CALLS_IN_MESSAGE}."
        raise BadParameter(Code.MALFORMED, blocks[0].place, why)
    # Redacted thinking is encrypted, so it is ignored.
    understood = ("tool_use", "thinking", "redacted_thinking")
    text = _text((each for each in blocks if each.block.type not in understood), "", left_out)
    reasoning = "".join(each.block.thinking or "" for each in blocks if each.block.type == "thinking")
    message: ChatMessage = {"role": "assistant", "content": text or None if calls else text}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = calls
    signatures = {each.block.signature for each in blocks if _ours.fullmatch(str(each.block.signature))}
    if len(signatures) == 1:
        message["answer_of"] = signatures.pop(), 0
    return message


def _tool_call(placed: _Placed) -> dict[str, Any]:
    block = placed.block
    if not block.name:
        raise BadParameter(Code.MALFORMED, f"{placed.place}.name", "A call must name its tool.")
    function = {"name": block.name, "arguments": _arguments(block.input, f"{placed.place}.input")}
    return {"id": block.id or "", "type": "function", "function": function}


def _arguments(given: msgspec.Raw, place: str) -> str:
    """Return a tool call's input exactly as the client wrote it, so that no number is reformatted."""
    try:
        text = bytes(given).decode()
    except UnicodeDecodeError as error:
        raise BadParameter(Code.MALFORMED, place, f"{place} is not UTF-8: {error}.") from None
    if text == "null":
        return "{}"
    if not text.startswith("{"):
        raise BadParameter(Code.MALFORMED, place, f"{place} must be an object.")
    text = checked_arguments(text, place)
    return _what_was_sampled(text) if INVALID_JSON in text else text


def _what_was_sampled(text: str) -> str:
    """Return the text that was sampled as a call's arguments, if the gateway wrapped it because it was not an object.
    Otherwise, return `text` unchanged."""
    try:
        value = msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text
    return value[INVALID_JSON] if [*value] == [INVALID_JSON] and isinstance(value[INVALID_JSON], str) else text


def _results_and_text(role: str, blocks: Sequence[_Placed], left_out: list[Unsupported]) -> Iterator[ChatMessage]:
    """Yield a turn's tool results in order, and then its text."""
    results = [each for each in blocks if each.block.type == "tool_result"]
    for each in results:
        yield _tool_result(each, left_out)
    rest = [each for each in blocks if each.block.type != "tool_result"]
    text = _text(rest, "\n", left_out)
    if text or not results:
        yield {"role": role, "content": text}


def _tool_result(placed: _Placed, left_out: list[Unsupported]) -> ChatMessage:
    place, block = placed
    if block.tool_use_id is None:
        raise BadParameter(Code.MALFORMED, f"{place}.tool_use_id", "A result must name the call that it answers.")
    if isinstance(block.content, dict):
        raise BadParameter(Code.MALFORMED, f"{place}.content", "A result's content must be text or a list of blocks.")
    text = _text(_blocks(block.content, place), "\n", left_out)
    if block.is_error and "error" not in text.partition("\n")[0].lower():
        text = f"Error: {text}" if text else "Error"  # templates have no other place for the flag
    return {"role": "tool", "content": text, "tool_call_id": block.tool_use_id}


def _text(blocks: Iterable[_Placed], between: str, left_out: list[Unsupported]) -> str:
    """Return the joined texts of blocks, and add the blocks that are not text to `left_out`."""
    texts: list[str] = []
    for place, block in blocks:
        text = _text_of(block)
        if text is not None:
            texts.append(text)
        elif block.type == "text":
            raise BadParameter(Code.MALFORMED, f"{place}.text", "A text block needs text.")
        else:
            why = f"a block of type {block.type[:40]!r} is not text"
            left_out.append(Unsupported(place, why, is_content=True))
    return between.join(text for text in texts if text)


def _text_of(block: _Block) -> str | None:
    """Return the text of a block, or None if it has no readable text."""
    if block.type == "text":
        return block.text
    if block.type == "tool_reference":
        return f"The tool {block.tool_name} can be called now."
    if block.type == "document":
        return _titled(_text_of_source(block.source), block.title)
    if block.type == "search_result":
        parts = block.content if isinstance(block.content, list) else []
        texts = [part.text for part in parts if part.type == "text" and part.text]
        return _titled("\n".join(texts), block.title, block.source) if texts and len(texts) == len(parts) else None
    return None


def _text_of_source(source: Any) -> str | None:
    """Return the text of a document that consists only of plain text or text blocks, or None for any other document."""
    if not isinstance(source, dict):
        return None
    data = source.get("data") if source.get("type") == "text" else None
    data = source.get("content") if source.get("type") == "content" else data
    if isinstance(data, list):
        texts = [part["text"] for part in data if isinstance(part, dict) and isinstance(part.get("text"), str)]
        return "\n".join(texts) if len(texts) == len(data) else None
    return data if isinstance(data, str) else None


def _titled(text: str | None, *titles: Any) -> str | None:
    """Return a text with the given titles above it."""
    return None if text is None else "\n".join([*(title for title in titles if isinstance(title, str)), text])
