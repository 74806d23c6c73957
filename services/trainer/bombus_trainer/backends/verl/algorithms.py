"""Adapts functions from verl's registries to our batches. Knows their signatures but does not import verl."""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isclose
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bombus.errors import EngineFault, in_one_line
from bombus_trainer.algorithms.corrections import CorrectionRule, sampler_correction
from bombus_trainer.algorithms.losses import PolicyLoss, reference_kl
from bombus_trainer.backends.torch.model import ScoredTerms
from bombus_trainer.data.batch import EpisodeGroup, PreparedBatch, PreparedGroup, PreparedSequence, episode_reward
from bombus_trainer.settings import TrainerSettings

Estimate = Callable[..., tuple[Tensor, Tensor]]
VerlLoss = Callable[..., tuple[Tensor, Mapping[str, Any]]]
ESTIMATOR_INPUTS = frozenset(
    {"token_level_rewards", "response_mask", "index", "epsilon", "norm_adv_by_std_in_grpo", "config"}
)
NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def look_up(setting: str, name: str, registry: Mapping[str, Any]) -> Callable[..., Any]:
    """Return the function registered as `name`. If there is none, raises an `EngineFault` that lists all registered
    names."""
    names = {str(getattr(key, "value", key)): function for key, function in registry.items()}
    if name not in names:
        raise EngineFault(f"{setting} = {name!r} is not in verl's registry, which has {', '.join(sorted(names))}")
    function: Callable[..., Any] = names[name]
    return function


@dataclass(frozen=True)
class VerlEstimator:
    """An estimator from verl's registry, with the configuration that verl passes to it."""

    function: Estimate
    config: object
    normalise_by_std: bool

    def __call__(self, rewards: Sequence[float], counts: Sequence[int], index: Sequence[int]) -> Tensor:
        """Return the advantages [B, T] of responses, given their rewards, trained-token counts and groups (`index`).

        A response's reward is at its last trained token, as in verl. The reward of a response without trained tokens
        still counts among the rewards of its group.
        """
        mask_BT = torch.zeros(len(counts), max(max(counts), 1))
        rewards_BT = torch.zeros_like(mask_BT)
        for row, (reward, count) in enumerate(zip(rewards, counts, strict=True)):
            mask_BT[row, :count] = 1.0
            rewards_BT[row, max(count - 1, 0)] = reward
        inputs: dict[str, Any] = {"token_level_rewards": rewards_BT, "response_mask": mask_BT, "config": self.config}
        inputs |= {"index": np.array([str(number) for number in index], dtype=object)}
        inputs |= {"norm_adv_by_std_in_grpo": self.normalise_by_std}
        accepted = inspect.signature(self.function).parameters
        advantages_BT, _ = self.function(**{name: value for name, value in inputs.items() if name in accepted})
        return advantages_BT


def try_estimator(name: str, estimator: VerlEstimator) -> None:
    """Raise `EngineFault` for an estimator that cannot be computed from this trainer's inputs.

    Such an estimator needs the output of a critic or of another pass over the model, or fails on an example.
    """
    parameters = [each for each in inspect.signature(estimator.function).parameters.values() if each.kind in NAMED]
    needed = [each.name for each in parameters if each.default is each.empty and each.name not in ESTIMATOR_INPUTS]
    if needed:
        raise EngineFault(
            f"trainer.adv_estimator = {name!r} is refused: it needs {', '.join(needed)}, which this trainer does "
            "not compute"
        )
    try:
        estimator([0.0, 1.0, 0.5, 1.0], [3, 1, 2, 0], [0, 0, 1, 1])
    except Exception as error:  # verl's functions, and those that users register, may raise anything
        raise EngineFault(_fails("adv_estimator", name, error)) from error


def with_advantages(
    batch: PreparedBatch, groups: Iterable[EpisodeGroup], estimator: VerlEstimator, settings: TrainerSettings
) -> PreparedBatch:
    """Return the batch with verl's advantages.

    Each episode is one response, consisting of all its trained tokens in order. As with our own estimators, an episode
    that is left out of the loss still counts in its group, and the advantages in a group of one are 0.
    """
    rewards = {episode.episode: episode_reward(episode, settings) for group in groups for episode in group.episodes}
    compared = [number for number, group in enumerate(batch.groups) if len(group.tokens) > 1]
    episodes = [(number, name) for number in compared for name in batch.groups[number].tokens]
    of_episode = {}
    if episodes:
        counts = [batch.groups[number].tokens[name] for number, name in episodes]
        found_BT = estimator([rewards[name] for _, name in episodes], counts, [number for number, _ in episodes])
        of_episode = {name: found_BT[row].numpy() for row, (_, name) in enumerate(episodes)}
    return replace(batch, groups=tuple(_regroup(group, of_episode) for group in batch.groups), is_estimated=True)


