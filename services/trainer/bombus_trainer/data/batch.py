"""Turns the groups of a batch into sequences to train on, with an advantage and a weight for each trained token."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import compress
from typing import assert_never

import numpy as np

from bombus.config.algorithms import Aggregation
from bombus.datums.advantages import call_advantages
from bombus.datums.call_sequences import learnt_tokens
from bombus.errors import LogCorrupted
from bombus.hive.records import CallRecord
from bombus_trainer.algorithms.advantages import whitening
from bombus_trainer.algorithms.aggregation import (
    constant_weights,
    episode_weights,
    token_sum_weights,
    token_weights,
)
from bombus_trainer.algorithms.overlong import is_masked, penalties, was_cut, was_ended_by_length
from bombus_trainer.data.packing import Terms, TrainingItem
from bombus_trainer.data.sequences import Flags, Floats, MergedEpisode, TokenSequence, merge_calls
from bombus_trainer.settings import TrainerSettings


@dataclass(frozen=True, eq=False)
class GivenTokens:
    """A sequence that an environment has scored. `sequence` has its tokens, or is None if all of them are masked.

    If `zeroed`, the sequence's advantages are 0; otherwise they are `advantages_T`, if given. If neither applies, its
    score is compared with the scores of its group, and the result is the advantage of each trained token.
    """

    sequence: TokenSequence | None
    advantages_T: Floats | None = None
    zeroed: bool = False

    @property
    def trained_tokens(self) -> int:
        return 0 if self.sequence is None else int(self.sequence.loss_mask_T.sum())


@dataclass(frozen=True)
class EpisodeCalls:
    """An episode of a batch, with its calls as read from the log. See `merge_calls` for `context`.

    An episode from a rollout group has no calls; `given` has its tokens instead.
    """

    episode: str
    reward: float
    records: tuple[CallRecord, ...]
    call_rewards: tuple[float, ...] | None = None
    context: tuple[CallRecord, ...] = ()
    given: GivenTokens | None = None

    def learnt_tokens(self) -> list[int]:
        """Return how many tokens of each call are trained on, unless the whole episode is left out of the loss."""
        if self.given is not None:
            return [self.given.trained_tokens]
        return [learnt_tokens(record) for record in self.records]

    def without_auxiliary_calls(self) -> "EpisodeCalls":
        """Return the episode with its auxiliary calls, and their rewards, removed from the records.

        The auxiliary calls stay as context, so that calls that continue an auxiliary call are merged with its tokens.
        All rewards are kept if they cover only the other calls, as in a job that masks auxiliary calls.
        """
        ours = [not record.auxiliary_call for record in self.records]
        rewards = self.call_rewards
        if all(ours):
            return self
        return replace(
            self,
            records=tuple(compress(self.records, ours)),
            call_rewards=tuple(compress(rewards, ours))
            if rewards is not None and len(rewards) == len(ours)
            else rewards,
            context=(*self.context, *(record for record in self.records if record.auxiliary_call)),
        )


@dataclass(frozen=True)
class EpisodeGroup:
    task: str
    episodes: tuple[EpisodeCalls, ...]


@dataclass(frozen=True, eq=False)
class PreparedSequence:
    """One sequence with its advantages [T] and the number of its first term in the batch.

    If the advantages were `given`, they are used as they are, without normalisation.
    """

    sequence: TokenSequence
    advantages_T: Floats
    first_id: int
    given: bool = False


@dataclass(frozen=True, eq=False)
class PreparedGroup:
    """A group's sequences. `tokens` maps each episode to its number of trained tokens."""

    sequences: tuple[PreparedSequence, ...]
    tokens: dict[str, int]

    @cached_property
    def signal(self) -> bool:
        """Whether any trained token has a non-zero advantage."""
        return any(bool(np.any(entry.advantages_T[entry.sequence.loss_mask_T])) for entry in self.sequences)


ADVANTAGE_MAX = float(np.finfo(np.float32).max)
NOT_FINITE = PreparedGroup(sequences=(), tokens={})  # stands in for a group whose advantages are not finite


@dataclass(frozen=True, eq=False)
class PreparedBatch:
    groups: tuple[PreparedGroup, ...]
    terms: int
    calls: int
    merged_calls: int
    left_out: tuple[str, ...]  # episodes with unusable records, each an infrastructure failure
    cut: int = 0  # episodes in which a call was cut off by one of the job's limits
    cut_by_request: int = 0  # other episodes in which a call was cut off by its request's own `max_tokens`
    groups_left_out: int = 0  # groups whose advantages are not finite
    is_estimated: bool = True  # false if verl still has to compute the advantages to train with


