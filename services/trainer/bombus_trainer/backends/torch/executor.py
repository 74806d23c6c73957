"""Runs training steps: applies batches to a model with its optimizer. This module does not use the bus."""

import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from math import isfinite
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn

from bombus.architectures.canary import sum_of_bits
from bombus.operations import AdamParams
from bombus.weights.checkpoints import STATE, Checkpoint, Seal
from bombus.weights.models import load_tokenizer_files
from bombus_trainer.algorithms.losses import LossInputs, PolicyLoss, policy_loss
from bombus_trainer.backends.steps import StepBackend
from bombus_trainer.backends.torch.base import Base
from bombus_trainer.backends.torch.metrics import Tally
from bombus_trainer.backends.torch.model import ScoredTerms
from bombus_trainer.backends.torch.trained import TrainedModel
from bombus_trainer.data.packing import Bin, TrainingItem, shard_bins
from bombus_trainer.data.sequences import Floats, Ints
from bombus_trainer.publish.export import ModelPart, Outline, Tensors, WeightsSource, adapter_outline
from bombus_trainer.publish.step_checkpoint import StepFacts, load_step, save_step
from bombus_trainer.publish.tensorfile import write_whole
from bombus_trainer.ranks import Ranks
from bombus_trainer.settings import TrainerSettings

log = logging.getLogger(__name__)

T = TypeVar("T")
PARAMETER, MOMENT, RNG = "parameter.", "optimizer.", "rng"


def with_sampler(scored: ScoredTerms, old_N: Tensor) -> ScoredTerms:
    """Replace the sampler's unknown (NaN) logprobs with those of the old policy.

    Those tokens then have a correction factor of 1.
    """
    sampler_N = scored.terms["sampler_logprobs_N"]
    known_N = torch.where(torch.isnan(sampler_N), old_N.to(sampler_N.dtype), sampler_N)
    return replace(scored, terms={**scored.terms, "sampler_logprobs_N": known_N})


def loss_of_terms(
    scored: ScoredTerms, old_N: Tensor, reference_N: Tensor | None, settings: TrainerSettings
) -> PolicyLoss:
    """Compute what N trained tokens contribute to their update's loss, whichever backend computed their logprobs."""
    inputs = LossInputs(
        logprobs_N=scored.logprobs_N,
        old_logprobs_N=old_N,
        sampler_logprobs_N=scored.terms["sampler_logprobs_N"],
        advantages_N=scored.terms["advantages_N"],
        weights_N=scored.terms["weights_N"],
        sequences_N=scored.terms["sequences_N"],
        sequences=scored.sequences,
        reference_logprobs_N=reference_N,
        entropy_N=scored.entropy_N,
    )
    return policy_loss(inputs, settings)


