"""Extends long random conversations with and without their middle: what follows an answer has to be the same."""

import json
import random
from collections.abc import Sequence
from typing import Any

from bombus.errors import Refused
from bombus.hive.records import pack_tokens
from bombus_gateway.text.message import ChatMessage
from bombus_gateway.text.renderer import TemplateRenderer
from bombus_gateway.text.rendering import TextModel
from tests.templates.conversations import TOOLS, developer, system, user

ANSWERS = range(4, 16)
BRANCH, REFUSED = "a branch", "refused"
LONG_TEXT = "word after word " * 200


def differences(model: TextModel, count: int, seed: int) -> list[str]:
    """Return which of `count` conversations go on otherwise without their middle. Fails if none was shortened."""
    pick = random.Random(seed)
    renderer = model.renderer.undated()  # some templates write the second
    found: list[str] = []
    shortened = 0
    for number in range(count):
        messages, known, tools = conversation(pick)
        less = renderer.shortened(messages, known, tools)
        ended = pick.random() < 0.8
        if less is None:
            continue
        shortened += 1
        history, at = _history(model, renderer, messages, known, tools, ended=ended)
        whole, shorter = (_after(model, renderer, history, at, *each) for each in ((messages, known, tools), less))
        if whole != shorter and REFUSED not in (whole, shorter) and shorter != BRANCH:
            found.append(f"{number}: {whole!r} and {shorter!r}: {json.dumps(messages)[:2000]}")
    assert shortened > count / 2 or not all(renderer.kept)
    return found


def conversation(pick: random.Random) -> tuple[list[ChatMessage], int, list[dict[str, Any]]]:
    """Return messages, how many of them are the history, which ends with an answer, and tools."""
    reasons, calls = pick.random() < 0.5, pick.random() < 0.7
    messages: list[ChatMessage] = []
    if pick.random() < 0.6:
        messages.append(pick.choice((system, developer))(pick.choice(("Be brief.", LONG_TEXT))))
    messages.append(user(pick.choice(("Hi.", LONG_TEXT))))
    for number in range(pick.choice(ANSWERS)):
        messages.append(_answer(pick, number, reasons, calls))
        messages += _following(pick, messages[-1], number)
    known = max(index for index, message in enumerate(messages) if message["role"] == "assistant") + 1
    return messages, known, TOOLS if calls else []


def _answer(pick: random.Random, number: int, reasons: bool, calls: bool) -> ChatMessage:
    message: ChatMessage = {"role": "assistant", "content": pick.choice(("Well.", LONG_TEXT, f"Number {number}"))}
    if reasons and pick.random() < 0.8:
        message["reasoning_content"] = pick.choice(("Hm.", LONG_TEXT))
    if calls and pick.random() < 0.7:
        message["content"] = pick.choice(("", message["content"], None))
        message["tool_calls"] = [_call(pick, f"call{number:04d}{at}") for at in range(pick.choice((1, 1, 1, 2)))]
    return message


def _call(pick: random.Random, id: str) -> dict[str, Any]:
    name = pick.choice(("weather", "weather", "local_time"))
    arguments = json.dumps({"city": pick.choice(("Paris", LONG_TEXT))})
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _following(pick: random.Random, answer: ChatMessage, number: int) -> list[ChatMessage]:
    results: list[ChatMessage] = [
        {"role": "tool", "tool_call_id": call["id"], "content": pick.choice(("sunny", LONG_TEXT))}
        for call in answer.get("tool_calls") or ()
    ]
    question = user(pick.choice(("And now?", f"Question {number}")))
    return [*results, question] if not results or pick.random() < 0.1 else results


def _history(
    model: TextModel,
    renderer: TemplateRenderer,
    messages: Sequence[ChatMessage],
    known: int,
    tools: Sequence[Any],
    *,
    ended: bool,
) -> tuple[bytes, int]:
    """Return the tokens of a prompt and its answer, and where the answer begins; nothing where it is refused."""
    try:
        prompt = renderer.render(renderer.adapted(messages[: known - 1]), tools)
    except Refused:
        return b"", 0
    said = model.tokenizer.encode(messages[known - 1]["content"] or "x")
    answer = [*said, *(renderer.stop_token_ids[:1] if ended else ())]
    return pack_tokens([*prompt, *answer]), len(prompt)


def _after(
    model: TextModel,
    renderer: TemplateRenderer,
    history: bytes,
    at: int,
    messages: Sequence[ChatMessage],
    known: int,
    tools: Sequence[Any],
) -> str:
    """Return what is appended to the history, `BRANCH` where the template changes what was before, or `REFUSED`."""
    if not history:
        return REFUSED
    try:
        after = renderer.extend_as_given(history, at, renderer.adapted(messages), known, tools)
    except Refused:
        return REFUSED
    return BRANCH if after is None else model.tokenizer.decode(after, with_specials=True)
