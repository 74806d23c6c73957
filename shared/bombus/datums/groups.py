"""Convert ended episodes for one task to a rollout group, which has a sequence and its reward for each conversation."""

from array import array
from collections.abc import Sequence
from itertools import compress
from math import isfinite
from typing import Any

import msgspec

from bombus.config.algorithms import Estimator
from bombus.datums.advantages import call_advantages
from bombus.datums.call_sequences import CallSequence, call_sequences, choice_of, learnt_tokens
from bombus.errors import LogCorrupted
from bombus.hive.records import CallRecord, unpack_tokens
from bombus.hive.trajectories.records import PackedFloats, RolloutGroup, pack_ints
from bombus.hive.trajectories.training import NOT_TRAINED, TEMPERATURE

NO_LOGPROB = 1.0  # used as the logprob of a token that is not trained on
_encode = msgspec.json.Encoder().encode


class GroupedEpisode(msgspec.Struct, frozen=True, kw_only=True):
    """An ended episode with its calls. See `call_sequences` for `context`."""

    reward: float
    records: Sequence[CallRecord]
    context: Sequence[CallRecord] = ()
    call_rewards: tuple[float, ...] | None = None


class _Sequence(msgspec.Struct, frozen=True):
    """A sequence up to the last token that is trained on.

    For each token, `calls` has the number of the call that sampled it, or -1 if it is not trained on.
    """

    tokens: list[int]
    logprobs: list[float]
    calls: list[int]
    temperature: float
    messages: list[dict[str, Any]]


class EpisodeSequences(msgspec.Struct, frozen=True):
    """An ended episode as sequences for a group, without those that have no token to train on."""

    episode: GroupedEpisode
    sequences: list[_Sequence]


def sequences_of(episode: GroupedEpisode) -> EpisodeSequences:
    """Return an episode's sequences. Raises `LogCorrupted` for inconsistent calls.

    Raises `ValueError`, with a sentence, for an episode that cannot be part of any group.
    """
    found = (
        _sequence(sequence, episode.records) for sequence in call_sequences(episode.records, episode.context).sequences
    )
    given = episode.call_rewards
    if given is not None and len(given) != len(episode.records):
        raise ValueError(f"{len(given)} call rewards for {len(episode.records)} calls")
    return EpisodeSequences(episode, [each for each in found if each is not None])


def group_of_episodes(
    played: Sequence[EpisodeSequences], estimator: Estimator = Estimator.DR_GRPO, normalise_std: bool = True
) -> RolloutGroup:
    """Return episodes as a group. Its sequences are in the order of the episodes, each of which may have several.

    If any episode does not have exactly one sequence, or has call rewards, the group includes an advantage for each
    token, computed with `estimator`: a trainer that uses only the scores would count that episode several times. Raises
    `ValueError`, with a sentence, if there is no token to train on.
    """
    episodes, found = [each.episode for each in played], [each.sequences for each in played]
    sequences = [each for of_episode in found for each in of_episode]
    if not sequences:
        raise ValueError("no token of its episodes can be trained on: none was sampled above temperature 0")
    rows = [[token if call >= 0 else NOT_TRAINED for token, call in zip(s.tokens, s.calls)] for s in sequences]
    is_plain = all(len(of_episode) == 1 for of_episode in found) and all(each.call_rewards is None for each in episodes)
    warm = [each.temperature for each in sequences]
    messages = [each.messages for each in sequences]
    return RolloutGroup(
        lengths=pack_ints([len(each.tokens) for each in sequences]),
        tokens=pack_ints([token for each in sequences for token in each.tokens]),
        masks=pack_ints([mask for row in rows for mask in row]),
        scores=PackedFloats.of([each.reward for each, of_episode in zip(episodes, found) for _ in of_episode]),
        advantages=None if is_plain else _advantages(episodes, found, estimator, normalise_std),
        inference_logprobs=PackedFloats.of([logprob for each in sequences for logprob in each.logprobs]),
        overrides=b"" if set(warm) == {1.0} else _encode([{TEMPERATURE: each} for each in warm]),
        messages=_encode(messages) if any(messages) else b"",
    )


def _sequence(sequence: CallSequence, records: Sequence[CallRecord]) -> _Sequence | None:
    tokens = unpack_tokens(sequence.tokens)
    logprobs, calls = [NO_LOGPROB] * len(tokens), [-1] * len(tokens)
    temperatures: set[float] = set()
    messages: list[dict[str, Any]] = []
    for span in sequence.spans:
        messages += [*records[span.call].messages, choice_of(records, span).message or {}]
        if span.learnt:
            calls[span.start : span.end] = [span.call] * (span.end - span.start)
            logprobs[span.start : span.end] = array("f", choice_of(records, span).logprobs).tolist()
            temperatures.add(records[span.call].sampling.temperature)
    if calls:
        calls[0] = -1  # no token before the first one could predict it
    end = max((place + 1 for place, call in enumerate(calls) if call >= 0), default=0)
    if not end:
        return None
    if len(temperatures) > 1:
        raise ValueError(f"calls of one conversation were sampled at {len(temperatures)} temperatures")
    learnt = [call >= 0 for call in calls]
    if not all(map(isfinite, compress(logprobs, learnt))):
        raise LogCorrupted(f"call {records[sequence.spans[-1].call].id}: a sampled token's logprob is not finite")
    logprobs = [logprob if is_learnt else NO_LOGPROB for logprob, is_learnt in zip(logprobs, learnt)]
    return _Sequence(tokens[:end], logprobs[:end], calls[:end], temperatures.pop(), messages)


def _advantages(
    episodes: Sequence[GroupedEpisode], found: Sequence[list[_Sequence]], estimator: Estimator, normalise_std: bool
) -> PackedFloats:
    lengths = [[learnt_tokens(record) for record in each.records] for each in episodes]
    rewards, of_calls = [each.reward for each in episodes], [each.call_rewards for each in episodes]
    advantages = call_advantages(rewards, of_calls, lengths, estimator, normalise_std)
    return PackedFloats.of(
        [
            given[call] if call >= 0 else 0.0
            for given, of_episode in zip(advantages, found, strict=True)
            for each in of_episode
            for call in each.calls
        ]
    )
