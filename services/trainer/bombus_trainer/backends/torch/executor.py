"""Run training steps: the one place where model, optimizer and batches meet. It does not know the bus."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from math import isfinite
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from bombus.faults import Point, reached
from bombus.weights.models import load_tokenizer_files
from bombus_trainer.algorithms.losses import LossInputs, PolicyLoss, policy_loss
from bombus_trainer.backend import Interrupted
from bombus_trainer.backends.torch.metrics import Tally, reward_metrics
from bombus_trainer.backends.torch.model import PolicyModel, ScoredTerms
from bombus_trainer.backends.torch.optim import Optimizer, learning_rate
from bombus_trainer.data.batch import EpisodeGroup, PreparedBatch, mini_batches, prepare, staleness
from bombus_trainer.data.packing import Bin, TrainingItem, pack
from bombus_trainer.data.sequences import Floats
from bombus_trainer.publish import checkpoint
from bombus_trainer.publish.checkpoint import Facts, Saved
from bombus_trainer.publish.export import ModelPart, Outline, Tensors, adapter_outline
from bombus_trainer.recovery.progress import advanced
from bombus_trainer.settings import TrainerSettings

T = TypeVar("T")
PARAMETER, MOMENT, RNG = "parameter.", "optimizer.", "rng"


def with_sampler(scored: ScoredTerms, old_N: Tensor) -> ScoredTerms:
    """Put the old policy's logprobs in the place of the sampler's where those are not known (NaN).

    A token without a sampler's logprob then has a correction of 1.
    """
    sampler_N = scored.terms["sampler_logprobs_N"]
    known_N = torch.where(torch.isnan(sampler_N), old_N.to(sampler_N.dtype), sampler_N)
    return replace(scored, terms={**scored.terms, "sampler_logprobs_N": known_N})


def loss_of_terms(
    scored: ScoredTerms, old_N: Tensor, reference_N: Tensor | None, settings: TrainerSettings
) -> PolicyLoss:
    """Compute what N trained tokens add to the loss of their update, whichever backend computed their logprobs."""
    inputs = LossInputs(
        logprobs_N=scored.logprobs_N,
        old_logprobs_N=old_N,
        sampler_logprobs_N=scored.terms["sampler_logprobs_N"],
        advantages_N=scored.terms["advantages_N"],
        weights_N=scored.terms["weights_N"],
        lines_N=scored.terms["lines_N"],
        lines=scored.lines,
        reference_logprobs_N=reference_N,
        entropy_N=scored.entropy_N,
    )
    return policy_loss(inputs, settings)


class Executor:
    """The torch backend: one model in this process. See `backend.TrainerBackend`."""

    def __init__(self, folder: Path, settings: TrainerSettings, files: Mapping[str, bytes] | None = None) -> None:
        """Load the model in `folder` at step 0; `files` are its tokenizer's, where they are not in `folder`.

        Raises `EngineFault` when it cannot be loaded or trained.
        """
        torch.manual_seed(settings.job.model.seed)
        self.settings = settings
        self.files = load_tokenizer_files(folder) if files is None else dict(files)
        self.model = PolicyModel.load(folder, settings)
        self.optimizer = Optimizer(self.model.trainable(), settings)

    @property
    def vocab_size(self) -> int:
        return self.model.vocab_size

    # ---- steps ------------------------------------------------------------------------------------------------

    def train_step(
        self, groups: list[EpisodeGroup], step: int, interrupted: Callable[[], bool] = lambda: False
    ) -> dict[str, float]:
        """See `TrainerBackend.train_step`."""
        tally = Tally()
        with tally.phase("merge"):
            batch = prepare(groups, self.settings, self.model.vocab_size)
        old = self._old_logprobs(batch, step, tally, interrupted)
        rate = learning_rate(step, self.settings)
        for epoch in range(self.settings.config.ppo_epochs):
            for items in mini_batches(batch, self.settings, step, epoch):
                self._update(items, rate, old, tally, interrupted)
        return {
            **tally.metrics(self.model.peak_flops),
            "lr": rate,
            "bin_tokens": float(self.settings.bin_tokens),
            "torch_threads": float(torch.get_num_threads()),
            **batch_metrics(groups, batch),
            **staleness(batch, step),
        }

    def _update(
        self,
        items: list[TrainingItem],
        rate: float,
        old: Floats | None,
        tally: Tally,
        interrupted: Callable[[], bool],
    ) -> None:
        """Make one update. It is left out when its loss or a gradient is not finite."""
        self.optimizer.zero_grad()
        loss = 0.0
        for packed in self._bins(items, tally, interrupted):
            with tally.phase("forward_backward"):
                loss += self._forward_backward(packed, old, tally)
            tally.note_flops(self.model.flops(packed, backward=True))
            reached(Point.TRAINER_BIN_DONE)
            if not isfinite(loss):
                break
        with tally.phase("optimizer"):
            norm = self.optimizer.step(rate) if isfinite(loss) else loss
        tally.note_update(loss, norm)
        advanced("update done")
        reached(Point.TRAINER_UPDATE_DONE)

    def _forward_backward(self, packed: Bin, old: Floats | None, tally: Tally) -> float:
        """Return a bin's share of the loss of its update, and add its gradients, unless the share is not finite."""
        settings, device = self.settings, self.model.device
        scored = self.model.score(packed)
        old_N = scored.logprobs_N.detach() if old is None else torch.from_numpy(old[packed.terms.ids_N]).to(device)
        sampler_N, scored = scored.terms["sampler_logprobs_N"], with_sampler(scored, old_N)
        reference_N = self.model.score_reference(packed) if settings.config.kl_coef > 0.0 else None
        result = loss_of_terms(scored, old_N, reference_N, settings)
        loss = float(result.loss.detach())
        if isfinite(loss):
            result.loss.backward()
            tally.note_terms(result, old_N, sampler_N, scored.entropy_N.detach())
        return loss

    def _old_logprobs(
        self, batch: PreparedBatch, step: int, tally: Tally, interrupted: Callable[[], bool]
    ) -> Floats | None:
        """Compute the logprobs of all the batch's terms before its first update; None when there is only one."""
        parts = mini_batches(batch, self.settings, step, epoch=0)
        if len(parts) * self.settings.config.ppo_epochs <= 1:
            return None
        old = np.zeros(batch.terms, dtype=np.float32)
        items = [item for part in parts for item in part]
        for packed in self._bins(items, None, interrupted):
            with tally.phase("old_logprobs"), torch.no_grad():
                old[packed.terms.ids_N] = self.model.score(packed).logprobs_N.cpu().numpy()
            tally.note_flops(self.model.flops(packed, backward=False))
        return old

    def _bins(self, items: list[TrainingItem], tally: Tally | None, interrupted: Callable[[], bool]) -> Iterator[Bin]:
        settings = self.settings
        packing = settings.config.enable_packing
        tokens_max = settings.bin_tokens if packing else 1  # a bin for each sequence: no two fit into one
        share = packing and settings.config.share_prefixes
        bins = pack(items, tokens_max, share)
        if tally is not None:
            tally.note_bins(bins, max((len(item.tokens_T) - 1 for item in items), default=0))
        for number, packed in enumerate(bins, 1):
            if interrupted():
                raise Interrupted
            advanced(f"micro-batch {number} of {len(bins)}")
            yield packed

    # ---- checkpoints and weights ------------------------------------------------------------------------------

    def save(self, root: Path, facts: Facts) -> Saved:
        """Write a checkpoint below `root`; see `checkpoint.save`."""
        return checkpoint.save(root, facts, self.tensors())

    def tensors(self) -> dict[str, Tensor]:
        """Return what `load_tensors` takes: parameters and optimizer state, not copied, and the random state."""
        tensors: dict[str, Tensor] = {RNG: torch.get_rng_state()}
        tensors |= {PARAMETER + name: value.detach() for name, value in self.model.trainable().items()}
        tensors |= {MOMENT + name: value for name, value in self.optimizer.state().items()}
        return tensors

    def restore(self, path: Path, digest: str) -> None:
        """Go on from a checkpoint; see `checkpoint.load`."""
        self.load_tensors(checkpoint.load(path, digest).tensors)

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on from the result of `tensors`. Raises `EngineFault` when it is of another model."""
        self.model.restore(_under(PARAMETER, tensors))
        self.optimizer.restore(_under(MOMENT, tensors))
        self.optimizer.zero_grad()
        torch.set_rng_state(tensors[RNG])

    def outline(self, part: ModelPart = ModelPart.MODEL) -> Outline:
        if part == ModelPart.ADAPTER:
            return adapter_outline(self.model.adapter_config(), self.model.adapter_weights())
        return Outline(self.model.export_dtype, self.model.dense_shapes())

    def read_weights(self, use: Callable[[Tensors], T], part: ModelPart = ModelPart.MODEL) -> T:
        """See `TrainerBackend.read_weights`."""
        if part == ModelPart.ADAPTER:
            return use(self.model.adapter_weights())
        return use(self.model.dense_weights(merged=part == ModelPart.MODEL))


def _under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def batch_metrics(groups: list[EpisodeGroup], batch: PreparedBatch) -> dict[str, float]:
    return {
        **reward_metrics(groups),
        "groups": float(len(groups)),
        "groups_left_out": float(batch.groups_left_out),
        "groups_without_signal": float(sum(not group.signal for group in batch.groups) - batch.groups_left_out),
        "episodes": float(sum(len(group.episodes) for group in groups)),
        "episodes_left_out": float(len(batch.left_out)),
        **_of_calls(batch),
        "tokens_trained": float(batch.terms),
    }


def _of_calls(batch: PreparedBatch) -> dict[str, float]:
    """Return what only the calls of episodes can say: sequences that others have scored have none."""
    if not batch.calls:
        return {}
    return {
        "calls": float(batch.calls),
        "merged_share": batch.merged_calls / batch.calls,
        "episodes_cut": float(batch.cut),
        "episodes_cut_by_request": float(batch.cut_by_request),
    }
