"""Plays six turns through a real gateway, as an agent with OpenAI's SDK does, and looks at what was recorded."""

import json
import re
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from openai.types.chat import ChatCompletionMessage

from bombus.bus import Bus
from bombus.hive.records import CallRecord, unpack_tokens
from bombus_gateway.text.message import ChatMessage
from tests.gateway.openai_hive import gateway_hive, says
from tests.templates.battery import (
    PAIR,
    TALLY,
    Extension,
    Kind,
    Outcome,
    Spoken,
    Subject,
    difference,
    spoken,
    turns_of,
)
from tests.templates.conversations import TOOLS, assistant, result, user
from tests.templates.families import MODEL

JOB: dict[str, Any] = {
    "bombus": {
        "model": {"path": MODEL},
        "rollout": {
            "max_prompt_length": 20_000,
            "max_response_length": 10_000,
            "max_response_length_in_one_turn": 1_000,
        },
    }
}


class Asked(NamedTuple):
    """One call of the episode.

    `sent` has the messages of the agent as the model reads them, `spoken` the same with answers as the model said them:
    they differ where the model's syntax is not known, or in white space. `said` is what the replica sampled, between
    `began` and `ended`.
    """

    sent: list[ChatMessage]
    spoken: list[ChatMessage]
    said: Spoken
    began: datetime
    ended: datetime

    def since(self, root: "Asked") -> list[ChatMessage]:
        """Return the messages with the answers of a sequence as they were said: its first prompt has what was sent."""
        return [*root.sent, *self.spoken[len(root.sent) :]]


async def play(bus: Bus, subject: Subject) -> list[Outcome]:
    """Play six turns, with tools where the template has them, and compare all records with the template's rendering.

    The replica samples what the template writes for an answer. The agent appends the message that it receives.
    """
    # Where calls are not read, the agent would get them as text, and have nothing to answer.
    turns, tools = turns_of(subject, tools=bool(subject.ours.renderer.reading.calls))
    TALLY.played["with tools" if tools else "without tools" if turns else "not, as turns are refused"] += 1
    if not turns:
        return []
    outcomes: list[Outcome] = []
    asked: list[Asked] = []
    messages: list[Any] = []
    conversation: list[ChatMessage] = []
    request: dict[str, Any] = {"model": MODEL, "tools": tools} if tools else {"model": MODEL}
    async with gateway_hive(bus, JOB, subject.reference.family.files) as hive:
        episode, key = await hive.claim()
        agent = hive.client(key)
        following = [*(sent for sent, _ in turns[1:]), [user("Go on.")]]
        for (sent, answer), then in zip(turns, following, strict=True):
            sent = _answering(messages, sent)
            messages, conversation = [*messages, *sent], [*conversation, *map(_as_read, sent)]
            began = datetime.now()
            said = spoken(subject.at(began), conversation, answer, then, tools)
            hive.replica.scripts.append(says(said.tokens))
            completion = await agent.chat.completions.create(messages=messages, **request)
            asked.append(Asked([*map(_as_read, messages)], conversation, said, began, datetime.now()))
            received = _message(completion.choices[0].message)
            detail = _misread(subject, said, received)
            outcomes.append(Outcome(f"answer {len(asked)}", Kind.WRONG if detail else Kind.EQUAL, detail))
            messages, conversation = [*messages, received], [*conversation, _with_ids(said.message, received)]
        records = await hive.records(episode, len(turns))
    return outcomes + _compared(subject, asked, records, tools)


async def play_pair(bus: Bus, subject: Subject) -> list[Outcome]:
    """Let the model sample two calls at once where its template takes one at a time, and look at what follows.

    That is what the template writes after the last call. Nothing is played with templates of another kind.
    """
    reference, ours = subject
    question, results = user("Weather and time in Paris?"), [result(1, "sunny"), result(2, "12:00")]
    single = [question, assistant("", PAIR[1]), *results]
    takes_both = reference.texts.text_or_none([question, assistant("", *PAIR), *results], TOOLS) is not None
    if takes_both or not ours.renderer.reading.calls or reference.texts.text_or_none(single, TOOLS) is None:
        return []
    first, last = (spoken(subject, [question], assistant("", each), results, TOOLS).tokens for each in PAIR)
    sampled = [*first[:-1], *ours.tokenizer.encode("; "), *last]
    async with gateway_hive(bus, JOB, reference.family.files) as hive:
        episode, key = await hive.claim()
        agent = hive.client(key)
        messages: list[Any] = [question]
        request: dict[str, Any] = {"model": MODEL, "tools": TOOLS}
        for tokens, sent in ((sampled, results), (last, [])):
            hive.replica.scripts.append(says(tokens))
            completion = await agent.chat.completions.create(messages=messages, **request)
            received = _message(completion.choices[0].message)
            messages += [received, *_answering([received], sent)]
        asked, answered = await hive.records(episode, 2)
    wanted, tail = reference.ids(single, TOOLS), unpack_tokens(answered.prompt_tail)
    read = [_call(each) for each in messages[1].get("tool_calls", ())] == [_call(each) for each in PAIR]
    goes_on = answered.parent is not None and answered.parent.id == asked.id
    detail = "" if tail == wanted[-len(tail) :] else difference(reference, tail, wanted)
    outcomes = {"both calls are read": "" if read else f"received {messages[1]}", "what follows": detail}
    outcomes["one sequence"] = "" if goes_on else "a branch began"
    return [Outcome(name, Kind.WRONG if why else Kind.EQUAL, why) for name, why in outcomes.items()]


