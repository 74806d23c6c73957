"""The record of a model call: exact token ids, logprobs, and the policy version of each token.

Token ids are stored as little-endian int32 bytes and logprobs as float32 bytes: four bytes each, with no parsing.
"""

from array import array
from collections.abc import Iterable, Sequence
from enum import StrEnum
from hashlib import blake2b
from typing import Any

import msgspec

from bombus.errors import LogCorrupted
from bombus.hive.decoding import decoded

DIGEST_BYTES = 16
BODY_BYTES_MAX = 32 << 20  # the largest operation or result
BODY_PARTS_MAX = 1024


def digest(body: bytes) -> bytes:
    """Return the 16-byte blake2b digest of a body. A reference contains the digest, so that the bytes found at its
    place can be checked (R6)."""
    return hasher(body).digest()


def hasher(beginning: bytes = b"") -> blake2b:
    """Return a hash object that computes the `digest` of a body that arrives in parts."""
    return blake2b(beginning, digest_size=DIGEST_BYTES)


def pack_tokens(tokens: Iterable[int]) -> bytes:
    return array("i", tokens).tobytes()


def unpack_tokens(packed: bytes) -> list[int]:
    return array("i", packed).tolist()


def pack_logprobs(logprobs: Iterable[float]) -> bytes:
    return array("f", logprobs).tobytes()


def unpack_logprobs(packed: bytes) -> list[float]:
    return array("f", packed).tolist()


class CallRef(msgspec.Struct, frozen=True, array_like=True):
    """The place of a call record in the `calls` stream. A sequence number alone does not identify a record: see R6."""

    seq: int
    id: str
    digest: bytes


