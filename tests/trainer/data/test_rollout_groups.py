"""From rollout groups to sequences with advantages, and what of a batch is left out."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from bombus.errors import LogCorrupted
from bombus.hive.records import BodyRef, digest
from bombus.hive.trajectories.queue import QueuedGroup
from bombus.hive.trajectories.records import PackedFloats, RolloutGroup, encode_group, pack_ints
from bombus_trainer.backends.torch.executor import Executor
from bombus_trainer.data.batch import EpisodeGroup, PreparedBatch, prepare, staleness
from bombus_trainer.data.rollout_groups import group_of, read_rollout_groups
from bombus_trainer.data.samples import Origin, samples_of
from tests.trainer.small_batches import VOCAB, tiny_model_folder, tiny_settings

# Two sequences: 5 [6] 7 [8] with an observation in its middle, and 5 [9] with a token after it that is not trained.
GROUP = RolloutGroup(
    lengths=pack_ints([4, 3]),
    tokens=pack_ints([5, 6, 7, 8, 5, 9, 1]),
    masks=pack_ints([-100, 6, -100, 8, -100, 9, -100]),
    scores=PackedFloats.of([3.0, 1.0]),
    inference_logprobs=PackedFloats.of([1.0, -0.5, 1.0, -0.25, 1.0, -2.0, 1.0]),
)


def prepared(*groups: RolloutGroup, estimator: str = "dr_grpo") -> PreparedBatch:
    found = [group_of(str(number), group) for number, group in enumerate(groups)]
    return prepare(found, tiny_settings(adv_estimator=estimator), VOCAB)


def trained(batch: PreparedBatch) -> list[list[float]]:
    """Return the advantages of each sequence's trained tokens."""
    return [
        entry.advantages_T[entry.sequence.loss_mask_T].tolist() for group in batch.groups for entry in group.sequences
    ]


def test_only_what_is_not_masked_is_trained_and_nothing_after_it_is_computed() -> None:
    first, second = (entry.sequence for entry in prepared(GROUP).groups[0].sequences)
    assert first.tokens_T.tolist() == [5, 6, 7, 8]
    assert first.loss_mask_T.tolist() == [False, True, False, True]
    assert first.logprobs_T.tolist() == [0.0, -0.5, 0.0, -0.25]
    assert second.tokens_T.tolist() == [5, 9]


def test_the_first_token_is_never_trained() -> None:
    whole = replace(GROUP, masks=GROUP.tokens)
    assert prepared(whole).groups[0].sequences[0].sequence.loss_mask_T.tolist() == [False, True, True, True]


def test_scores_are_compared_within_their_group() -> None:
    # scores 3 and 1, mean 2
    assert trained(prepared(GROUP)) == [[1.0, 1.0], [-1.0]]


def test_advantages_for_each_token_count_instead_of_scores() -> None:
    given = replace(GROUP, advantages=PackedFloats.of([9.0, 0.5, 9.0, -0.5, 9.0, 0.25, 9.0]))
    assert trained(prepared(given)) == [[0.5, -0.5], [0.25]]


def test_an_advantage_that_is_overridden_is_zero_and_the_score_still_counts_for_the_others() -> None:
    zeroed = replace(GROUP, overrides=b'[{"set_advantage_to_zero":true},null]')
    assert trained(prepared(zeroed)) == [[0.0, 0.0], [-1.0]]


def test_normalising_over_the_batch_leaves_advantages_alone_that_were_given() -> None:
    given = replace(GROUP, advantages=PackedFloats.of([0.0, 0.5, 0.0, -0.5, 0.0, 0.25, 0.0]))
    # the tokens of the first group have 3, 3 and 1: mean 7/3, variance (4/9 + 4/9 + 16/9) / (3 - 1) = 4/3
    std = (4 / 3) ** 0.5
    (first, second, *rest) = trained(prepared(GROUP, given, estimator="reinforce_plus_plus"))
    assert first == pytest.approx([2 / 3 / std] * 2)
    assert second == pytest.approx([-4 / 3 / std])
    assert rest == [[0.5, -0.5], [0.25]]


