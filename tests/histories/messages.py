"""Anthropic's Messages API, as Claude Code and harnesses on Anthropic's SDK speak it."""

import json
import random
from collections.abc import Iterator, Sequence
from typing import Any

from tests.histories.answers import STOP
from tests.histories.dialect import MODEL, Ask, AuxiliaryCall, Json, events, function
from tests.histories.entries import Entry, Said, SaidCall, Style, call_id
from tests.histories.spelling import arguments_object, call_name, spelled

CACHED = {"cache_control": {"type": "ephemeral"}}
SESSION = {b"x-claude-code-session-id": b"s1"}
TITLE = {"type": "object", "properties": {"title": {"type": "string"}}}
COMPACTION = (
    "CRITICAL: Respond with TEXT ONLY. Do NOT call any tools.\n"
    "Your task is to create a detailed summary of the conversation so far."
)


class Messages:
    name = "Anthropic messages"
    path = "/v1/messages"
    continues = False
    joins_users = True
    auxiliary_calls = (
        AuxiliaryCall(
            "title",
            "Write a title.",
            "A task",
            headers=SESSION,
            fields={"output_config": {"format": {"type": "json_schema", "schema": TITLE}}},
        ),
        AuxiliaryCall("compaction", user=COMPACTION, appended=True, headers=SESSION),
    )

    def names(self, said: Said, style: Style) -> bool:
        return bool(said.reasoning) and style.reasoning and not style.bare  # by the signature of its thinking

    def body(self, ask: Ask, chance: random.Random) -> Json:
        entries = [*ask.entries]
        body: Json = {"model": MODEL, "max_tokens": 32000, **ask.fields}
        if entries[0].kind == "system":
            body["system"] = _system(entries.pop(0).text, chance)
        body["messages"] = _joined([*_messages(entries, chance)], chance)
        if ask.tools:
            functions = [function(name) for name in ask.tools]
            body["tools"] = [
                {"name": each["name"], "description": each["description"], "input_schema": each["parameters"]}
                for each in functions
            ]
        if ask.stops:
            body["stop_sequences"] = [STOP]
        if ask.stream:
            body["stream"] = True
        if chance.random() < 0.3:
            body["metadata"] = {"user_id": "{}"}
            body["thinking"] = {"type": "adaptive"}
        return body

    def whole(self, body: bytes) -> Said:
        return _said(json.loads(body))

    def streamed(self, body: bytes) -> Said:
        """Put the blocks together, each from its start to its stop."""
        message: Json = {}
        texts: list[str] = []  # of the inputs of calls
        is_open = False
        for name, data in events(body):
            assert name == data["type"]
            match name:
                case "message_start":
                    message = data["message"]
                case "content_block_start":
                    assert not is_open
                    assert data["index"] == len(message["content"])
                    is_open = True
                    message["content"].append(dict(data["content_block"]))
                    texts.append("")
                case "content_block_delta":
                    _add(message["content"][data["index"]], data["delta"], texts)
                case "content_block_stop":
                    is_open = False
                    if message["content"][-1]["type"] == "tool_use":
                        message["content"][-1]["input"] = json.loads(texts[-1] or "{}")
                case "message_delta":
                    message |= data["delta"]
        assert name == "message_stop"
        assert not is_open
        return _said(message)


def _add(block: Json, delta: Json, texts: list[str]) -> None:
    match delta["type"]:
        case "text_delta":
            block["text"] += delta["text"]
        case "thinking_delta":
            block["thinking"] += delta["thinking"]
        case "signature_delta":
            block["signature"] = block.get("signature", "") + delta["signature"]
        case "input_json_delta":
            texts[-1] += delta["partial_json"]


def _said(message: Json) -> Said:
    blocks: list[Json] = message["content"]
    text = "".join(block["text"] for block in blocks if block["type"] == "text")
    reasoning = "".join(block["thinking"] for block in blocks if block["type"] == "thinking")
    calls = [
        SaidCall(block["id"], block["name"], json.dumps(block["input"], ensure_ascii=False))
        for block in blocks
        if block["type"] == "tool_use"
    ]
    call = message["id"].removeprefix("msg_")
    return Said(call, text, reasoning, tuple(calls), message["stop_reason"], tuple(blocks))


def _system(text: str, chance: random.Random) -> Any:
    return text if chance.random() < 0.5 else [_cached({"type": "text", "text": text}, chance)]


def _cached(block: Json, chance: random.Random) -> Json:
    """Return a block, perhaps with the mark for a cache, which moves with every turn."""
    return {**block, **CACHED} if chance.random() < 0.3 else block


def _messages(entries: Sequence[Entry], chance: random.Random) -> Iterator[Json]:
    waiting: dict[str, str] = {}
    for index, entry in enumerate(entries):
        match entry.kind:
            case "system":
                yield {"role": "system", "content": _content(entry.text, chance)}
            case "user":
                yield {"role": "user", "content": _content(entry.text, chance)}
            case "own":
                yield {"role": "assistant", "content": _content(entry.text, chance)}
            case "results":
                left = [_result(*each, chance) for each in entry.results if each[0] not in waiting]
                if left:
                    yield {"role": "user", "content": left}
            case "answer":
                assert entry.said is not None
                following = entries[index + 1] if index + 1 < len(entries) else entry
                waiting = dict(following.results) if entry.style.split == "between" else {}
                yield from _echo(entry.said, entry.style, waiting, chance)


def _content(text: str, chance: random.Random) -> Any:
    return text if chance.random() < 0.5 else [_cached({"type": "text", "text": text}, chance)]


def _result(id: str, text: str, chance: random.Random) -> Json:
    return _cached({"type": "tool_result", "tool_use_id": id, "content": _content(text, chance)}, chance)


def _echo(said: Said, style: Style, between: dict[str, str], chance: random.Random) -> Iterator[Json]:
    blocks: list[Json] = []
    if said.reasoning and style.reasoning:
        signature = next(block["signature"] for block in said.parts if block["type"] == "thinking")
        blocks.append({"type": "thinking", "thinking": said.reasoning, "signature": "" if style.bare else signature})
    elif said.reasoning and style.fields:
        blocks.append({"type": "redacted_thinking", "data": "..."})
    text = spelled(said.text, style)
    if text and not (said.calls and style.beside != "kept"):
        blocks.append(_cached({"type": "text", "text": text}, chance))
    calls = [_call(call, style, chance) for call in said.calls]
    if style.split == "one" or len(calls) < 2:
        plain = len(blocks) == 1 and not calls and blocks[0]["type"] == "text" and not style.parts
        yield {"role": "assistant", "content": text if plain else [*blocks, *calls]}
        return
    for number, call in enumerate(calls):
        yield {"role": "assistant", "content": [*(blocks if number == 0 else []), call]}
        if call["id"] in between:
            yield {"role": "user", "content": [_result(call["id"], between[call["id"]], chance)]}


def _call(call: SaidCall, style: Style, chance: random.Random) -> Json:
    block = {"type": "tool_use", "id": call_id(call, style), "name": call_name(call, style)}
    return _cached({**block, "input": arguments_object(call, style)}, chance)


def _joined(messages: list[Json], chance: random.Random) -> list[Json]:
    """Return the messages with some that follow each other in one role as one."""
    joined: list[Json] = []
    for message in messages:
        last = joined[-1] if joined else None
        if last is not None and last["role"] == message["role"] == "user" and chance.random() < 0.7:
            joined[-1] = {"role": "user", "content": [*_blocks(last["content"]), *_blocks(message["content"])]}
        else:
            joined.append(message)
    return joined


def _blocks(content: Any) -> list[Json]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content