def check_episode(episode: EpisodeCalls, vocab_size: int) -> MergedEpisode:
    """Merge an episode's calls. Raises `LogCorrupted` if they do not fit together, or do not fit this model."""
    merged = _merged(episode)
    if episode.call_rewards is not None and len(episode.call_rewards) != len(episode.records):
        raise LogCorrupted(
            f"episode {episode.episode}: {len(episode.call_rewards)} call rewards for {len(episode.records)} calls"
        )
    for sequence in merged.sequences:
        if sequence.tokens_T.min() < 0 or sequence.tokens_T.max() >= vocab_size:
            raise LogCorrupted(f"episode {episode.episode}: a token is outside the vocabulary of {vocab_size}")
    return merged


def _merged(episode: EpisodeCalls) -> MergedEpisode:
    given = episode.given
    if given is None:
        return merge_calls(episode.episode, episode.records, episode.context)
    sequences = () if given.sequence is None else (given.sequence,)
    return MergedEpisode(sequences, calls=0, merged_calls=0, trained_tokens=given.trained_tokens)


def prepare(groups: Sequence[EpisodeGroup], settings: TrainerSettings, vocab_size: int) -> PreparedBatch:
    """Merge calls and compute advantages.

    A corrupted episode is left out of its group before anything is computed. A group whose advantages are not finite is
    left out of the batch.
    """
    prepared: list[PreparedGroup] = []
    left_out: list[str] = []
    terms = calls = merged_calls = cut = cut_by_request = 0
    for group in groups:
        kept: list[tuple[EpisodeCalls, MergedEpisode]] = []
        for episode in group.episodes:
            try:
                kept.append((episode, check_episode(episode, vocab_size)))
            except LogCorrupted:
                left_out.append(episode.episode)
        prepared.append(_prepare_group(kept, terms, settings))
        terms += sum(prepared[-1].tokens.values())
        calls += sum(merged.calls for _, merged in kept)
        merged_calls += sum(merged.merged_calls for _, merged in kept)
        at_limits = [was_cut(episode.records, settings) for episode, _ in kept]
        cut += sum(at_limits)
        cut_by_request += sum(was_ended_by_length(episode.records) for episode, _ in kept) - sum(at_limits)
    excluded = sum(group is NOT_FINITE for group in prepared)
    if settings.estimator.over_batch:
        prepared = _whitened(prepared)
    ours = not settings.verl_adv_estimator
    return PreparedBatch(
        tuple(prepared), terms, calls, merged_calls, tuple(left_out), cut, cut_by_request, excluded, ours
    )


def episode_reward(episode: EpisodeCalls, settings: TrainerSettings) -> float:
    """Return an episode's reward, including the penalty of its worst call if the job penalizes overlong calls."""
    return episode.reward + min(penalties(episode.records, settings), default=0.0)


def episode_advantages(episodes: Sequence[EpisodeCalls], settings: TrainerSettings) -> list[list[float]]:
    """Compute one advantage for each call of each episode of a group, with penalties for overlong calls if configured.

    For an estimator that normalises over the batch, these are the values before normalisation.
    """
    added = [penalties(episode.records, settings) for episode in episodes]
    return call_advantages(
        [episode_reward(episode, settings) for episode in episodes],
        [
            None if each.call_rewards is None else [a + b for a, b in zip(each.call_rewards, penalty, strict=True)]
            for each, penalty in zip(episodes, added, strict=True)
        ],
        [episode.learnt_tokens() for episode in episodes],
        settings.estimator,
        settings.config.normalise_by_std,
    )


def _prepare_group(
    kept: Sequence[tuple[EpisodeCalls, MergedEpisode]], first_id: int, settings: TrainerSettings
) -> PreparedGroup:
    advantages = episode_advantages([episode for episode, _ in kept], settings)
    if not all(abs(advantage) <= ADVANTAGE_MAX for of_calls in advantages for advantage in of_calls):
        return NOT_FINITE
    sequences: list[PreparedSequence] = []
    tokens: dict[str, int] = {}
    for (episode, merged), of_calls in zip(kept, advantages, strict=True):
        masked = is_masked(episode.records, settings)
        tokens[episode.episode] = 0 if masked else merged.trained_tokens
        table = np.array([*of_calls, 0.0], dtype=np.float32)  # index -1 is for tokens that were not sampled
        for sequence in () if masked else merged.sequences:
            sequences.append(_prepared(episode, sequence, table[sequence.calls_T], first_id))
            first_id += int(sequence.loss_mask_T.sum())
    return PreparedGroup(sequences=tuple(sequences), tokens=tokens)


def _prepared(episode: EpisodeCalls, sequence: TokenSequence, advantages_T: Floats, first_id: int) -> PreparedSequence:
    """Return a sequence with its advantages: 0 if zeroed, else those given, else those of its calls."""
    given = episode.given
    if given is not None and given.zeroed:
        return PreparedSequence(sequence, np.zeros_like(advantages_T), first_id, given=True)
    if given is not None and given.advantages_T is not None:
        return PreparedSequence(sequence, given.advantages_T, first_id, given=True)
    return PreparedSequence(sequence, advantages_T, first_id)


