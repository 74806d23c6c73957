"""Merges the call records of one episode into token sequences, so that every sampled token is trained on once."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bombus.datums.call_sequences import CallSequence, call_sequences, choice_of
from bombus.errors import LogCorrupted
from bombus.hive.records import CallRecord

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class TokenSequence:
    """One sequence of an episode, cut after its last trained token. All arrays have the length of `tokens_T`.

    `logprobs_T` (the sampler's), `versions_T`, `calls_T` and `temperatures_T` are set at sampled tokens; at all other
    tokens they are 0, -1, -1 and 1. `calls_T` indexes the records that were passed to `merge_calls`.
    """

    episode: str
    tokens_T: Ints
    loss_mask_T: Flags
    logprobs_T: Floats
    versions_T: Ints
    calls_T: Ints
    temperatures_T: Floats

    def __len__(self) -> int:
        return len(self.tokens_T)


@dataclass(frozen=True)
class MergedEpisode:
    """An episode's sequences. Of its `calls`, `merged_calls` extended another call, and each of the rest began a new
    sequence."""

    sequences: tuple[TokenSequence, ...]
    calls: int
    merged_calls: int
    trained_tokens: int


def merge_calls(episode: str, records: Sequence[CallRecord], context: Sequence[CallRecord] = ()) -> MergedEpisode:
    """Merge the calls that belong to `episode`: see `call_sequences`. A sequence ends at its last trained token.

    Raises `LogCorrupted` if the calls do not fit together, or a logprob is not finite.
    """
    merged = call_sequences(records, context)
    found = (_sequence(episode, each, records) for each in merged.sequences)
    sequences = tuple(sequence for sequence in found if sequence is not None)
    trained = sum(int(sequence.loss_mask_T.sum()) for sequence in sequences)
    return MergedEpisode(sequences, len(records), merged.merged_calls, trained)


def _sequence(episode: str, found: CallSequence, records: Sequence[CallRecord]) -> TokenSequence | None:
    """Make the sequence of one conversation. Return None if it has no trained tokens."""
    tokens = np.frombuffer(found.tokens, dtype="<i4").astype(np.int64)
    length = len(tokens)
    mask = np.zeros(length, dtype=np.bool_)
    logprobs = np.zeros(length, dtype=np.float32)
    versions = np.full(length, -1, dtype=np.int64)
    calls = np.full(length, -1, dtype=np.int64)
    temperatures = np.ones(length, dtype=np.float32)
    for sampled in found.spans:
        choice, start, end = choice_of(records, sampled), sampled.start, sampled.end
        logprobs[start:end] = np.frombuffer(choice.logprobs, dtype="<f4")
        calls[start:end] = sampled.call
        temperatures[start:end] = max(records[sampled.call].sampling.temperature, 0.0) or 1.0
        for span in choice.spans:
            versions[start + span.start : start + span.end] = span.version
        mask[start:end] = sampled.learnt
    mask[:1] = False  # nothing comes before the first token, so nothing can predict it
    if not np.isfinite(logprobs[mask]).all():
        raise LogCorrupted(f"episode {episode}: a sampled token's logprob is not finite")
    trained = np.flatnonzero(mask)
    if not len(trained):
        return None
    end = int(trained[-1]) + 1
    return TokenSequence(
        episode, tokens[:end], mask[:end], logprobs[:end], versions[:end], calls[:end], temperatures[:end]
    )