class BodyRef(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The location of a body in the `ops` stream: the sequence numbers of its parts, its size and its digest (R6).

    `seqs` lists the sequence numbers in the order of the parts, which is not always ascending.
    """

    seqs: tuple[int, ...]
    size: int
    digest: bytes

    @property
    def first(self) -> int:
        """Return the lowest sequence number. The parts may be out of order, because a part can be resent after a later
        one."""
        return min(self.seqs)


class Span(msgspec.Struct, frozen=True, array_like=True):
    """The tokens [start, end) of a completion, which were sampled under one policy version."""

    version: int
    start: int
    end: int


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"


class LengthLimit(StrEnum):
    """The limit that ended a choice whose finish reason is `length`."""

    REQUEST = "request"  # the request's own max_tokens: the choice is as long as intended
    TURN = "turn"  # the job's max_response_length_in_one_turn
    EPISODE = "episode"  # the job's max_response_length, for all answers of one conversation
    JOB = "job"  # the job's max_model_len, for prompt and answer together
    CONTEXT = "context"  # the model's context
    REPLICA = "replica"  # the replica's cache, or its own --max-model-len


class CallStatus(StrEnum):
    COMPLETE = "complete"
    CUT_OFF = "cut_off"  # the client disconnected: kept for replay, never trained on


TEMPERATURE_MIN = 0.01  # the lowest above 0 (greedy), as in vLLM: logits divided by less may overflow float32


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """Sampling parameters. The defaults sample from the model's unmodified distribution.

    `min_p` and the penalties are defined as in vLLM: the presence and frequency penalties count only sampled tokens,
    while the repetition penalty also counts prompt tokens. `logit_bias` maps token ids to values added to their logits.
    """

    max_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 means all
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    top_logprobs: int = 0  # number of alternatives to report for each position, 0 to 20


class Choice(msgspec.Struct, frozen=True, omit_defaults=True):
    """One completion. `tokens` (int32) and `logprobs` (float32) have one entry for each token.

    If `finish` is `length`, `limit` is the `LengthLimit` that ended the completion. `reasoning_tokens` counts the
    tokens of the model's reasoning. Records from earlier versions have neither `limit` nor `reasoning_tokens`.
    """

    tokens: bytes
    logprobs: bytes
    spans: tuple[Span, ...] = ()
    finish: str = FinishReason.STOP
    message: dict[str, Any] | None = None  # the assistant message as returned (chat calls)
    limit: str = ""
    reasoning_tokens: int = 0

    def was_cut(self, tokens_max: int) -> bool:
        """Return whether the choice was cut off by a limit other than the one in its request. If `limit` is unknown,
        return whether the choice has `tokens_max` tokens."""
        if self.finish != FinishReason.LENGTH:
            return False
        if self.limit:
            return self.limit != LengthLimit.REQUEST
        return len(self.tokens) // 4 >= tokens_max

    def token_ids(self) -> list[int]:
        return unpack_tokens(self.tokens)


class Timings(msgspec.Struct, frozen=True, omit_defaults=True):
    """Nanoseconds since the epoch, on the gateway's clock."""

    received_ns: int = 0
    first_token_ns: int = 0
    finished_ns: int = 0


class CallRecord(msgspec.Struct, frozen=True, kw_only=True, tag="call.v1", tag_field="kind", omit_defaults=True):
    """One model call of an episode, as stored in the `calls` stream.

    With the setting `record_samples`, a record can also contain a training client's samples. The record's `episode` is
    then "".

    The prompt is the parent call's prompt, followed by the tokens of the parent's choice `parent_choice`, followed by
    `prompt_tail`; without a parent it is `prompt_tail` alone. An episode of n turns therefore stores O(n) tokens.
    """

    id: str
    engine: str
    run: int
    episode: str
    parent: CallRef | None = None
    parent_choice: int = 0
    prompt_tail: bytes  # int32
    prompt_tokens: int  # length of the whole prompt
    choices: tuple[Choice, ...]
    sampling: SamplingParams
    status: CallStatus = CallStatus.COMPLETE
    messages: tuple[dict[str, Any], ...] = ()  # the messages that were not in the parent's conversation
    tools: tuple[dict[str, Any], ...] = ()  # only on a call without a parent
    request_digest: bytes = b""
    role: str = ""  # a sub-agent's name, if the harness gives one
    replica: str = ""
    timings: Timings = Timings()
    trace: str = ""
    chat_template_kwargs: dict[str, bool | int | float | str] = {}  # as in the request; only on a call without a parent
    # The purpose of a call that the harness made for itself, outside the task, such as `title`.
    auxiliary_call: str = msgspec.field(default="", name="side_call")
    overridden: tuple[str, ...] = ()  # fields that were not applied as the client sent them, such as `temperature`
    # The request fields that constrained every token of the call's answers, such as `response_format`. The logprobs are
    # then those under the distribution over the allowed tokens.
    constrained: tuple[str, ...] = ()
    sampler: str = ""  # the address of the adapter that sampled it, or "" for the engine's own policy or the base

    def completion_tokens(self) -> int:
        return sum(len(choice.tokens) // 4 for choice in self.choices)

    def reasoning_tokens(self) -> int:
        return sum(choice.reasoning_tokens for choice in self.choices)

    def was_cut(self, turn_tokens_max: int, model_len_max: int) -> bool:
        """Return whether a choice was cut off at a limit of its job, its model or its replica.

        A choice that ended at a smaller `max_tokens` in its request is as long as intended. Records from earlier
        versions do not say which limit applied. For such records, the result depends on the job's limits on a turn, and
        on prompt and completion together.
        """
        tokens_max = min(turn_tokens_max, model_len_max - self.prompt_tokens)
        return any(choice.was_cut(tokens_max) for choice in self.choices)


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(CallRecord)


def encode_record(record: CallRecord) -> bytes:
    return _encoder.encode(record)


def decode_record(body: bytes, ref: CallRef | None = None) -> CallRecord:
    """Decode a record. With `ref`, check that it is the record that `ref` points to.

    Raises `LogCorrupted` if the record's digest or id differs, or if the bytes are not a call record.
    """
    if ref is not None and digest(body) != ref.digest:
        raise LogCorrupted(f"call {ref.id} at {ref.seq}: the digest of the stored record differs from the reference's")
    try:
        record = decoded(_decoder.decode, body)
    except msgspec.MsgspecError as error:
        raise LogCorrupted(f"not a call record: {error}") from error
    if ref is not None and record.id != ref.id:
        raise LogCorrupted(f"call {ref.id} at {ref.seq}: found {record.id} there")
    return record


def add_span(spans: list[Span], version: int, count: int) -> None:
    """Append `count` tokens that were sampled by a version, in place."""
    end = spans[-1].end if spans else 0
    start = spans.pop().start if spans and spans[-1].version == version else end
    if end + count > start:
        spans.append(Span(version, start, end + count))


def spans_of(versions: Sequence[int]) -> tuple[Span, ...]:
    """Run-length encode one policy version per token: [3, 3, 4] -> (Span(3, 0, 2), Span(4, 2, 3))."""
    spans: list[Span] = []
    start = 0
    for index in range(1, len(versions) + 1):
        if index == len(versions) or versions[index] != versions[start]:
            spans.append(Span(versions[start], start, index))
            start = index
    return tuple(spans)