def _whitened(groups: Sequence[PreparedGroup]) -> list[PreparedGroup]:
    """Normalise the advantages of all trained tokens of these groups together, except those that were given."""
    ours = [entry for group in groups for entry in group.sequences if not entry.given]
    parts = [entry.advantages_T[entry.sequence.loss_mask_T] for entry in ours]
    mean, scale = whitening(np.concatenate(parts) if parts else np.zeros(0, dtype=np.float32))
    found = []
    for group in groups:
        sequences = tuple(
            entry
            if entry.given
            else replace(
                entry, advantages_T=np.where(entry.sequence.calls_T >= 0, (entry.advantages_T - mean) * scale, 0.0)
            )
            for entry in group.sequences
        )
        found.append(replace(group, sequences=sequences))
    return found


def staleness(batch: PreparedBatch, step: int) -> dict[str, float]:
    """Return metrics about the age of the trained tokens, in policy versions. Step k trains version k - 1.

    `stale_share` is the share of tokens from older versions. Tokens of unknown version do not count.
    """
    parts = [
        entry.sequence.versions_T[entry.sequence.loss_mask_T] for group in batch.groups for entry in group.sequences
    ]
    versions_N = np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)
    versions_N = versions_N[versions_N >= 0]
    if not len(versions_N):
        return {}
    ages_N = step - 1 - versions_N
    return {
        "staleness_mean": float(ages_N.mean()),
        "staleness_max": float(ages_N.max()),
        "stale_share": float((ages_N > 0).mean()),
    }


def answer_ends(batch: PreparedBatch) -> dict[str, Flags]:
    """Return two masks of the batch's terms: those that are the first trained token of an answer, and those that are
    the last."""
    first, last = np.zeros(batch.terms, dtype=np.bool_), np.zeros(batch.terms, dtype=np.bool_)
    for entry in (entry for group in batch.groups for entry in group.sequences):
        positions = np.flatnonzero(entry.sequence.loss_mask_T)
        calls = entry.sequence.calls_T[positions]
        here = slice(entry.first_id, entry.first_id + len(positions))
        goes_on = (positions[1:] - positions[:-1] == 1) & (calls[1:] == calls[:-1])
        first[here][1:] = last[here][:-1] = ~goes_on
        first[here][:1] = last[here][-1:] = True
    return {"first": first, "last": last}


def mini_batches(batch: PreparedBatch, settings: TrainerSettings, step: int, epoch: int) -> list[list[TrainingItem]]:
    """Distribute the groups of a batch over its updates, in a new order in each epoch. Groups stay whole.

    Groups without signal count in their update's mean (if only one group in ten has signal, the update is a tenth as
    strong), but they are not computed, unless a KL term or an entropy bonus applies to them too.
    """
    everywhere = settings.trains_every_token
    computed = [group for group in batch.groups if group.sequences and (group.signal or everywhere)]
    silent = [group for group in batch.groups if not (group.signal or everywhere)]
    parts = min(settings.config.mini_batch_num, len(computed))
    if parts > 1:
        order = np.random.default_rng([settings.job.model.seed, step, epoch]).permutation(len(computed))
        computed = [computed[index] for index in order]
    return [_items(computed[part::parts], silent[part::parts], settings) for part in range(parts)]


def _items(
    computed: Sequence[PreparedGroup], silent: Sequence[PreparedGroup], settings: TrainerSettings
) -> list[TrainingItem]:
    tokens = {name: count for group in (*computed, *silent) for name, count in group.tokens.items()}
    weights = _weights(tokens, settings)
    return [_item(entry, weights[entry.sequence.episode]) for group in computed for entry in group.sequences]


def _weights(tokens_of_episode: dict[str, int], settings: TrainerSettings) -> dict[str, float]:
    match settings.config.loss_aggregation:
        case Aggregation.EPISODE:
            return episode_weights(tokens_of_episode)
        case Aggregation.TOKEN:
            return token_weights(tokens_of_episode)
        case Aggregation.CONSTANT:
            return constant_weights(tokens_of_episode, settings.constant_length)
        case Aggregation.EPISODE_SUM:
            return constant_weights(tokens_of_episode, 1)
        case Aggregation.TOKEN_SUM:
            return token_sum_weights(tokens_of_episode)
        case _:
            assert_never(settings.config.loss_aggregation)


def _item(entry: PreparedSequence, weight: float) -> TrainingItem:
    sequence = entry.sequence
    positions_N = np.flatnonzero(sequence.loss_mask_T)
    return TrainingItem(
        tokens_T=sequence.tokens_T,
        positions_N=positions_N,
        terms=Terms(
            ids_N=np.arange(entry.first_id, entry.first_id + len(positions_N)),
            targets_N=sequence.tokens_T[positions_N],
            temperatures_N=sequence.temperatures_T[positions_N],
            sampler_logprobs_N=sequence.logprobs_T[positions_N],
            advantages_N=entry.advantages_T[positions_N],
            weights_N=np.full(len(positions_N), weight, dtype=np.float32),
        ),
    )
