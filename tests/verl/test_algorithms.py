"""Our advantages, losses, KL estimates, aggregations and corrections against verl's, on random inputs."""

import functools
from collections.abc import Callable

import numpy as np
import pytest
import torch
from verl.trainer.config import AlgoConfig
from verl.trainer.ppo.core_algos import (
    ADV_ESTIMATOR_REGISTRY,
    POLICY_LOSS_REGISTRY,
    agg_loss,
    get_adv_estimator_fn,
    get_policy_loss_fn,
    kl_penalty,
)
from verl.trainer.ppo.rollout_corr_helper import (
    compute_rollout_correction_and_rejection_mask,
    compute_rollout_rejection_mask,
)
from verl.workers.config import ActorConfig

from bombus.config.algorithms import Correction, Estimator, KlEstimator
from bombus.datums.advantages import group_advantages
from bombus.errors import EngineFault
from bombus_trainer.algorithms.advantages import whitening
from bombus_trainer.algorithms.aggregation import constant_weights, episode_weights, token_sum_weights, token_weights
from bombus_trainer.algorithms.corrections import CorrectionRule, sampler_correction, sequence_means
from bombus_trainer.algorithms.kl import KL_ESTIMATES
from bombus_trainer.algorithms.losses import LossInputs, policy_loss
from bombus_trainer.backends.verl.algorithms import VerlEstimator
from bombus_trainer.backends.verl.engine import algorithms
from tests.trainer.small_batches import tiny_settings
from tests.verl.rank import verl_settings

SEQUENCES, LENGTH = 12, 10
SEEDS = range(5)

Weigh = Callable[[dict[str, int]], dict[str, float]]

assert_close = functools.partial(torch.testing.assert_close, atol=1e-6, rtol=1e-6)


class Batch:
    """Twelve sequences of up to ten tokens, padded as in verl (`_ST`) and flat as in our code (`_N`)."""

    def __init__(self, seed: int) -> None:
        random = torch.Generator().manual_seed(seed)
        self.lengths = torch.randint(1, LENGTH + 1, (SEQUENCES,), generator=random)
        self.mask_ST = (torch.arange(LENGTH) < self.lengths[:, None]).double()
        self.sequences_N = torch.repeat_interleave(torch.arange(SEQUENCES), self.lengths)
        self.old_ST = -2 * torch.rand(SEQUENCES, LENGTH, generator=random, dtype=torch.float64)
        self.logprobs_ST = self.old_ST + self._noise(random)
        self.sampler_ST = self.old_ST + self._noise(random)
        self.advantages_ST = torch.randn(SEQUENCES, 1, generator=random, dtype=torch.float64).expand(-1, LENGTH)
        self.rewards = torch.randint(0, 3, (SEQUENCES,), generator=random).double()
        self.groups = np.arange(SEQUENCES) // 4

    def _noise(self, random: torch.Generator) -> torch.Tensor:
        return 0.5 * torch.randn(SEQUENCES, LENGTH, generator=random, dtype=torch.float64)

    def flat(self, values_ST: torch.Tensor) -> torch.Tensor:
        return values_ST[self.mask_ST.bool()]

    def tokens(self) -> dict[str, int]:
        return {str(line): int(length) for line, length in enumerate(self.lengths)}

    def weights_N(self, weigh: Weigh) -> torch.Tensor:
        weights = weigh(self.tokens())
        return torch.tensor([weights[str(line)] for line in self.sequences_N.tolist()], dtype=torch.float64)

    def inputs(self, weigh: Weigh = token_weights) -> LossInputs:
        return LossInputs(
            logprobs_N=self.flat(self.logprobs_ST),
            old_logprobs_N=self.flat(self.old_ST),
            sampler_logprobs_N=self.flat(self.sampler_ST),
            advantages_N=self.flat(self.advantages_ST),
            weights_N=self.weights_N(weigh),
            sequences_N=self.sequences_N,
            sequences=SEQUENCES,
        )


@pytest.fixture(params=SEEDS)
def batch(request: pytest.FixtureRequest) -> Batch:
    return Batch(request.param)


# ---- advantages -------------------------------------------------------------------------------------------------


