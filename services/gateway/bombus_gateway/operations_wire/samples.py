"""Write samples in the protobuf form that Tinker's client reads."""

import math
import struct
from array import array
from collections.abc import Sequence
from typing import TypeAlias

import msgspec

from bombus.hive.records import FinishReason
from bombus_gateway.operations_wire.messages import SAMPLE_RESPONSE, Message, WireStop

NOTHING = (0, -99999.0)  # padding where there is no alternative
_STOPS = {FinishReason.STOP: WireStop.STOP, FinishReason.LENGTH: WireStop.LENGTH}

Alternatives: TypeAlias = Sequence[Sequence[tuple[int, float]]]  # (token, logprob) pairs per position, likeliest first


class SampledTokens(msgspec.Struct, frozen=True, kw_only=True):
    """One sample: its tokens (int32), including the stop token if there is one, and their logprobs (float32)."""

    tokens: bytes
    logprobs: bytes
    finish: FinishReason
    top: Alternatives = ()


def checked_finish(finish: FinishReason) -> FinishReason:
    """Return why a sample ended. Raises `ValueError` unless the sample stopped or reached its length limit."""
    if finish not in _STOPS:
        raise ValueError(f"a sample that ended with {finish} cannot be written for a client")
    return finish


def write_samples(
    samples: Sequence[SampledTokens],
    prompt_logprobs: bytes = b"",
    top_prompt: Alternatives = (),
    cached_prompt_tokens: int = 0,
) -> bytes:
    """Return samples as protobuf.

    `prompt_logprobs` are float32, one for each token of the prompt, with NaN for the first token and for tokens that
    were not scored. Raises the same `ValueError` as `checked_finish`.
    """
    answer = SAMPLE_RESPONSE(prompt_cache_hit_tokens=cached_prompt_tokens)
    for sample in samples:
        reason = _STOPS[checked_finish(sample.finish)]
        added = answer.sequences.add(stop_reason=reason, tokens=sample.tokens, logprobs=sample.logprobs)
        if sample.top:
            _fill(added.topk_sampled_logprobs, sample.top)
    if prompt_logprobs:
        answer.prompt_logprobs = prompt_logprobs
    if top_prompt:
        _fill(answer.topk_prompt_logprobs, top_prompt)
    return bytes(answer.SerializeToString())


def unscored(tokens: int, logprobs: Sequence[float]) -> bytes:
    """Return logprobs for a prompt of `tokens` tokens: the given logprobs for its last tokens, and NaN for those
    before."""
    missing = tokens - len(logprobs)
    return struct.pack(f"<{tokens}f", *[math.nan] * missing, *logprobs)


def _fill(target: Message, rows: Alternatives) -> None:
    """Write alternatives as two matrices, with as many columns as the longest row has entries."""
    width = max(map(len, rows))
    padded = [pair for row in rows for pair in (*row, *[NOTHING] * (width - len(row)))]
    target.token_ids = array("i", [token for token, _ in padded]).tobytes()
    target.logprobs = array("f", [logprob for _, logprob in padded]).tobytes()
    target.k, target.length = width, len(rows)
