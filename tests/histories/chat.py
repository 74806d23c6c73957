"""Chat completions, as a harness on OpenAI's SDK speaks it."""

import json
import random
from collections.abc import Iterator, Sequence
from typing import Any

from tests.histories.answers import STOP
from tests.histories.dialect import MODEL, Ask, AuxiliaryCall, Json, events, function, in_pieces
from tests.histories.entries import Entry, Said, SaidCall, Style, call_id
from tests.histories.spelling import arguments_text, call_name, spelled

LITELLM: Json = {"provider_specific_fields": {"refusal": None}, "function_call": None, "annotations": [], "audio": None}


class Chat:
    name = "chat completions"
    path = "/v1/chat/completions"
    continues = False
    joins_users = False
    auxiliary_calls = (
        AuxiliaryCall("title", "You are a title generator. You output ONLY a thread title.", "Generate a title"),
        AuxiliaryCall("compaction", "You are a context summarization agent.", "Summarize all of it"),
        AuxiliaryCall("memory", "You are now acting as the managed memory extraction subagent", "Remember"),
        AuxiliaryCall(
            "commit",
            "You are an expert software engineer that generates concise, one-line Git commit messages",
            "A change",
        ),
    )

    def names(self, said: Said, style: Style) -> bool:
        return False

    def body(self, ask: Ask, chance: random.Random) -> Json:
        body: Json = {"model": MODEL, "messages": [*_messages(ask.entries, chance)], **ask.fields}
        if ask.tools:
            body["tools"] = [{"type": "function", "function": function(name)} for name in ask.tools]
            if chance.random() < 0.5:
                body["tool_choice"] = "auto"
        if ask.stops:
            body["stop"] = chance.choice((STOP, [STOP]))
        if ask.stream:
            body["stream"] = True
            if chance.random() < 0.5:
                body["stream_options"] = {"include_usage": True}
        return body

    def whole(self, body: bytes) -> Said:
        found = json.loads(body)
        (choice,) = found["choices"]
        return _said(found["id"], choice["message"], choice["finish_reason"])

    def streamed(self, body: bytes) -> Said:
        """Put the deltas together, calls by their index."""
        message: Json = {"content": "", "reasoning_content": ""}
        calls: dict[int, Json] = {}
        finish, name = "", ""
        *chunks, last = [data for _, data in events(body)]
        assert last == "[DONE]"
        for chunk in chunks:
            name = chunk["id"]
            for choice in chunk["choices"]:
                finish = choice["finish_reason"] or finish
                delta = choice["delta"]
                for key in ("content", "reasoning_content"):
                    message[key] += delta.get(key) or ""
                for part in delta.get("tool_calls") or ():
                    call = calls.setdefault(part["index"], {"id": "", "function": {"name": "", "arguments": ""}})
                    call["id"] += part.get("id") or ""
                    for key in ("name", "arguments"):
                        call["function"][key] += part["function"].get(key) or ""
        assert [*calls] == [*range(len(calls))], "the calls of a stream are numbered from 0"
        return _said(name, {**message, "tool_calls": [*calls.values()]}, finish)


def _said(name: str, message: Json, finish: str) -> Said:
    calls = [
        SaidCall(call["id"], call["function"]["name"], call["function"]["arguments"])
        for call in message.get("tool_calls") or ()
    ]
    text, reasoning = message.get("content") or "", message.get("reasoning_content") or ""
    return Said(name.removeprefix("chatcmpl-"), text, reasoning, tuple(calls), finish)


def _messages(entries: Sequence[Entry], chance: random.Random) -> Iterator[Json]:
    waiting: dict[str, str] = {}  # results that were sent with their calls, one by one
    for index, entry in enumerate(entries):
        match entry.kind:
            case "system" | "user":
                yield {"role": entry.kind, "content": _content(entry.text, chance)}
            case "own":
                yield {"role": "assistant", "content": entry.text}
            case "results":
                names = index % 3 == 0
                yield from (_result(*each, names, chance) for each in entry.results if each[0] not in waiting)
            case "answer":
                assert entry.said is not None
                following = entries[index + 1] if index + 1 < len(entries) else entry
                waiting = dict(following.results) if entry.style.split == "between" else {}
                yield from _echo(entry.said, entry.style, waiting, (index + 1) % 3 == 0, chance)


def _content(text: str, chance: random.Random) -> Any:
    if chance.random() < 0.8:
        return text
    return [{"type": "text", "text": piece} for piece in in_pieces(text, chance)]


def _result(id: str, text: str, names: bool, chance: random.Random) -> Json:
    named = {"name": "run"} if names else {}
    return {"role": "tool", "tool_call_id": id, "content": _content(text, chance), **named}


def _echo(said: Said, style: Style, between: dict[str, str], names: bool, chance: random.Random) -> Iterator[Json]:
    """Yield an answer as the harness writes it back, with the results of calls that stand between them.

    `names`: whether results have the name of their tool, as some harnesses write it.
    """
    message: Json = {"role": "assistant", **_text(said, style)}
    if style.fields:
        message |= {**LITELLM, "refusal": None, "parsed": None, "name": "bee"}
    if said.reasoning and style.reasoning:
        message[chance.choice(("reasoning_content", "reasoning"))] = said.reasoning
    calls = [_call(call, number, style) for number, call in enumerate(said.calls)]
    if style.split == "one" or len(calls) < 2:
        yield {**message, "tool_calls": calls} if calls else message
        return
    for number, call in enumerate(calls):
        yield {**(message if number == 0 else {"role": "assistant", "content": ""}), "tool_calls": [call]}
        if call["id"] in between:
            yield _result(call["id"], between[call["id"]], names, chance)


def _text(said: Said, style: Style) -> Json:
    text = spelled(said.text, style)
    if said.calls:
        if style.beside == "absent":
            return {}
        if style.beside in ("null", "empty") or not text:
            return {"content": "" if style.beside == "empty" else None}
    return {"content": [{"type": "text", "text": text}] if style.parts else text}


def _call(call: SaidCall, number: int, style: Style) -> Json:
    function = {"name": call_name(call, style), "arguments": arguments_text(call, style)}
    fields = {"index": number, "caller": None} if style.fields else {}
    return {"id": call_id(call, style), "type": "function", "function": function, **fields}
