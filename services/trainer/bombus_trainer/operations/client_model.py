"""One model that a caller trains: its parameters, the gradient since its last step, and its optimizer."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from math import isfinite

import msgspec
import numpy as np
import torch
from torch import Tensor

from bombus.errors import Code, Refused
from bombus.operations import AdamParams, AdapterSpec, Reduction, Scores, StepTaken
from bombus_trainer.backends.torch.base import Base
from bombus_trainer.backends.torch.optim import scheduled
from bombus_trainer.backends.torch.trained import TrainedModel
from bombus_trainer.data.packing import Bin, shard_bins
from bombus_trainer.data.sequences import Floats, Ints
from bombus_trainer.operations.adam import check_adam
from bombus_trainer.operations.batches import TokenBatch
from bombus_trainer.operations.client_losses import MASK, ClientLoss, term_metrics
from bombus_trainer.recovery.progress import advanced

COMBINED: dict[str, Callable[[Sequence[float]], float]] = {
    "sum": sum,
    "min": min,
    "max": max,
}  # how to combine a metric over micro-batches, by the suffix after the colon in its name


class GradientEpoch(msgspec.Struct, frozen=True, omit_defaults=True):
    """The operations and tokens added to the gradient since the last step. If one of the operations failed, `failed`
    says why."""

    operations: int = 0
    tokens: int = 0
    failed: str = ""


@dataclass(frozen=True, eq=False)
class _BinScores:
    """The results for the targets numbered `ids_N` in a batch [N]."""

    ids_N: Ints
    logprobs_N: Floats
    terms_N: Floats
    loss: float
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class _Part:
    """The loss and the metrics computed by one rank."""

    loss: float
    metrics: Mapping[str, float]


class TrainedClientModel(TrainedModel):
    """A model that a caller trains, with the gradient since its last step."""

    def __init__(self, base: Base, spec: AdapterSpec | None) -> None:
        super().__init__(base, spec)
        self.step = 0
        self.epoch = GradientEpoch()

    # ---- gradients ------------------------------------------------------------------------------------------------

    def forward_backward(self, batch: TokenBatch, loss: ClientLoss, forward_only: bool) -> Scores:
        """Compute the loss of a batch, and add its gradient unless `forward_only`.

        Each rank computes a part. Raises `Refused` if the loss is not finite. Any gradient that was already added then
        remains, so the caller must call `fail_gradient`.
        """
        targets, ranks = len(batch.counted_M), self.base.ranks
        logprobs_M, terms_M = np.zeros(targets, dtype=np.float32), np.zeros(targets, dtype=np.float32)
        total, metrics = 0.0, dict[str, float]()
        with nullcontext() if forward_only or ranks.size == 1 else self._adding_up():
            parts = ranks.of_all(lambda: self._compute(batch, loss, forward_only, logprobs_M, terms_M))
        for part in parts:
            total += part.loss
            _combine(metrics, part.metrics)
        if not forward_only:
            before = self.epoch
            self.epoch = GradientEpoch(before.operations + 1, before.tokens + batch.tokens, before.failed)
        outputs = zip(batch.by_target(ranks.total(logprobs_M)), batch.by_token(ranks.total(terms_M)), strict=True)
        return Scores(
            outputs=tuple({"logprobs": each, "elementwise_loss": terms} for each, terms in outputs),
            loss=total,
            tokens=batch.tokens,
            metrics=metrics,
        )

    def _compute(
        self, batch: TokenBatch, loss: ClientLoss, forward_only: bool, logprobs_M: Floats, terms_M: Floats
    ) -> _Part:
        """Compute this rank's part, and write its logprobs and loss terms into the arrays."""
        total, metrics, ranks = 0.0, dict[str, float](), self.base.ranks
        shards = shard_bins(batch.items, self.base.settings, ranks.size)
        with self.base.switched_on(self.adapters), torch.no_grad() if forward_only else nullcontext():
            for packed in shards[ranks.rank]:
                found = self._score(packed, batch, loss, forward_only)
                logprobs_M[found.ids_N], terms_M[found.ids_N] = found.logprobs_N, found.terms_N
                total += found.loss
                _combine(metrics, found.metrics)
                advanced()
        return _Part(total, metrics)

    @contextmanager
    def _adding_up(self) -> Iterator[None]:
        """Sum the gradient computed in the block over the ranks, and add it to the earlier gradient."""
        before = {name: parameter.grad for name, parameter in self.parameters.items()}
        self.optimizer.zero_grad()
        yield
        self.add_up_gradients()
        for name, parameter in self.parameters.items():
            earlier = before[name]
            if earlier is not None:
                parameter.grad = earlier if parameter.grad is None else parameter.grad.add_(earlier)

    def _score(self, packed: Bin, batch: TokenBatch, loss: ClientLoss, forward_only: bool) -> _BinScores:
        scored = self.base.policy.score(packed, logits=loss.wants_logsumexp)
        order = np.argsort(packed.terms.ids_N)
        ids_N = packed.terms.ids_N[order]
        places_N = torch.from_numpy(order).to(scored.logprobs_N.device)
        logprobs_N = scored.logprobs_N[places_N]
        logsumexp_N = None if scored.logits_N is None else scored.logits_N[places_N] - logprobs_N
        tokens = batch.scored(ids_N, logprobs_N, logsumexp_N)
        found = loss.of(tokens)
        terms_N = found.terms_N * tokens.inputs[MASK] * tokens.counted_N
        value = terms_N.sum()
        if not bool(torch.isfinite(value)):
            raise Refused(Code.MALFORMED, _not_finite(terms_N.detach(), batch.sequences_M[ids_N]))
        if not forward_only:
            for parameter in self.parameters.values():
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
            value.backward()
        return _BinScores(
            ids_N=ids_N,
            logprobs_N=logprobs_N.detach().cpu().numpy(),
            terms_N=terms_N.detach().cpu().numpy(),
            loss=float(terms_N.detach().double().sum()),
            metrics=term_metrics(found, tokens),
        )

    def fail_gradient(self, why: str) -> None:
        """Record that an operation on the gradient failed, so that the next step fails."""
        self.epoch = msgspec.structs.replace(self.epoch, failed=self.epoch.failed or why)

    def clear(self) -> None:
        """Discard the gradient, and the record of a failed operation on it."""
        self.optimizer.zero_grad()
        self.epoch = GradientEpoch()

    # ---- steps ----------------------------------------------------------------------------------------------------

    def take_step(self, adam: AdamParams, reduction: Reduction) -> StepTaken:
        """Take a step with the gradient, and clear it. A step without a gradient is counted but changes nothing.

        Raises `Refused` if the parameters are invalid, in which case nothing changes, or if the gradient is incomplete
        or not finite, in which case it is cleared.
        """
        check_adam(adam)
        if self.epoch.failed:
            why = self.epoch.failed
            self.clear()
            raise Refused(
                Code.MALFORMED,
                f"no step was taken: a forward_backward since step {self.step} failed ({why}), so the gradient is "
                "incomplete. It was cleared; send the data again, then step",
            )
        metrics: dict[str, float] = {}
        if adam.schedule is not None:
            rate = scheduled(self.step + 1, adam.learning_rate, adam.schedule)
            adam, metrics = msgspec.structs.replace(adam, learning_rate=rate), {"learning_rate": rate}
        divisor = float(max(1, self.epoch.tokens)) if reduction is Reduction.TOKEN_MEAN else 1.0
        grads = [parameter.grad for parameter in self.parameters.values() if parameter.grad is not None]
        norm = 0.0
        if grads:
            self.optimizer.make_state()
            norm = self._scaled(grads, divisor, adam.grad_clip_norm)
            self.optimizer.step(adam)
        self.clear()
        self.step += 1
        return StepTaken(step=self.step, divisor=divisor, grad_norm=norm, metrics=metrics, has_gradient=bool(grads))

    def _scaled(self, grads: list[Tensor], divisor: float, norm_max: float) -> float:
        """Divide the gradient, then limit its norm unless `norm_max` is 0. Returns the norm after the division."""
        if divisor != 1.0:
            torch._foreach_div_(grads, divisor)
        norm = float(torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(grad) for grad in grads])))
        if not isfinite(norm):
            self.clear()
            raise Refused(
                Code.MALFORMED,
                f"no step was taken: the norm of the gradient since step {self.step} is {norm}. It was cleared; look "
                "for extreme weights, advantages or logprobs in the data",
            )
        if norm_max > 0.0 and norm > norm_max:
            torch._foreach_mul_(grads, norm_max / norm)
        return norm

    def gradient(self) -> dict[str, Tensor]:
        """Return the gradient since the last step, by parameter; empty if there is none."""
        return {name: value.grad for name, value in self.parameters.items() if value.grad is not None}

    def restore_gradient(self, gradient: Mapping[str, Tensor], epoch: GradientEpoch) -> None:
        """Restore a gradient of this model."""
        for name, parameter in self.parameters.items():
            found = gradient.get(name)
            parameter.grad = None if found is None else found.to(parameter.device)
        self.epoch = epoch


def _combine(metrics: dict[str, float], more: Mapping[str, float]) -> None:
    for name, value in more.items():
        combined = COMBINED[name.rpartition(":")[2]]
        metrics[name] = combined((metrics[name], value)) if name in metrics else value


def _not_finite(terms_N: Tensor, sequences_N: Ints) -> str:
    places = torch.isfinite(terms_N).logical_not().nonzero()
    if not len(places):
        return "the loss is not finite: the sum of its terms is too large; split the data, or scale down its weights"
    place = int(places[0])
    return (
        f"the loss of datum {int(sequences_N[place])} is not finite ({float(terms_N[place])}): look for extreme "
        "weights, advantages or logprobs in it"
    )
