"""A training step on a batch, for every backend: a series of updates, each from the gradients of micro-batches."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from math import isfinite, sqrt
from typing import Generic, TypeVar

import numpy as np
import torch

from bombus.errors import in_one_line
from bombus.faults import Point, reached
from bombus.hive.events import Canary
from bombus_trainer.backend import BackendLost, Interrupted
from bombus_trainer.backends.torch.metrics import Tally, reward_metrics
from bombus_trainer.backends.torch.optim import learning_rate
from bombus_trainer.data.batch import EpisodeGroup, PreparedBatch, answer_ends, mini_batches, prepare, staleness
from bombus_trainer.data.fates import StepAccount, TrainedTerms, step_tokens
from bombus_trainer.data.packing import TrainingItem
from bombus_trainer.data.sequences import Floats, Ints
from bombus_trainer.publish.export import ModelPart, Outline, WeightsSource
from bombus_trainer.ranks import Ranks
from bombus_trainer.recovery.progress import advanced
from bombus_trainer.settings import TrainerSettings

log = logging.getLogger(__name__)

P = TypeVar("P")


class StepBackend(ABC, Generic[P]):
    """The base class of the `TrainerBackend` implementations for torch and verl. `P` is the type of a micro-batch.

    Every method is called on all of `ranks`.
    """

    settings: TrainerSettings
    ranks: Ranks
    _base_canary: tuple[float, ...] = ()  # canary of the model under an adapter, once computed

    @property
    @abstractmethod
    def vocab_size(self) -> int: ...

    @property
    @abstractmethod
    def peak_flops(self) -> float | None:
        """The peak FLOPs per second of one rank's device, or None if unknown."""

    @abstractmethod
    def micro_batches(self, items: list[TrainingItem], tally: Tally, backward: bool) -> Sequence[P | None]:
        """Return this rank's micro-batches of these sequences. Every rank returns the same number.

        None takes the place of a micro-batch that this rank does not have and need not compute.
        """

    @abstractmethod
    def logprobs(self, micro_batch: P, tally: Tally) -> tuple[Ints, Floats]:
        """Return the batch indices [N] of a micro-batch's terms, and their logprobs [N]."""

    @abstractmethod
    def forward_backward(self, micro_batch: P, old: Floats | None, tally: Tally) -> float:
        """Return a micro-batch's share of its update's loss, and accumulate its gradients.

        If the loss is not finite, the gradients may be omitted, since no step is taken with them. `old` contains the
        logprobs of all the batch's terms before its first update; None means that they are the current logprobs.
        """

    @abstractmethod
    def zero_grad(self) -> None: ...

    @abstractmethod
    def take_step(self, rate: float) -> float:
        """Update the model at this learning rate, unless the gradient norm is not finite. Return the norm."""

    @abstractmethod
    def outline(self, part: ModelPart = ModelPart.MODEL) -> Outline: ...

    @abstractmethod
    def canary_figures(self, part: ModelPart, source: WeightsSource | None) -> tuple[tuple[float, ...], str]:
        """Return the canary's logprobs with the weights as published with `part`, and for a whole model also the sum of
        the weights' bits. Only the leader calls this; `source` reads the weights on all ranks."""

    def canary(self, part: ModelPart = ModelPart.MODEL, source: WeightsSource | None = None) -> Canary | None:
        """See `TrainerBackend.canary`."""
        try:
            return self._canary(part, source)
        except BackendLost:
            raise
        except Exception as error:  # a family's own code may raise anything; training goes on without a canary
            log.warning("this model's canary cannot be computed, so replicas are not checked: %s", in_one_line(error))
            return None

    def _canary(self, part: ModelPart, source: WeightsSource | None) -> Canary | None:
        logprobs, bits = self.canary_figures(part, source)
        if not all(map(isfinite, logprobs)):
            return None
        dtype = str(self.outline().dtype).removeprefix("torch.")
        if part != ModelPart.ADAPTER:
            return Canary(logprobs=logprobs, dtype=dtype, bits=bits)
        if not self._base_canary:
            self._base_canary, _ = self.canary_figures(ModelPart.BASE, source)
        squares = [(one - other) ** 2 for one, other in zip(logprobs, self._base_canary, strict=True)]
        return Canary(logprobs=logprobs, dtype=dtype, effect=sqrt(sum(squares) / len(squares)))

    def prepared(self, groups: list[EpisodeGroup]) -> PreparedBatch:
        """Return the sequences of a batch, with their advantages."""
        return prepare(groups, self.settings, self.vocab_size)

    def training(self) -> AbstractContextManager[None]:
        """Return a context in which the model is ready for a step. After it, the weights can be read."""
        return nullcontext()

    def train_step(
        self,
        groups: list[EpisodeGroup],
        step: int,
        interrupted: Callable[[], bool] = lambda: False,
        account: Callable[[StepAccount], None] = lambda account: None,
    ) -> dict[str, float]:
        """See `TrainerBackend.train_step`. Only the leader's `interrupted` is considered."""
        tally = Tally()
        with tally.phase("merge"):
            batch = self.prepared(groups)
            tally.classes = answer_ends(batch)
        rate, terms = learning_rate(step, self.settings), TrainedTerms(batch)
        with self.training():
            epochs = [
                mini_batches(batch, self.settings, step, epoch) for epoch in range(self.settings.config.ppo_epochs)
            ]
            old = self._old_logprobs(batch, epochs, tally, interrupted)
            for items in chain.from_iterable(epochs):
                updated, noted = self._update(items, rate, old, tally, interrupted), tally.noted_terms()
                if updated:
                    terms.note(items, *noted)
        for values_N in terms.of_rank:
            self.ranks.total(values_N)
        if self.ranks.leads:
            account(StepAccount(step_tokens(groups, batch, terms, self.settings), terms.differences(batch)))
        tally.classes.clear()
        first, *others = self.ranks.gather(tally)
        for other in others:
            first.add(other)
        peak = self.peak_flops
        return {
            **first.metrics(None if peak is None else peak * self.ranks.size),
            "lr": rate,
            "bin_tokens": float(self.settings.bin_tokens),
            "torch_threads": float(torch.get_num_threads()),
            "ranks": float(self.ranks.size),
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
    ) -> bool:
        """Make one update. If its loss or gradient norm is not finite, all ranks skip it and return False."""
        self.zero_grad()
        share = 0.0
        for micro_batch in self._in_turn(items, tally, interrupted):
            with tally.phase("forward_backward"):
                share += self.forward_backward(micro_batch, old, tally)
            reached(Point.TRAINER_BIN_DONE)
            if self.ranks.size == 1 and not isfinite(share):
                break  # with several ranks, the others would wait for this one
        norm = loss = sum(self.ranks.gather(share))
        if isfinite(loss):
            with tally.phase("optimizer"):
                norm = self.take_step(rate)
        self.zero_grad()
        tally.note_update(loss, norm)
        advanced("update done")
        reached(Point.TRAINER_UPDATE_DONE)
        return isfinite(loss) and isfinite(norm)

    def _old_logprobs(
        self,
        batch: PreparedBatch,
        epochs: Sequence[list[list[TrainingItem]]],
        tally: Tally,
        interrupted: Callable[[], bool],
    ) -> Floats | None:
        """Compute the logprobs of all the batch's terms before its first update, or return None if there is only one
        update."""
        if sum(map(len, epochs)) <= 1:
            return None
        old = np.zeros(batch.terms, dtype=np.float32)
        items = [*chain.from_iterable(epochs[0])]
        with tally.phase("old_logprobs"):
            for micro_batch in self._in_turn(items, tally, interrupted, backward=False):
                ids_N, logprobs_N = self.logprobs(micro_batch, tally)
                old[ids_N] = logprobs_N
            return self.ranks.total(old)

    def _in_turn(
        self, items: list[TrainingItem], tally: Tally, interrupted: Callable[[], bool], backward: bool = True
    ) -> Iterator[P]:
        """Yield this rank's micro-batches one by one. If the leader has been interrupted, raises `Interrupted` instead
        of yielding the next one."""
        micro_batches = self.micro_batches(items, tally, backward)
        for number, micro_batch in enumerate(micro_batches, 1):
            if self.ranks.agree(interrupted()):
                raise Interrupted
            advanced(f"micro-batch {number} of {len(micro_batches)}")
            if micro_batch is not None:
                yield micro_batch


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
    """Return the metrics about calls. A batch of rollout groups has none, since its sequences have no calls."""
    if not batch.calls:
        return {}
    return {
        "calls": float(batch.calls),
        "merged_share": batch.merged_calls / batch.calls,
        "episodes_cut": float(batch.cut),
        "episodes_cut_by_request": float(batch.cut_by_request),
    }