class Executor(StepBackend[Bin]):
    """The torch backend: the whole model on each rank, and each micro-batch on one rank. See `TrainerBackend`."""

    def __init__(
        self,
        folder: Path,
        settings: TrainerSettings,
        files: Mapping[str, bytes] | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        """Load the model in `folder` at step 0. `files` are the tokenizer's files; if None, those in `folder` are used.

        `ranks` train together; None means this process alone. Raises `EngineFault` if the model cannot be loaded or
        trained.
        """
        torch.manual_seed(settings.job.model.seed)
        self.settings = settings
        self.ranks = ranks or Ranks.alone()
        self.files = load_tokenizer_files(folder) if files is None else dict(files)
        self.base = Base(folder, settings, settings.adapter is None, self.ranks)
        self.model = TrainedModel(self.base, settings.adapter)
        self.policy = self.base.policy
        kept = settings.config.kl_coef > 0.0 and self.base.all_weights  # with an adapter, the base is the reference
        self._reference = self.policy.frozen_copy() if kept else self.policy
        self._shapes = self.policy.dense_shapes()  # read by another thread while a step switches adapters on and off

    @property
    def vocab_size(self) -> int:
        return self.policy.vocab_size

    @property
    def peak_flops(self) -> float | None:
        return self.policy.peak_flops

    # ---- steps ------------------------------------------------------------------------------------------------

    def micro_batches(self, items: list[TrainingItem], tally: Tally, backward: bool) -> list[Bin | None]:
        shards = shard_bins(items, self.settings, self.ranks.size)
        if backward and self.ranks.leads:
            everywhere = [packed for of_rank in shards for packed in of_rank]
            tally.note_bins(everywhere, max((len(item.tokens_T) - 1 for item in items), default=0))
        mine = shards[self.ranks.rank]
        return [*mine, *[None] * (len(shards[0]) - len(mine))]

    def logprobs(self, micro_batch: Bin, tally: Tally) -> tuple[Ints, Floats]:
        tally.note_flops(self.policy.flops(micro_batch, backward=False))
        with torch.no_grad():
            return micro_batch.terms.ids_N, self.policy.score(micro_batch).logprobs_N.cpu().numpy()

    def forward_backward(self, micro_batch: Bin, old: Floats | None, tally: Tally) -> float:
        settings, device = self.settings, self.policy.device
        scored = self.policy.score(micro_batch)
        old_N = scored.logprobs_N.detach() if old is None else torch.from_numpy(old[micro_batch.terms.ids_N]).to(device)
        sampler_N, scored = scored.terms["sampler_logprobs_N"], with_sampler(scored, old_N)
        reference_N = self.reference_logprobs(micro_batch) if settings.config.kl_coef > 0.0 else None
        result = loss_of_terms(scored, old_N, reference_N, settings)
        loss = float(result.loss.detach())
        tally.note_flops(self.policy.flops(micro_batch, backward=True))
        if isfinite(loss):
            result.loss.backward()
            tally.note_terms(micro_batch.terms.ids_N, result, scored, old_N, sampler_N)
        return loss

    def reference_logprobs(self, micro_batch: Bin) -> Tensor:
        """Compute logprobs [N] under the weights that training began with, without gradient."""
        with torch.no_grad(), self.base.switched_on({}):
            return self._reference.score(micro_batch).logprobs_N

    def training(self) -> AbstractContextManager[None]:
        return self.base.switched_on(self.model.adapters)

    def zero_grad(self) -> None:
        self.model.optimizer.zero_grad()

    def take_step(self, rate: float) -> float:
        config = self.settings.config
        self.model.add_up_gradients()
        norm = float(nn.utils.clip_grad_norm_(self.model.parameters.values(), config.grad_clip))
        if isfinite(norm):
            beta1, beta2 = config.betas
            self.model.optimizer.step(
                AdamParams(
                    learning_rate=rate,
                    beta1=beta1,
                    beta2=beta2,
                    eps=self.settings.adam_epsilon,
                    weight_decay=config.weight_decay,
                )
            )
        return norm

    # ---- checkpoints and weights ------------------------------------------------------------------------------

    def save(self, root: Path, facts: StepFacts) -> Checkpoint[StepFacts]:
        """See `TrainerBackend.save`. All ranks have the same state, so only the leader writes it."""

        def fill(draft: Path) -> dict[str, Seal]:
            return {STATE: write_whole(draft / STATE, self.tensors(), durable=True)}

        return self.ranks.by_leader(lambda: save_step(root, facts, fill))

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that `load_tensors` takes: parameters and optimizer state (not copied), and the random
        state."""
        tensors: dict[str, Tensor] = {RNG: torch.get_rng_state()}
        tensors |= {PARAMETER + name: value.detach() for name, value in self.model.parameters.items()}
        tensors |= {MOMENT + name: value for name, value in self.model.optimizer.state().items()}
        return tensors

    def restore(self, path: Path, digest: str) -> None:
        """See `TrainerBackend.restore`."""
        self.load_tensors(load_step(path, digest))

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Load what `tensors` returned. Raises `EngineFault` if it belongs to another model."""
        self.model.restore(_below(PARAMETER, tensors))
        self.model.optimizer.restore(_below(MOMENT, tensors))
        self.zero_grad()
        torch.set_rng_state(tensors[RNG])

    def outline(self, part: ModelPart = ModelPart.MODEL) -> Outline:
        if part == ModelPart.ADAPTER:
            return adapter_outline(self.model.adapter_config(), self.model.weights().items())
        return Outline(self.policy.export_dtype, self._shapes)

    def read_weights(self, use: Callable[[Tensors], T], part: ModelPart = ModelPart.MODEL) -> T:
        """See `TrainerBackend.read_weights`."""
        if part == ModelPart.ADAPTER:
            return use(self.model.weights().items())
        with self.base.switched_on(self.model.adapters if part == ModelPart.MODEL else {}):
            return use(self.policy.dense_weights())

    def canary_figures(self, part: ModelPart, source: WeightsSource | None) -> tuple[tuple[float, ...], str]:
        """See `StepBackend.canary_figures`."""
        with self.base.switched_on({} if part == ModelPart.BASE else self.model.adapters):
            logprobs = self.policy.canary_logprobs(part)
        return logprobs, self.read_weights(sum_of_bits, part) if part == ModelPart.MODEL else ""

    def gather_weights(self, part: ModelPart = ModelPart.MODEL) -> None:
        """Do nothing, since the leader itself has all weights."""


def _below(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
