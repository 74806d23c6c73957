"""OpenAI's Responses API, as Codex and harnesses on OpenAI's SDK speak it: in items, or by the id of a response."""

import json
import random
from collections.abc import Iterator, Sequence
from typing import Any

from tests.histories.dialect import MODEL, Ask, AuxiliaryCall, Json, events, function, in_pieces
from tests.histories.entries import Entry, Said, SaidCall, Style, call_id
from tests.histories.spelling import arguments_text, call_name, spelled

ENCRYPTED = "reasoning.encrypted_content"
COMPACTION = {b"x-codex-turn-metadata": b'{"request_kind": "compaction"}'}


class Responses:
    path = "/v1/responses"
    joins_users = False
    auxiliary_calls = (AuxiliaryCall("compaction", user="Summarize all of it", appended=True, headers=COMPACTION),)

    def __init__(self, continues: bool) -> None:
        self.continues = continues
        self.name = "responses by their ids" if continues else "responses in items"

    def names(self, said: Said, style: Style) -> bool:
        return not style.bare  # by the ids of its items

    def body(self, ask: Ask, chance: random.Random) -> Json:
        entries = [*ask.entries]
        body: Json = {"model": MODEL, "store": self.continues, **ask.fields}
        if entries[0].kind == "system":
            body["instructions"] = entries.pop(0).text
        if ask.continues:
            body["previous_response_id"] = f"resp_{ask.continues}"
        items = [*_items(entries, chance)]
        only = items[0] if len(items) == 1 else {}
        is_text = only.get("role") == "user" and isinstance(only["content"], str) and chance.random() < 0.5
        body["input"] = only["content"] if is_text else items
        if ask.tools:
            body["tools"] = [{"type": "function", "strict": False, **function(name)} for name in ask.tools]
            body["tool_choice"] = "auto"
        if ask.stream:
            body["stream"] = True
        if chance.random() < 0.5:
            body["include"] = [ENCRYPTED]
            body["prompt_cache_key"] = "s1"
        return body

    def whole(self, body: bytes) -> Said:
        return _said(json.loads(body))

    def streamed(self, body: bytes) -> Said:
        """Take the items that are done, and check that the last event has the same ones."""
        items: list[Json] = []
        texts: dict[str, str] = {}
        numbers = []
        for name, data in events(body):
            assert name == data["type"]
            numbers.append(data["sequence_number"])
            if name.endswith(".delta"):
                texts[data["item_id"]] = texts.get(data["item_id"], "") + data["delta"]
            elif name == "response.output_item.done":
                assert data["output_index"] == len(items)
                items.append(data["item"])
                assert texts.get(data["item"]["id"], "") == _text_of(data["item"])
        assert numbers == [*range(len(numbers))]
        assert name in ("response.completed", "response.incomplete"), name
        assert data["response"]["output"] == items
        return _said(data["response"])


def _text_of(item: Json) -> str:
    parts = item.get("content") or item.get("summary") or []
    return str(item.get("arguments", "")) + "".join(part["text"] for part in parts)


def _said(response: Json) -> Said:
    items: list[Json] = response["output"]
    text = "".join(_text_of(item) for item in items if item["type"] == "message")
    reasoning = "".join(_text_of(item) for item in items if item["type"] == "reasoning")
    calls = [
        SaidCall(item["call_id"], item["name"], item["arguments"]) for item in items if item["type"] == "function_call"
    ]
    call = response["id"].removeprefix("resp_")
    return Said(call, text, reasoning, tuple(calls), response["status"], tuple(items))


def _items(entries: Sequence[Entry], chance: random.Random) -> Iterator[Json]:
    waiting: dict[str, str] = {}
    for index, entry in enumerate(entries):
        match entry.kind:
            case "system" | "user":
                role = "developer" if entry.kind == "system" else "user"
                yield {"type": "message", "role": role, "content": _content(entry.text, chance)}
            case "own":
                yield {"role": "assistant", "content": entry.text}
            case "results":
                yield from (_result(*each, chance) for each in entry.results if each[0] not in waiting)
            case "answer":
                assert entry.said is not None
                following = entries[index + 1] if index + 1 < len(entries) else entry
                waiting = dict(following.results) if entry.style.split == "between" else {}
                yield from _echo(entry.said, entry.style, waiting, chance)


def _content(text: str, chance: random.Random) -> Any:
    if chance.random() < 0.5:
        return text
    return [{"type": "input_text", "text": piece} for piece in in_pieces(text, chance)]


def _result(id: str, text: str, chance: random.Random) -> Json:
    return {"type": "function_call_output", "call_id": id, "output": _content(text, chance)}


def _echo(said: Said, style: Style, between: dict[str, str], chance: random.Random) -> Iterator[Json]:
    calls = iter(said.calls)
    for item in said.parts:
        match item["type"]:
            case "reasoning" if style.reasoning:
                filled = {"content": None} if style.fields else {}
                yield _bare({**item, **filled}, style)
            case "message" if not (said.calls and style.beside != "kept"):
                yield _message(spelled(said.text, style), item, style)
            case "function_call":
                call = next(calls)
                function = {"name": call_name(call, style), "arguments": arguments_text(call, style)}
                id = call_id(call, style)
                yield _bare({**item, **function, "call_id": id}, style)
                if id in between:
                    yield _result(id, between[id], chance)


def _message(text: str, item: Json, style: Style) -> Json:
    if style.bare and not style.parts:
        return {"role": "assistant", "content": text}
    return _bare({**item, "content": [{**item["content"][0], "text": text}]}, style)


def _bare(item: Json, style: Style) -> Json:
    """Return an item as the harness keeps it: some drop ids and states, some fill in what was not there."""
    if style.bare:
        item = {key: value for key, value in item.items() if key not in ("id", "status", "encrypted_content")}
    return {**item, "caller": None, "namespace": None, "phase": None} if style.fields else item
