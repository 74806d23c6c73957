"""Collects the metrics of a step: sums over trained tokens, which become means at the end."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from math import isfinite
from time import perf_counter

import numpy as np
import torch
from torch import Tensor

from bombus_trainer.algorithms.kl import kl_k3
from bombus_trainer.algorithms.losses import PolicyLoss, token_ratio
from bombus_trainer.backends.torch.model import ScoredTerms
from bombus_trainer.data.batch import EpisodeGroup
from bombus_trainer.data.packing import Bin
from bombus_trainer.data.sequences import Flags, Floats, Ints

LEFT_OUT = "updates_left_out"


class Tally:
    """The metrics of one step. Nothing here affects training. A quantity that was not measured has no metric."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.classes: dict[str, Flags] = {}  # masks of the batch's terms; each class has its own `kl_sampler_`
        self._sums: dict[str, float] = {}
        self._terms: Counter[str] = Counter()  # how many tokens each sum covers
        self._maxima: dict[str, float] = {}
        self._updates: list[tuple[float, float]] = []  # (loss, gradient norm)
        self._left_out = 0
        self._computed_ids: list[Ints] = []
        self._masked_ids: list[Ints] = []
        self._differences: list[Floats] = []
        self._tokens = [0, 0, 0]  # computed, without sharing, with padding
        self._sequences = 0
        self._bins = 0
        self._flops = 0.0

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + perf_counter() - start

    def note_bins(self, bins: list[Bin], longest: int) -> None:
        """Count bins. `longest` is the length to which all sequences would be padded."""
        sequences = sum(packed.sequences for packed in bins)
        computed = sum(len(packed.tokens_T) for packed in bins)
        self.note_tokens(len(bins), sequences, computed, sum(packed.sequence_tokens for packed in bins), longest)

    def note_tokens(self, bins: int, sequences: int, computed: int, unshared: int, longest: int) -> None:
        self._sequences += sequences
        self._bins += bins
        self._tokens[0] += computed
        self._tokens[1] += unshared
        self._tokens[2] += sequences * longest

    def note_flops(self, flops: float) -> None:
        self._flops += flops

    def note_terms(self, ids_N: Ints, loss: PolicyLoss, scored: ScoredTerms, old_N: Tensor, sampler_N: Tensor) -> None:
        """Count N tokens, the terms `ids_N` of the batch. `sampler_N` is NaN where the sampler's logprob is unknown."""
        self._computed_ids.append(ids_N)
        self._masked_ids.append(ids_N[loss.masked_N.cpu().numpy()])
        self._differences.append((old_N - sampler_N).float().cpu().numpy())
        known_N = ~sampler_N.isnan()
        of_old, of_sampler = old_N[known_N], sampler_N[known_N]
        kl_N = kl_k3(of_sampler, of_old)
        classes = {
            name: torch.from_numpy(of_batch[ids_N]).to(known_N.device) for name, of_batch in self.classes.items()
        }
        distance_N = (of_old - of_sampler).abs()
        ratio_N = token_ratio(scored.logprobs_N.detach(), old_N)
        columns = {
            "kl_sampler": kl_N,
            **{f"kl_sampler_{name}": kl_N[of_class_N[known_N]] for name, of_class_N in classes.items()},
            "kl_sampler_abs": distance_N,
            "ratio": ratio_N,
            "clip_fraction": loss.clipped_N,
            "importance_capped": loss.capped_N,
            "masked_share": loss.masked_N,
            "entropy": scored.entropy_N.detach(),
            "kl_reference": loss.kl_reference_N,
        }
        for name, values_N in columns.items():
            if values_N is not None and len(values_N):
                self._sums[name] = self._sums.get(name, 0.0) + float(values_N.float().sum())
                self._terms[name] += len(values_N)
        for name, values_N in (("kl_sampler_abs_max", distance_N), ("ratio_max", ratio_N)):
            if len(values_N):
                self._maxima[name] = max(self._maxima.get(name, 0.0), float(values_N.max()))

    def noted_terms(self) -> tuple[Ints, Floats, Ints]:
        """Return which terms of the batch were counted since the last call, by how much their logprob under the old
        policy differs from the sampler's, and which of them were masked."""
        none = np.zeros(0, dtype=np.int64)
        computed, masked = (np.concatenate([none, *noted]) for noted in (self._computed_ids, self._masked_ids))
        differences = np.concatenate([np.zeros(0, dtype=np.float32), *self._differences])
        for noted in (self._computed_ids, self._masked_ids, self._differences):
            noted.clear()
        return computed, differences, masked

    def note_update(self, loss: float, norm: float) -> None:
        """Count an update. If its loss or norm is not finite, the update was skipped, and does not enter the means."""
        if isfinite(loss) and isfinite(norm):
            self._updates.append((loss, norm))
        else:
            self._left_out += 1

    def add(self, other: "Tally") -> None:
        """Add another rank's FLOPs, sums and maxima for the same step. Times, tokens and updates remain this rank's
        own."""
        self._flops += other._flops
        self._terms.update(other._terms)
        for name, total in other._sums.items():
            self._sums[name] = self._sums.get(name, 0.0) + total
        for name, value in other._maxima.items():
            self._maxima[name] = max(self._maxima.get(name, 0.0), value)

    def metrics(self, peak_flops: float | None = None) -> dict[str, float]:
        """Return the metrics.

        `tokens_unshared` is how many tokens the same sequences would take without shared prefixes, and `tokens_padded`
        how many they would take with padding. `mfu` is the fraction of the peak that was reached; without `peak_flops`
        it is left out.
        """
        computed, unshared, padded = self._tokens
        return {
            **self._of_updates(),
            "updates": float(len(self._updates)),
            LEFT_OUT: float(self._left_out),
            **{name: total / self._terms[name] for name, total in self._sums.items()},
            **self._maxima,
            "sequences": float(self._sequences),
            "bins": float(self._bins),
            **self._speed(peak_flops),
            "tokens_computed": float(computed),
            "tokens_unshared": float(unshared),
            "tokens_padded": float(padded),
            **{f"seconds_{name}": seconds for name, seconds in self.seconds.items()},
        }

    def _of_updates(self) -> dict[str, float]:
        if not self._updates:
            return {}
        losses, norms = zip(*self._updates, strict=True)
        return {"loss": sum(losses) / len(losses), "grad_norm": sum(norms) / len(norms)}

    def _speed(self, peak_flops: float | None) -> dict[str, float]:
        if not self._flops:
            return {}
        per_s = self._flops / max(sum(self.seconds.values()), 1e-9)
        return {"model_flops_per_s": per_s, **({"mfu": per_s / peak_flops} if peak_flops else {})}


def reward_metrics(groups: list[EpisodeGroup]) -> dict[str, float]:
    rewards = torch.tensor([episode.reward for group in groups for episode in group.episodes])
    if not len(rewards):
        return {}
    return {"reward_mean": float(rewards.mean()), "reward_std": float(rewards.std(correction=0))}