def test_logprobs_that_are_not_known_are_not_a_number_where_a_token_is_trained() -> None:
    first = prepared(replace(GROUP, inference_logprobs=None)).groups[0].sequences[0].sequence
    assert np.isnan(first.logprobs_T).tolist() == [False, True, False, True]


def test_a_sequence_that_is_masked_throughout_counts_for_the_others_alone() -> None:
    masked = replace(GROUP, masks=pack_ints([-100, -100, -100, -100, -100, 9, -100]))
    assert trained(prepared(masked)) == [[-1.0]]


def test_tokens_outside_of_the_vocabulary_leave_their_sequence_out() -> None:
    strange = replace(
        GROUP, tokens=pack_ints([5, VOCAB, 7, 8, 5, 9, 1]), masks=pack_ints([-100, VOCAB, -100, 8, -100, 9, -100])
    )
    batch = prepared(strange)
    assert batch.left_out == ("0.0",)
    assert trained(batch) == [[0.0]]


def test_nobody_knows_the_version_of_what_an_environment_sends() -> None:
    assert staleness(prepared(GROUP), step=7) == {}


def test_a_batch_can_be_looked_at_as_samples() -> None:
    groups = [group_of("1.0", GROUP)]
    batch = prepare(groups, tiny_settings(adv_estimator="dr_grpo"), VOCAB)
    first, _ = samples_of(Origin("main", 1, 1), groups, batch)
    assert (first.reward, first.response_length, first.loss_mask) == (3.0, 3, [1, 0, 1])


def step(folder: Path, *groups: RolloutGroup) -> dict[str, float]:
    executor = Executor(folder, tiny_settings(adv_estimator="dr_grpo", lr=0.01))
    return executor.train_step([group_of(str(number), group) for number, group in enumerate(groups)], 1)


def test_tokens_without_a_samplers_logprob_have_no_correction(tmp_path: Path) -> None:
    folder = tiny_model_folder(tmp_path / "model")
    metrics = step(folder, replace(GROUP, inference_logprobs=None))
    assert metrics["tokens_trained"] == 3
    assert metrics["updates"] == 1
    ends = {"kl_sampler_first", "kl_sampler_last"}
    unknown = {"kl_sampler", "kl_sampler_abs", "staleness_mean", "calls", "merged_share", "episodes_cut"} | ends
    assert not unknown & metrics.keys(), "what nobody knows has no figure"
    assert step(folder, GROUP)["kl_sampler"] > 0.1
    some = step(folder, replace(GROUP, inference_logprobs=None), GROUP)
    assert some["kl_sampler"] == pytest.approx(step(folder, GROUP)["kl_sampler"], rel=1e-4), "of those that are known"


class Stored:
    """Bodies in memory, by the sequence of their first part."""

    def __init__(self, *groups: RolloutGroup) -> None:
        self.bodies = [encode_group(group) for group in groups]

    async def fetch(self, ref: BodyRef) -> bytes:
        if ref.first > len(self.bodies):
            raise LogCorrupted(f"the body at {ref.first} is gone")
        return self.bodies[ref.first - 1]

    def queued(self) -> list[QueuedGroup]:
        return [queued(number, body) for number, body in enumerate(self.bodies, 1)]


def queued(number: int, body: bytes = b"") -> QueuedGroup:
    ref = BodyRef(seqs=(number,), size=len(body), digest=digest(body))
    return QueuedGroup(environment=None, sequences=2, tokens=7, longest=4, body=ref)


def test_a_group_that_is_gone_or_cannot_be_trained_is_left_out_with_its_reason() -> None:
    stored = Stored(GROUP, replace(GROUP, ref_logprobs=PackedFloats.of([0.0] * 7)))
    read = asyncio.run(read_rollout_groups(stored, [*stored.queued(), queued(9)], step=4))
    assert read.groups == (EpisodeGroup("4.0", read.groups[0].episodes),)
    assert read.lost.keys() == {"4.1", "4.2"}
    assert read.lost["4.1"].startswith("ref_logprobs is not accepted")
    assert read.lost["4.2"] == "the body at 9 is gone"
    assert read.gone == (2,), "this one is to be given up on the log"
    read = asyncio.run(read_rollout_groups(stored, [*stored.queued(), replace(queued(9), body=None)], step=4))
    assert (read.lost["4.2"], read.gone) == ("its body was lost earlier", ())
