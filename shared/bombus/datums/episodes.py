"""Ended episodes in the form that their client receives, and as data for training operations.

A sequence is one conversation of the episode, complete up to its end. In a datum it is shifted by one: token i predicts
target i.
"""

from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import compress
from math import isfinite
from typing import TYPE_CHECKING

import msgspec

from bombus.config.algorithms import Estimator
from bombus.datums.advantages import call_advantages
from bombus.datums.call_sequences import CallSequence, call_sequences, choice_of
from bombus.errors import LogCorrupted
from bombus.hive.decoding import decoded
from bombus.hive.records import CallRecord, unpack_tokens

if TYPE_CHECKING:
    import tinker


class LearntSequence(msgspec.Struct, frozen=True):
    """A sequence up to the last token that is trained on: `tokens` (int32), and arrays of the same length.

    For a token that was not sampled, `logprobs` (float32) is 0 and `calls` (int32) is -1; otherwise `calls` is the
    number of the call that sampled it. `mask` has a byte for each token, 1 if it is trained on in this sequence.
    """

    tokens: bytes
    logprobs: bytes
    calls: bytes
    mask: bytes

    @property
    def size(self) -> int:
        return len(self.tokens) + len(self.logprobs) + len(self.calls) + len(self.mask)


class EndedEpisode(msgspec.Struct, frozen=True, kw_only=True):
    """An ended episode with its sequences. `sampler` is the path of the weights from which its calls were sampled.

    `calls` is the number of its calls. `call_rewards`, if not None, has one reward for each call.
    """

    episode_uuid: str
    task_id: str
    reward: float
    calls: int
    sequences: tuple[LearntSequence, ...]
    sampler: str = ""
    call_rewards: tuple[float, ...] | None = None


class EpisodeDatum(msgspec.Struct, frozen=True, kw_only=True):
    """A sequence from an episode, in the form that a loss takes: N tokens, and for each of them the target that
    follows.

    The sampler's `logprobs`, at temperature 1, and the `advantages` are 0 wherever `mask` is 0: at targets that were
    not sampled, or are trained on in another sequence. `episode` is the id with which the episode was claimed.
    """

    episode: str
    task: str
    reward: float
    sampler: str
    tokens: list[int]
    target_tokens: list[int]
    logprobs: list[float]
    mask: list[float]
    advantages: list[float]

    def to_tinker(self) -> "tinker.Datum":
        """Return the datum in the `tinker` SDK's form, for `importance_sampling`, `ppo`, `cispo` or `dro`."""
        from tinker import types

        inputs = {"target_tokens": self.target_tokens, "logprobs": self.logprobs, "advantages": self.advantages}
        return types.Datum(model_input=types.ModelInput.from_ints(self.tokens), loss_fn_inputs=inputs)


def learnt_sequences(records: Sequence[CallRecord], context: Sequence[CallRecord] = ()) -> tuple[LearntSequence, ...]:
    """Return the sequences of an episode's calls, without those that have no token to train on (see `call_sequences`).

    Raises `LogCorrupted` if the calls do not fit together.
    """
    found = (_learnt(sequence, records) for sequence in call_sequences(records, context).sequences)
    return tuple(sequence for sequence in found if sequence is not None)


def _learnt(sequence: CallSequence, records: Sequence[CallRecord]) -> LearntSequence | None:
    length = len(sequence.tokens) // 4
    logprobs, mask = bytearray(4 * length), bytearray(length)
    calls = array("i", [-1]) * length
    for span in sequence.spans:
        logprobs[4 * span.start : 4 * span.end] = choice_of(records, span).logprobs
        calls[span.start : span.end] = array("i", [span.call]) * (span.end - span.start)
        mask[span.start : span.end] = bytes([span.learnt]) * (span.end - span.start)
    mask[:1] = bytes(min(length, 1))  # no token before the first one could predict it
    end = mask.rfind(1) + 1
    if not end:
        return None
    if not all(map(isfinite, compress(array("f", bytes(logprobs)), mask))):
        raise LogCorrupted(f"call {records[sequence.spans[-1].call].id}: a sampled token's logprob is not finite")
    return LearntSequence(
        sequence.tokens[: 4 * end], bytes(logprobs[: 4 * end]), calls[:end].tobytes(), bytes(mask[:end])
    )


def read_ended(episodes: Sequence[object]) -> list[EndedEpisode]:
    """Return the episodes in a gateway's answer. Raises `msgspec.MsgspecError` if any of them cannot be decoded."""
    return decoded(lambda found: msgspec.convert(found, list[EndedEpisode]), episodes)


def datums_of(episodes: Sequence[EndedEpisode], estimator: Estimator = Estimator.DR_GRPO) -> list[EpisodeDatum]:
    """Return the episodes' sequences with advantages, each computed among the episodes with the same task and sampler.

    Raises `ValueError` for an estimator that normalises over whole batches.
    """
    if estimator.over_batch:
        raise ValueError(
            f"{estimator} is normalized over the tokens of a whole batch: choose {Estimator.DR_GRPO}, "
            f"{Estimator.GRPO}, {Estimator.RLOO} or {Estimator.OPO}, or compute advantages from the rewards"
        )
    groups: dict[tuple[str, str], list[EndedEpisode]] = {}
    for episode in episodes:
        groups.setdefault((episode.task_id, episode.sampler), []).append(episode)
    return [datum for group in groups.values() for datum in _datums(group, estimator)]


def _datums(group: Sequence[EndedEpisode], estimator: Estimator) -> Iterator[EpisodeDatum]:
    found = call_advantages(
        [episode.reward for episode in group],
        [episode.call_rewards for episode in group],
        [_lengths(episode) for episode in group],
        estimator,
    )
    for episode, advantages in zip(group, found, strict=True):
        for sequence in episode.sequences:
            yield _datum(episode, sequence, advantages)


def _lengths(episode: EndedEpisode) -> list[int]:
    """Return how many tokens in each call are trained on."""
    counts = Counter(
        call for sequence in episode.sequences for call in compress(array("i", sequence.calls), sequence.mask)
    )
    return [counts[call] for call in range(episode.calls)]


def _datum(episode: EndedEpisode, sequence: LearntSequence, advantages: Sequence[float]) -> EpisodeDatum:
    tokens, mask = unpack_tokens(sequence.tokens), sequence.mask[1:]
    logprobs, calls = array("f", sequence.logprobs)[1:], array("i", sequence.calls)[1:]
    return EpisodeDatum(
        episode=episode.episode_uuid,
        task=episode.task_id,
        reward=episode.reward,
        sampler=episode.sampler,
        tokens=tokens[:-1],
        target_tokens=tokens[1:],
        logprobs=[logprob if learnt else 0.0 for logprob, learnt in zip(logprobs, mask, strict=True)],
        mask=[float(learnt) for learnt in mask],
        advantages=[advantages[call] if learnt else 0.0 for call, learnt in zip(calls, mask, strict=True)],
    )
