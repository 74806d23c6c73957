"""Reads a model call back from the log as its client saw it: request and reply in OpenAI's chat format."""

from typing import Any

from bombus.bus import Bus
from bombus.errors import Code, Refused
from bombus.hive.records import CallRecord, CallRef, decode_record

TURNS_MAX = 1000


async def replay_call(bus: Bus, ref: CallRef, model: str) -> dict[str, Any]:
    """Return `{input, output}` for the call at `ref`, including its earlier turns.

    Raises `LogCorrupted` if the log no longer has these turns, and `Refused(TOO_LARGE)` if the conversation is very
    long.
    """
    chain = await _chain(bus, ref)
    last = chain[-1]
    messages: list[dict[str, Any]] = []
    for index, record in enumerate(chain):
        messages += record.messages
        if index + 1 < len(chain):
            reply = record.choices[chain[index + 1].parent_choice].message
            messages += [reply] if reply is not None else []
    sampling = last.sampling
    request: dict[str, Any] = {
        "model": model,
        "messages": messages,
        "temperature": sampling.temperature,
        "max_tokens": sampling.max_tokens,
        "n": len(last.choices),
    }
    if chain[0].tools:
        request["tools"] = list(chain[0].tools)
    if chain[0].chat_template_kwargs:
        request["chat_template_kwargs"] = chain[0].chat_template_kwargs
    return {"input": request, "output": _completion(last, model)}


async def _chain(bus: Bus, ref: CallRef) -> list[CallRecord]:
    """Return the call and the earlier calls that it extends, oldest first."""
    chain: list[CallRecord] = []
    at: CallRef | None = ref
    while at is not None:
        if len(chain) >= TURNS_MAX:
            raise Refused(Code.TOO_LARGE, f"The conversation has more than {TURNS_MAX} turns.")
        record = decode_record((await bus.get(bus.subjects.calls_stream, at.seq)).data, at)
        chain.append(record)
        at = record.parent
    return chain[::-1]


def _completion(record: CallRecord, model: str) -> dict[str, Any]:
    completion_tokens = record.completion_tokens()
    return {
        "id": record.id,
        "object": "chat.completion",
        "created": record.timings.received_ns // 1_000_000_000,
        "model": model,
        "choices": [
            {
                "index": index,
                "message": choice.message or {"role": "assistant", "content": ""},
                "finish_reason": choice.finish,
            }
            for index, choice in enumerate(record.choices)
        ],
        "usage": {
            "prompt_tokens": record.prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": record.prompt_tokens + completion_tokens,
        },
    }