def ours(batch: Batch, estimator: Estimator, normalise_std: bool) -> torch.Tensor:
    found = torch.zeros(SEQUENCES, dtype=torch.float64)
    for group in range(SEQUENCES // 4):
        members = np.flatnonzero(batch.groups == group)
        rewards = batch.rewards[members].tolist()
        lengths = batch.lengths[members].tolist()
        found[members] = torch.tensor(group_advantages(rewards, lengths, estimator, normalise_std), dtype=torch.float64)
    advantages_N = found[batch.sequences_N]
    if estimator.over_batch:
        mean, scale = whitening(advantages_N.numpy())
        advantages_N = (advantages_N - mean) * scale
    return advantages_N


@pytest.mark.parametrize(
    ("estimator", "normalise_std", "theirs"),
    [
        ("grpo", True, "grpo"),
        ("grpo", False, "grpo"),
        ("dr_grpo", True, "grpo"),
        ("rloo", True, "rloo"),
        ("opo", True, "opo"),
        ("reinforce_plus_plus", True, "reinforce_plus_plus"),
        ("reinforce_plus_plus_baseline", True, "reinforce_plus_plus_baseline"),
    ],
)
def test_advantages_are_verls(batch: Batch, estimator: str, normalise_std: bool, theirs: str) -> None:
    rewards_ST = torch.zeros_like(batch.mask_ST)
    rewards_ST[torch.arange(SEQUENCES), batch.lengths - 1] = batch.rewards
    divides = normalise_std and estimator != "dr_grpo"
    advantages_ST, _ = get_adv_estimator_fn(theirs)(
        token_level_rewards=rewards_ST,
        response_mask=batch.mask_ST,
        index=batch.groups,
        config=AlgoConfig(gamma=1.0),
        **({"norm_adv_by_std_in_grpo": divides} if theirs == "grpo" else {}),
    )
    assert_close(ours(batch, Estimator(estimator), normalise_std), batch.flat(advantages_ST))


@pytest.mark.parametrize("normalise_std", [True, False])
def test_verls_estimators_divide_by_the_deviation_where_the_job_says_so(batch: Batch, normalise_std: bool) -> None:
    settings = tiny_settings(normalise_by_std=normalise_std)
    rewards, counts = batch.rewards.tolist(), batch.lengths.tolist()
    expected_N = ours(batch, Estimator.GRPO, normalise_std)
    for name in ("grpo", "grpo_vectorized"):
        estimator = VerlEstimator(get_adv_estimator_fn(name), AlgoConfig(), settings.config.normalise_by_std)
        found_N = batch.flat(estimator(rewards, counts, batch.groups.tolist())[:, :LENGTH])
        torch.testing.assert_close(found_N.double(), expected_N, atol=1e-4, rtol=1e-4)


def test_every_name_of_verls_registries_works_or_is_refused_before_anything_is_trained() -> None:
    refused: dict[str, str] = {}
    for setting, registry in (("estimator_name", ADV_ESTIMATOR_REGISTRY), ("loss_name", POLICY_LOSS_REGISTRY)):
        for name in (str(getattr(key, "value", key)) for key in registry):
            try:
                algorithms(verl_settings(**{setting: name}))
            except EngineFault as error:
                refused[name] = str(error).partition("is refused")[2]
    critics = {"gae", "remax", "optimal_token_baseline", "tir_optimal_token_baseline"}
    assert refused.keys() == {"dro", "clip_cov", "kl_cov", "bypass_mode"} | critics
    assert all("which this trainer does not compute" in refused[name] for name in critics)
    assert "dro_beta must be a positive value" in refused["dro"]
    assert all("compares the sequences" in refused[name] for name in ("clip_cov", "kl_cov"))
    assert "it takes no weights" in refused["bypass_mode"]


# ---- losses and aggregations ------------------------------------------------------------------------------------


def actor(**changes: object) -> ActorConfig:
    given = {"strategy": "fsdp", "rollout_n": 4, "ppo_micro_batch_size_per_gpu": 1, "clip_ratio_low": 0.1}
    return ActorConfig(**{**given, "clip_ratio_high": 0.3, "clip_ratio_c": 1e6, **changes})


def with_gradient(values_ST: torch.Tensor, loss: Callable[[torch.Tensor], torch.Tensor]) -> tuple[torch.Tensor, ...]:
    leaf = values_ST.detach().clone().requires_grad_()
    value = loss(leaf)
    value.backward()
    assert leaf.grad is not None
    return value.detach(), leaf.grad


@pytest.mark.parametrize(
    ("name", "theirs", "dual_clip"),
    [("clipped", "vanilla", 0.0), ("clipped", "vanilla", 1.5), ("gspo", "gspo", 0.0), ("cispo", "cispo", 0.0)],
)
@pytest.mark.parametrize(
    ("weigh", "mode"),
    [(token_weights, "token-mean"), (episode_weights, "seq-mean-token-mean")],
    ids=["token", "episode"],
)
@pytest.mark.parametrize("corrected", [False, True])
def test_losses_and_their_gradients_are_verls(
    batch: Batch, name: str, theirs: str, dual_clip: float, weigh: Weigh, mode: str, corrected: bool
) -> None:
    settings = tiny_settings(
        loss=name, clip_low=0.1, clip_high=0.3, dual_clip=dual_clip, tis_clip=1.2 if corrected else 0.0
    )
    weights_ST = (batch.old_ST - batch.sampler_ST).exp().clamp(max=1.2) if corrected else None

    def loss_here(logprobs_ST: torch.Tensor) -> torch.Tensor:
        batch.logprobs_ST = logprobs_ST
        return policy_loss(batch.inputs(weigh), settings).loss

    def loss_there(logprobs_ST: torch.Tensor) -> torch.Tensor:
        loss, _ = get_policy_loss_fn(theirs)(
            old_log_prob=batch.old_ST,
            log_prob=logprobs_ST,
            advantages=batch.advantages_ST,
            response_mask=batch.mask_ST,
            loss_agg_mode=mode,
            config=actor(**({"clip_ratio_c": dual_clip} if dual_clip else {})),
            rollout_is_weights=weights_ST,
        )
        assert isinstance(loss, torch.Tensor)
        return loss

    mine, other = with_gradient(batch.logprobs_ST, loss_here), with_gradient(batch.logprobs_ST, loss_there)
    assert other[1].abs().max() > 1e-3
    assert_close(mine, other)


@pytest.mark.parametrize("corrected", [False, True])
def test_importance_sampling_is_verls_loss_with_a_bound_that_is_never_met(batch: Batch, corrected: bool) -> None:
    """Its ratio is to the sampler, verl's bypass mode; with a correction to the old policy, with verl's weights."""
    settings = tiny_settings(loss="importance_sampling", correction="token_tis" if corrected else "none", tis_clip=1.2)
    weights_ST = (batch.old_ST - batch.sampler_ST).exp().clamp(max=1.2) if corrected else None

    def loss_here(logprobs_ST: torch.Tensor) -> torch.Tensor:
        batch.logprobs_ST = logprobs_ST
        return policy_loss(batch.inputs(), settings).loss

    def loss_there(logprobs_ST: torch.Tensor) -> torch.Tensor:
        loss, _ = get_policy_loss_fn("vanilla")(
            old_log_prob=batch.old_ST if corrected else batch.sampler_ST,
            log_prob=logprobs_ST,
            advantages=batch.advantages_ST,
            response_mask=batch.mask_ST,
            config=actor(clip_ratio_low=1.0, clip_ratio_high=1e6),
            rollout_is_weights=weights_ST,
        )
        assert isinstance(loss, torch.Tensor)
        return loss

    mine, other = with_gradient(batch.logprobs_ST, loss_here), with_gradient(batch.logprobs_ST, loss_there)
    assert other[1].abs().max() > 1e-3
    assert_close(mine, other)


@pytest.mark.parametrize(
    ("weigh", "mode"),
    [
        (token_weights, "token-mean"),
        (episode_weights, "seq-mean-token-mean"),
        (lambda tokens: constant_weights(tokens, 25), "seq-mean-token-sum-norm"),
        (lambda tokens: constant_weights(tokens, 1), "seq-mean-token-sum"),
        (token_sum_weights, "token-sum"),
    ],
    ids=["token", "episode", "constant", "episode_sum", "token_sum"],
)
def test_aggregations_are_verls(batch: Batch, weigh: Weigh, mode: str) -> None:
    batch.mask_ST[3] = 0.0  # of this sequence nothing is trained
    batch.lengths[3] = 0
    batch.sequences_N = torch.repeat_interleave(torch.arange(SEQUENCES), batch.lengths)
    theirs = agg_loss(batch.logprobs_ST, batch.mask_ST, mode, loss_scale_factor=25)
    mine = (batch.weights_N(weigh) * batch.flat(batch.logprobs_ST)).sum()
    assert_close(mine, theirs)


@pytest.mark.parametrize("estimator", list(KlEstimator))
@pytest.mark.parametrize("alias", [False, True])
def test_kl_estimates_and_their_gradients_are_verls(batch: Batch, estimator: KlEstimator, alias: bool) -> None:
    names = {"k1": ("k1", "kl"), "k2": ("k2", "mse"), "k3": ("k3", "low_var_kl"), "k3_unbiased": ("k3+", "low_var_kl+")}
    name = names[estimator][alias]
    reference = batch.sampler_ST
    mine = with_gradient(batch.logprobs_ST, lambda given: KL_ESTIMATES[estimator](given, reference).sum())
    theirs = with_gradient(batch.logprobs_ST, lambda given: kl_penalty(given, reference, name).sum())
    assert_close(mine, theirs)


@pytest.mark.parametrize("theirs", ["k3", "low_var_kl"])
def test_k3_of_policies_far_apart_is_bounded_as_verls_is(theirs: str) -> None:
    policy = -torch.arange(0.0, 60.0, 0.25, dtype=torch.float64)
    reference = torch.full_like(policy, -30.0)  # differences from -30 to 30
    mine = with_gradient(policy, lambda given: KL_ESTIMATES[KlEstimator.K3](given, reference).sum())
    other = with_gradient(policy, lambda given: kl_penalty(given, reference, theirs).sum())
    assert 0 < int((mine[1] == 0.0).sum()) < len(policy) - 1
    assert_close(mine, other)


# ---- corrections ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("correction", "low", "high", "level", "threshold"),
    [
        ("token_tis", 0.0, 1.2, "token", 1.2),
        ("sequence_tis", 0.0, 1.2, "sequence", 1.2),
        ("icepop", 0.5, 2.0, "token", "0.5_2.0"),
        ("token_mask", 0.0, 1.2, "token", "1e-30_1.2"),
        ("sequence_mask", 0.0, 1.2, "sequence", "1e-30_1.2"),
        ("sequence_mask", 0.5, 2.0, "sequence", "0.5_2.0"),
    ],
)
def test_corrections_are_verls(
    batch: Batch, correction: str, low: float, high: float, level: str, threshold: str | float
) -> None:
    weights, _, _ = compute_rollout_correction_and_rejection_mask(
        old_log_prob=batch.old_ST,
        rollout_log_prob=batch.sampler_ST,
        response_mask=batch.mask_ST,
        rollout_is=level,
        rollout_is_threshold=threshold,
    )
    assert weights is not None
    theirs = batch.flat(weights.batch["rollout_is_weights"])
    inputs = batch.inputs()
    rule = CorrectionRule(Correction(correction), low, high)
    mine = sampler_correction(inputs.old_logprobs_N, inputs.sampler_logprobs_N, inputs.sequences_N, SEQUENCES, rule)
    assert_close(mine.importance_N, theirs)
    assert mine.capped_N.any() or mine.masked_N.any()