def _regroup(group: PreparedGroup, of_episode: Mapping[str, Any]) -> PreparedGroup:
    used: dict[str, int] = {}
    sequences: list[PreparedSequence] = []
    for entry in group.sequences:
        name, mask_T = entry.sequence.episode, entry.sequence.loss_mask_T
        start = used.get(name, 0)
        used[name] = end = start + int(mask_T.sum())
        advantages_T = np.zeros(len(entry.sequence), dtype=np.float32)
        if name in of_episode:
            advantages_T[mask_T] = of_episode[name][start:end]
        sequences.append(replace(entry, advantages_T=advantages_T))
    return replace(group, sequences=tuple(sequences))


@dataclass(frozen=True)
class VerlPolicyLoss:
    """A policy loss from verl's registry, with the actor's configuration that verl passes to it."""

    function: VerlLoss
    config: object

    def mean(self, old_ST: Tensor, logprobs_ST: Tensor, advantages_ST: Tensor, importance_ST: Tensor) -> Tensor:
        """Return the loss, averaged by verl over the tokens of S sequences of equal length."""
        mean, _ = self.function(
            old_log_prob=old_ST,
            log_prob=logprobs_ST,
            advantages=advantages_ST,
            response_mask=torch.ones_like(logprobs_ST),
            loss_agg_mode="token-mean",
            config=self.config,
            rollout_is_weights=importance_ST,
        )
        return mean

    def __call__(
        self, scored: ScoredTerms, old_N: Tensor, reference_N: Tensor | None, settings: TrainerSettings
    ) -> PolicyLoss:
        """Compute the loss of one sequence in our aggregation: verl's mean over tokens, times their total weight."""
        logprobs_N, device = scored.logprobs_N, scored.logprobs_N.device
        weights_N, sampler_N = scored.terms["weights_N"], scored.terms["sampler_logprobs_N"]
        one_N = torch.zeros(len(logprobs_N), dtype=torch.long, device=device)  # all tokens belong to sequence 0
        job = settings.config
        rule = CorrectionRule(job.correction, job.tis_clip_low, job.tis_clip)
        correction = sampler_correction(old_N, sampler_N, one_N, 1, rule)
        advantages_N, importance_N = scored.terms["advantages_N"], correction.importance_N
        mean = self.mean(old_N[None], logprobs_N[None], advantages_N[None], importance_N[None])
        loss = mean * weights_N.sum()
        kl_N = None
        if reference_N is not None and job.kl_coef > 0.0:
            kl_N = reference_kl(job.kl_estimator, logprobs_N, reference_N, old_N)
            loss = loss + (weights_N * job.kl_coef * kl_N).sum()
        if job.entropy_coef > 0.0:
            loss = loss - (weights_N * job.entropy_coef * scored.entropy_N).sum()
        return PolicyLoss(
            loss=loss,
            clipped_N=None,
            importance_N=correction.importance_N,
            capped_N=correction.capped_N,
            masked_N=correction.masked_N,
            kl_reference_N=None if kl_N is None else kl_N.detach(),
        )


def try_loss(name: str, loss: VerlPolicyLoss) -> None:
    """Try a loss on two sequences. Raise `EngineFault` if it cannot be computed from this trainer's inputs.

    That is the case if the loss fails, if one sequence's loss depends on others (here each is computed alone, since its
    tokens have their own weights), or if the correction's weights have no effect on it.
    """
    old_ST = torch.tensor([[-1.0, -1.3, -0.8, -1.1], [-3.0, -3.4, -2.9, -3.2]], dtype=torch.float64)
    moved_ST = torch.tensor([[-0.1, -0.2, -0.05, -0.1], [0.1, 0.05, 0.2, 0.1]], dtype=torch.float64)
    advantages_ST = torch.tensor([[2.0], [-2.0]], dtype=torch.float64).expand(2, 4)
    ones_ST = torch.ones_like(old_ST)

    def value(weight: float, rows: slice) -> float:
        logprobs_ST = (old_ST + moved_ST)[rows].requires_grad_()
        mean = loss.mean(old_ST[rows], logprobs_ST, advantages_ST[rows], weight * ones_ST[rows])
        mean.backward()
        return float(mean.detach())

    try:
        together, alone = value(1.0, slice(2)), [value(1.0, slice(row, row + 1)) for row in range(2)]
        doubled = value(2.0, slice(2))
    except Exception as error:  # verl's functions, and those that users register, may raise anything
        raise EngineFault(_fails("loss", name, error)) from error
    if not isclose(together, sum(alone) / 2.0, rel_tol=1e-6):
        raise EngineFault(
            f"trainer.loss = {name!r} is refused: it compares the sequences of a batch with each other, but this "
            "trainer computes the loss of one at a time"
        )
    if not isclose(doubled, 2.0 * together, rel_tol=1e-6):
        raise EngineFault(
            f"trainer.loss = {name!r} is refused: it takes no weights, so no correction of the sampler's logprobs "
            "would have an effect"
        )


def _fails(setting: str, name: str, error: Exception) -> str:
    return f"trainer.{setting} = {name!r} is refused, since it fails on this trainer's inputs: {in_one_line(error)}"
