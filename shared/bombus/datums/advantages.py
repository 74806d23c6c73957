"""Advantages of the episodes in a group, computed from their rewards alone."""

from collections.abc import Sequence
from math import sqrt
from typing import assert_never

from bombus.config.algorithms import Estimator
from bombus.hive.rewards import differ, rewards_by_turn

DEVIATION_EPSILON = 1e-6  # the value that verl and slime add to the standard deviation


def group_advantages(
    rewards: Sequence[float],
    lengths: Sequence[int],
    estimator: Estimator = Estimator.GRPO,
    normalise_std: bool = True,
) -> list[float]:
    """Compute one advantage for each of n samples in a group, from its reward r_i and its number of trained tokens l_i.

    - GRPO (Shao et al. 2024, arXiv:2402.03300): r_i - mean(r), divided by the sample standard deviation (n - 1) if
      `normalise_std`.
    - Dr. GRPO (Liu et al. 2025, arXiv:2503.20783): r_i - mean(r).
    - RLOO (Ahmadian et al. 2024, arXiv:2402.14740): r_i - the mean of the other rewards.
    - OPO (Hao et al. 2025, arXiv:2505.23585): r_i - sum(l r) / sum(l).
    - REINFORCE++ (Hu et al. 2025, arXiv:2501.03262): r_i, or r_i - mean(r) with baseline. Both must still be
      normalised over the whole batch, see `whitening`.

    In a group of one, or with equal rewards, there is nothing to compare: all advantages are 0, except for REINFORCE++
    without baseline.
    """
    count = len(rewards)
    if estimator is Estimator.REINFORCE_PLUS_PLUS:
        return list(rewards)
    if not differ(rewards):
        return [0.0] * count
    mean = sum(rewards) / count
    centred = [reward - mean for reward in rewards]
    match estimator:
        case Estimator.GRPO:
            return _over_deviation(centred) if normalise_std else centred
        case Estimator.DR_GRPO | Estimator.REINFORCE_PLUS_PLUS_BASELINE:
            return centred
        case Estimator.RLOO:
            return [value * count / (count - 1) for value in centred]
        case Estimator.OPO:
            weighted = sum(reward * length for reward, length in zip(rewards, lengths, strict=True))
            baseline = weighted / max(sum(lengths), 1)
            return [reward - baseline for reward in rewards]
        case _:
            assert_never(estimator)


def _over_deviation(centred: Sequence[float]) -> list[float]:
    """Divide by the sample standard deviation (n - 1)."""
    std = sqrt(sum(value * value for value in centred) / (len(centred) - 1))
    return [value / (std + DEVIATION_EPSILON) for value in centred]


def call_advantages(
    rewards: Sequence[float],
    call_rewards: Sequence[Sequence[float] | None],
    lengths: Sequence[Sequence[int]],
    estimator: Estimator = Estimator.GRPO,
    normalise_std: bool = True,
) -> list[list[float]]:
    """Compute one advantage for each call of each episode in a group. `lengths` are the numbers of trained tokens in
    the calls.

    Without call rewards, every call has its episode's advantage. If any episode has call rewards, a call is compared
    with the calls at the same turn in the group's other episodes. Attainable rewards differ between turns, so with one
    baseline for all turns an easy turn would be rewarded, and a hard one punished, whatever was sampled. A turn that
    only one episode reached has nothing to compare with, so its advantage is 0. When calls are compared in this way, an
    episode without call rewards gives its own reward to each of its calls. All this holds for every estimator except
    REINFORCE++ without baseline, which does not compare within a group: its advantage for a call is the call's own
    reward.

    Raises `ValueError` if an episode has call rewards, but not one for each of its calls.
    """
    for given, calls in zip(call_rewards, lengths, strict=True):
        if given is not None and len(given) != len(calls):
            raise ValueError(f"{len(given)} call rewards for {len(calls)} calls")
    if all(given is None for given in call_rewards):
        whole = group_advantages(rewards, [sum(calls) for calls in lengths], estimator, normalise_std)
        return [[advantage] * len(calls) for advantage, calls in zip(whole, lengths, strict=True)]
    found = [[0.0] * len(calls) for calls in lengths]
    for turn, there in enumerate(rewards_by_turn(rewards, call_rewards, [len(calls) for calls in lengths])):
        lengths_there = [lengths[place][turn] for place in there]
        advantages = group_advantages(list(there.values()), lengths_there, estimator, normalise_std)
        for place, advantage in zip(there, advantages, strict=True):
            found[place][turn] = advantage
    return found