def test_what_is_masked_is_what_verl_rejects(batch: Batch) -> None:
    inputs = batch.inputs()
    for correction, option in (("token_mask", "token_k1"), ("sequence_mask", "seq_sum_k1")):
        kept_ST, _ = compute_rollout_rejection_mask(
            batch.sampler_ST - batch.old_ST, batch.mask_ST, option, rollout_rs_threshold="0.5_2.0"
        )  # its k1 is the negative of the log-ratio: of the inverse, between the inverse bounds
        rule = CorrectionRule(Correction(correction), 0.5, 2.0)
        mine = sampler_correction(inputs.old_logprobs_N, inputs.sampler_logprobs_N, inputs.sequences_N, SEQUENCES, rule)
        assert mine.masked_N.tolist() == (batch.flat(kept_ST) == 0).tolist()


def test_the_distance_of_a_sequence_from_its_sampler_is_verls_mean_k1(batch: Batch) -> None:
    """verl has no off-policy sequence masking, but it can compute what is compared with the bound."""
    divergence_S = sequence_means(batch.flat(batch.sampler_ST - batch.logprobs_ST), batch.sequences_N, SEQUENCES)
    kept_ST, _ = compute_rollout_rejection_mask(
        batch.logprobs_ST - batch.sampler_ST, batch.mask_ST, "seq_mean_k1", rollout_rs_threshold="1e-30_1.1"
    )
    far_S = divergence_S > np.log(1.1)
    assert far_S.any()
    assert far_S[batch.sequences_N].tolist() == (batch.flat(kept_ST) == 0).tolist()
