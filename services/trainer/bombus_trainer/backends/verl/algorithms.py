"""Adapt functions of verl's registries to our batches. This module knows their signatures, and does not import verl."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bombus.errors import EngineFault
from bombus_trainer.algorithms.corrections import CorrectionRule, sampler_correction
from bombus_trainer.algorithms.losses import PolicyLoss, reference_kl, token_ratio
from bombus_trainer.backends.torch.model import ScoredTerms
from bombus_trainer.data.batch import EpisodeGroup, Line, PreparedBatch, PreparedGroup
from bombus_trainer.settings import TrainerSettings

Estimate = Callable[..., tuple[Tensor, Tensor]]
VerlLoss = Callable[..., tuple[Tensor, Mapping[str, Any]]]
ESTIMATOR_INPUTS = frozenset({"token_level_rewards", "response_mask", "index", "epsilon", "config", "kwargs"})


def look_up(setting: str, name: str, registry: Mapping[str, Any]) -> Callable[..., Any]:
    """Return the function of that name. Raises `EngineFault`, which lists all names."""
    names = {str(getattr(key, "value", key)): function for key, function in registry.items()}
    if name not in names:
        raise EngineFault(f"{setting} = {name!r} is not in verl's registry: it has {', '.join(sorted(names))}")
    function: Callable[..., Any] = names[name]
    return function


def check_estimator(name: str, estimate: Estimate) -> None:
    """Raise `EngineFault` for an estimator with inputs that only a critic or another pass over the model gives."""
    parameters = inspect.signature(estimate).parameters.values()
    needed = [each.name for each in parameters if each.default is each.empty and each.name not in ESTIMATOR_INPUTS]
    if needed:
        raise EngineFault(
            f"trainer.adv_estimator = {name!r} is refused: it needs {', '.join(needed)}, which this trainer does "
            "not compute"
        )


def with_advantages(
    batch: PreparedBatch, groups: Iterable[EpisodeGroup], estimate: Estimate, config: object
) -> PreparedBatch:
    """Return the batch with verl's advantages. Each episode is one response: all its trained tokens in order.

    Its reward is at the last of them, as in verl.
    """
    rewards = {episode.episode: episode.reward for group in groups for episode in group.episodes}
    episodes = [(number, name) for number, group in enumerate(batch.groups) for name in _trained(group)]
    if not episodes:
        return batch
    counts = [batch.groups[number].tokens[name] for number, name in episodes]
    mask_BT = torch.zeros(len(episodes), max(counts))
    rewards_BT = torch.zeros_like(mask_BT)
    for row, ((_, name), count) in enumerate(zip(episodes, counts, strict=True)):
        mask_BT[row, :count] = 1.0
        rewards_BT[row, count - 1] = rewards[name]
    index_B = np.array([str(number) for number, _ in episodes], dtype=object)
    inputs: dict[str, Any] = {"token_level_rewards": rewards_BT, "response_mask": mask_BT}
    inputs |= {"index": index_B, "config": config}
    accepted = inspect.signature(estimate).parameters
    advantages_BT, _ = estimate(**{name: value for name, value in inputs.items() if name in accepted})
    of_episode = {name: advantages_BT[row].numpy() for row, (_, name) in enumerate(episodes)}
    return replace(batch, groups=tuple(_regroup(group, of_episode) for group in batch.groups))


def _trained(group: PreparedGroup) -> list[str]:
    return [name for name, count in group.tokens.items() if count]


def _regroup(group: PreparedGroup, of_episode: Mapping[str, Any]) -> PreparedGroup:
    used: dict[str, int] = {}
    lines: list[Line] = []
    for line in group.lines:
        sequence = line.sequence
        start, mask_T = used.get(sequence.episode, 0), sequence.loss_mask_T
        used[sequence.episode] = end = start + int(mask_T.sum())
        advantages_T = np.zeros(len(sequence), dtype=np.float32)
        advantages_T[mask_T] = of_episode[sequence.episode][start:end]
        lines.append(Line(sequence, advantages_T, line.first_id))
    return PreparedGroup(tuple(lines), group.tokens)


@dataclass(frozen=True)
class VerlPolicyLoss:
    """A policy loss of verl's registry, with the actor's configuration that verl hands to it."""

    function: VerlLoss
    config: object

    def __call__(
        self, scored: ScoredTerms, old_N: Tensor, reference_N: Tensor | None, settings: TrainerSettings
    ) -> PolicyLoss:
        """Compute the loss of one sequence in our aggregation: verl's mean over it times the weights of its tokens."""
        logprobs_N, device = scored.logprobs_N, scored.logprobs_N.device
        weights_N, sampler_N = scored.terms["weights_N"], scored.terms["sampler_logprobs_N"]
        one_N = torch.zeros(len(logprobs_N), dtype=torch.long, device=device)  # the number of the one sequence
        job = settings.config
        rule = CorrectionRule(job.correction, job.tis_clip_low, job.tis_clip)
        correction = sampler_correction(old_N, sampler_N, one_N, 1, rule)
        mean, _ = self.function(
            old_log_prob=old_N[None],
            log_prob=logprobs_N[None],
            advantages=scored.terms["advantages_N"][None],
            response_mask=torch.ones_like(logprobs_N)[None],
            loss_agg_mode="token-mean",
            config=self.config,
            rollout_is_weights=correction.importance_N[None],
        )
        loss = mean * weights_N.sum()
        kl_N = None
        if reference_N is not None and job.kl_coef > 0.0:
            kl_N = reference_kl(job.kl_estimator, logprobs_N, reference_N, old_N)
            loss = loss + (weights_N * job.kl_coef * kl_N).sum()
        if job.entropy_coef > 0.0:
            loss = loss - (weights_N * job.entropy_coef * scored.entropy_N).sum()
        return PolicyLoss(
            loss=loss,
            ratio_N=token_ratio(logprobs_N, old_N).detach(),
            clipped_N=torch.zeros_like(logprobs_N, dtype=torch.bool),
            importance_N=correction.importance_N,
            capped_N=correction.capped_N,
            masked_N=correction.masked_N,
            kl_reference_N=None if kl_N is None else kl_N.detach(),
        )