def _answering(messages: Sequence[ChatMessage], sent: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Return what is sent, with results under the ids of the calls that were received last.

    Where none was received, there are no results of it.
    """
    received = messages[-1].get("tool_calls", ()) if messages else ()
    if not received and any(message["role"] == "tool" for message in sent):
        return [user("Go on.")]
    calls = iter(received)
    ids = ((message, next(calls, None) if message["role"] == "tool" else None) for message in sent)
    return [{**message, "tool_call_id": call["id"]} if call else message for message, call in ids]


def _with_ids(said: ChatMessage, received: ChatMessage) -> ChatMessage:
    """Return what was said, with its calls under the ids that the agent received."""
    if "tool_calls" not in said or "tool_calls" not in received:
        return said
    pairs = zip(said["tool_calls"], received["tool_calls"])
    return _as_read({**said, "tool_calls": [{**call, "id": got["id"]} for call, got in pairs]})


_OURS = re.compile(r"call_[0-9a-f]{20}\d+_\d+-")


def _own_id(call_id: str) -> str:
    """Return the id that the model wrote for a call, where the agent's is made of it."""
    return _OURS.sub("", call_id, count=1)


def _as_read(message: ChatMessage) -> ChatMessage:
    """Return a message as the model reads it: with its own ids of calls, whose names come first."""
    made = dict(message)
    if "tool_call_id" in made:
        made["tool_call_id"] = _own_id(made["tool_call_id"])
    if "tool_calls" in made:
        made["tool_calls"] = [_call_as_read(call) for call in made["tool_calls"]]
    return made


def _call_as_read(call: dict[str, Any]) -> dict[str, Any]:
    function = {key: call["function"][key] for key in ("name", "arguments")}
    return {"id": _own_id(call["id"]), "type": "function", "function": function}


def _message(received: ChatCompletionMessage) -> ChatMessage:
    """Return a message as the agent sends it back: as it is, without what is null, but for its content."""
    return {"content": None, **received.model_dump(exclude_none=True)}


def _misread(subject: Subject, said: Spoken, received: ChatMessage) -> str:
    """Say what the agent received that differs from what the model said, where the syntax of the template is known."""
    reading = subject.ours.renderer.reading
    calls = [_call(call) for call in said.message.get("tool_calls", ())]
    if calls and not reading.calls:
        return ""
    content = (received["content"] or "").strip()
    if said.tokens[0] in subject.ours.tokenizer.specials:  # the turn begins with a header of its own
        content = content.removeprefix("model").strip()
    reasoning = said.message.get("reasoning_content", "") if reading.reasoning else ""
    wanted = ((said.message["content"] or "").strip(), calls, reasoning)
    found_calls = [_call(call) for call in received.get("tool_calls", ())]
    found = (content, found_calls, received.get("reasoning_content", "").strip())
    if found != wanted:
        return f"received {found}, said {wanted}"
    return _with_another_id(said.message, received, subject.reference.decoded(said.tokens))


def _with_another_id(said: ChatMessage, received: ChatMessage, sampled: str) -> str:
    """Say which call was received with another id than the model wrote for it, where it wrote one."""
    for call, got in zip(said.get("tool_calls", ()), received.get("tool_calls", ())):
        own = _own_id(got["id"])
        if (call["id"] in sampled and own != call["id"]) or (own != got["id"] and own not in sampled):
            return f"received a call of id {got['id']}, and the model wrote {sampled}"
    return ""


def _call(call: dict[str, Any]) -> tuple[str, Any]:
    return call["function"]["name"], json.loads(call["function"]["arguments"])


def _compared(
    subject: Subject, asked: Sequence[Asked], records: Sequence[CallRecord], tools: list[dict[str, Any]]
) -> list[Outcome]:
    """Compare each recorded prompt with the template's rendering of the messages that the agent sent."""
    outcomes: list[Outcome] = []
    history: list[int] = []
    root, then = asked[0], subject  # the first call of the sequence, and the template at its time
    for number, (call, record) in enumerate(zip(asked, records, strict=True)):
        assert record.choices[0].token_ids() == call.said.tokens
        assert record.parent is None or record.parent.id == records[number - 1].id
        tail = unpack_tokens(record.prompt_tail)
        now, detail = (then, "") if record.parent else _rendered(subject, call, tail, tools)
        if number and not detail:
            last = asked[number - 1]
            before = then.reference.texts.text(last.since(root), tools)
            made = Extension(before, last.said.tokens, history, tail if record.parent else None)
            detail = made.misjudged(then.reference, call.since(root), tools)
        if record.parent is None:
            root, then, history = call, now, []
        outcomes.append(Outcome(f"prompt {number + 1}", Kind.WRONG if detail else Kind.EQUAL, detail))
        history = history + tail + call.said.tokens
    return outcomes


def _rendered(subject: Subject, call: Asked, prompt: list[int], tools: list[dict[str, Any]]) -> tuple[Subject, str]:
    """Return the template at the time when it wrote a prompt, to the second, and what differs if there is no such."""
    seconds = int(call.ended.timestamp()) - int(call.began.timestamp())
    found = [subject.at(call.began + timedelta(seconds=more)) for more in range(seconds + 1)]
    for each in found:
        if each.reference.ids(call.sent, tools) == prompt:
            return each, ""
    return found[0], difference(subject.reference, prompt, found[0].reference.ids(call.sent, tools))
