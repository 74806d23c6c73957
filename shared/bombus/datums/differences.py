"""By how much the trainer's logprob of each trained token differs from the sampler's: an object for each new step."""

import struct
from collections.abc import Sequence

import msgspec

from bombus.datums.call_sequences import call_sequences
from bombus.errors import LogCorrupted
from bombus.hive.records import CallRecord

DIFFERENCES = "differences/"
KEPT = 32  # steps of an engine; the object of a new step replaces that of an old one
BYTES_MAX = 16 << 20  # of one step, which has two bytes for each token


class StepDifferences(msgspec.Struct, frozen=True, kw_only=True):
    """The differences of one step, made before its first update.

    `episodes` has a float16 for each trained token of an episode, in the order of its sequences. It is NaN where the
    trainer or the sampler has no logprob: the trainer computes none for a group without signal.
    """

    run: int
    step: int
    episodes: dict[str, bytes]


def object_name(engine: str, step: int) -> str:
    return f"{DIFFERENCES}{engine}/{step % KEPT}"


def differences_of_calls(
    values: bytes, records: Sequence[CallRecord], context: Sequence[CallRecord]
) -> dict[tuple[str, int], dict[int, float]]:
    """Return the known differences of an episode, by call and choice, and then by the token's number in the choice.

    `records` and `context` are those that the trainer merged. Raises `LogCorrupted` if the values do not fit them.
    """
    places = [
        (span, token)
        for sequence in call_sequences(records, context).sequences
        for span in sequence.spans
        if span.learnt
        for token in range(span.start or 1, span.end)  # nothing can predict a sequence's first token
    ]
    if len(values) != 2 * len(places):
        raise LogCorrupted(f"{len(places)} tokens were trained on, but there are {len(values) // 2} differences")
    found: dict[tuple[str, int], dict[int, float]] = {}
    for (span, token), (value,) in zip(places, struct.iter_unpack("<e", values)):
        if value == value:
            found.setdefault((records[span.call].id, span.choice), {})[token - span.start] = value
    return found
