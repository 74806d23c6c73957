"""Reads a model call back from the log: as its client saw it, in OpenAI's chat format, or its record."""

from typing import Any

from fastapi import Request, Response

from bombus.bus import Bus
from bombus.errors import Code, LogCorrupted, Refused
from bombus.hive.records import CallRecord, CallRef, decode_record
from bombus_gateway.context import Gateway

TURNS_MAX = 1000
SEQ_DIGITS_MAX = 18


async def call_record(gateway: Gateway, request: Request) -> Response:
    """Return the record of the call whose number on the log is `?seq=`: its prompt, what was sampled, and all tokens.

    Only the hive's admin key may read it. If the hive has no admin key, no request may.
    """
    if not gateway.settings.keys.admin:
        raise Refused(Code.BAD_KEY, "Only an admin key can read prompts and answers: give the hive one, and send it.")
    seq = request.query_params.get("seq", "")
    if not (seq.isascii() and seq.isdecimal() and len(seq) <= SEQ_DIGITS_MAX and int(seq)):
        raise Refused(Code.MALFORMED, f"seq: {seq[:50]!r} is not the number of a call.")
    try:
        stored = await gateway.bus.get(gateway.bus.subjects.calls_stream, int(seq))
    except LogCorrupted as error:
        raise Refused(Code.NO_CALLS, f"The log does not hold call {seq}.") from error
    return Response(stored.data, media_type="application/octet-stream")


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
