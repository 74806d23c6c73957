"""Accounts for each sampled token of a batch: whether it was trained on, and if not, which rule left it out."""

from collections import Counter
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import NamedTuple

import numpy as np

from bombus.datums.call_sequences import learnt_tokens
from bombus.hive.fates import Fate, StepTokens
from bombus.hive.records import DIGEST_BYTES, CallRecord
from bombus_trainer.algorithms.overlong import is_masked
from bombus_trainer.data.batch import NOT_FINITE, EpisodeCalls, EpisodeGroup, PreparedBatch, PreparedSequence
from bombus_trainer.data.packing import TrainingItem
from bombus_trainer.data.sequences import Floats, Ints
from bombus_trainer.settings import TrainerSettings


class StepAccount(NamedTuple):
    """What became of the tokens of a batch, and their `StepDifferences` by episode."""

    tokens: StepTokens
    differences: dict[str, bytes]


class TrainedTerms:
    """The terms [N] of a batch: how many updates included each, how often it was computed in them, how many masked it,
    its weight in the first update, and by how much its logprob before that update differs from the sampler's.

    Each rank knows only its own micro-batches, so those in `of_rank` must be summed over the ranks.
    """

    def __init__(self, batch: PreparedBatch) -> None:
        self.updates_N: Floats = np.zeros(batch.terms, dtype=np.float32)
        self.computed_N: Floats = np.zeros(batch.terms, dtype=np.float32)
        self.masked_N: Floats = np.zeros(batch.terms, dtype=np.float32)
        self.weights_N: Floats = np.zeros(batch.terms, dtype=np.float32)
        self.differences_N: Floats = np.zeros(batch.terms, dtype=np.float32)
        self.of_rank = (self.computed_N, self.masked_N, self.differences_N)

    def note(self, items: Iterable[TrainingItem], computed_ids: Ints, differences: Floats, masked_ids: Ints) -> None:
        """Record an update made with these sequences. This rank computed the terms in `computed_ids`, which have these
        `differences`, and of which those in `masked_ids` have no surrogate."""
        for item in items:
            ids = item.terms.ids_N
            self.weights_N[ids] = np.where(self.updates_N[ids] > 0.0, self.weights_N[ids], item.terms.weights_N)
            self.updates_N[ids] += 1.0
        is_first = self.updates_N[computed_ids] == 1.0
        self.differences_N[computed_ids[is_first]] = differences[is_first]
        np.add.at(self.computed_N, computed_ids, 1.0)
        self.masked_N[masked_ids] += 1.0

    def differences(self, batch: PreparedBatch) -> dict[str, bytes]:
        """Return the differences by episode: see `StepDifferences`."""
        values_N = np.where(self.computed_N > 0.0, self.differences_N, np.nan).astype("<f2")
        found: dict[str, bytes] = {}
        for entry in (entry for group in batch.groups for entry in group.sequences):
            own = slice(entry.first_id, entry.first_id + int(entry.sequence.loss_mask_T.sum()))
            found[entry.sequence.episode] = found.get(entry.sequence.episode, b"") + values_N[own].tobytes()
        return found


def step_tokens(
    groups: Sequence[EpisodeGroup], batch: PreparedBatch, terms: TrainedTerms, settings: TrainerSettings
) -> StepTokens:
    """Return what became of the sampled tokens of a batch's episodes.

    Tokens in the loss are counted as its terms, and all other tokens in the records of their calls. So if merging loses
    or repeats a token, or if the ranks together do not compute each term of an update exactly once, the episode's
    counts do not add up to the number of tokens it sampled.
    """
    found: dict[str, Counter[Fate]] = {}
    weights: dict[str, float] = {}
    left_out = dict.fromkeys(batch.left_out, Fate.DROPPED_UNREADABLE)
    data = blake2b(digest_size=DIGEST_BYTES)
    for group, prepared in zip(groups, batch.groups, strict=True):
        sequences: dict[str, list[PreparedSequence]] = {}
        for entry in prepared.sequences:
            sequences.setdefault(entry.sequence.episode, []).append(entry)
            for array in (entry.sequence.tokens_T, entry.sequence.loss_mask_T, entry.sequence.logprobs_T):
                data.update(np.ascontiguousarray(array).data)
            data.update(np.ascontiguousarray(entry.advantages_T).data)
        for episode in group.episodes:
            if episode.episode in left_out:
                continue
            fates = found[episode.episode] = _masked(episode.records)
            if prepared is NOT_FINITE:
                fates[Fate.DROPPED_NOT_FINITE] += _learnt(episode)
            elif is_masked(episode.records, settings):
                fates[Fate.MASKED_OVERLONG] += _learnt(episode)
            else:
                untrained = Fate.DROPPED_UPDATE if prepared.signal else Fate.MASKED_NO_SIGNAL
                for entry in sequences.get(episode.episode, ()):
                    count = int(entry.sequence.loss_mask_T.sum())
                    own = slice(entry.first_id, entry.first_id + count)
                    updates, masks = terms.updates_N[own], terms.masked_N[own]
                    updated, trained = int((updates > 0.0).sum()), int((updates > masks).sum())
                    fates[Fate.TRAINED] += trained + int((terms.computed_N[own] - updates).sum())
                    fates[Fate.MASKED_OFF_POLICY] += updated - trained
                    fates[untrained] += count - updated
                    if trained:
                        weights[episode.episode] = float(terms.weights_N[own].max())
    data.update(terms.weights_N.data)
    order = [fate for fate in Fate if any(fates[fate] for fates in found.values())]
    rows = {name: tuple(fates[fate] for fate in order) for name, fates in found.items()}
    return StepTokens(fates=tuple(order), episodes=rows, weights=weights, left_out=left_out, data=data.digest())


def _learnt(episode: EpisodeCalls) -> int:
    return sum(episode.learnt_tokens())


def _masked(records: Sequence[CallRecord]) -> Counter[Fate]:
    """Count the tokens that are never in the loss, whatever the batch: see `call_sequences`."""
    fates: Counter[Fate] = Counter()
    for record in records:
        sampled = record.completion_tokens()
        if record.sampling.temperature <= 0:
            fates[Fate.MASKED_GREEDY] += sampled
        elif record.constrained:
            fates[Fate.MASKED_CONSTRAINED] += sampled
        else:
            fates[Fate.MASKED_FIRST] += sampled - learnt_tokens(record)
    return fates
