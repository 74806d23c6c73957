"""Determines whether the rewards in a group give a training signal. Collection, filters and losses all use this one
definition."""

from collections.abc import Iterable, Sequence
from math import isfinite

SPREAD_MIN = 1e-6  # rewards that differ by less count as equal


def differ(rewards: Iterable[float]) -> bool:
    """Return whether any two of these rewards differ, in which case they lead to nonzero advantages. Returns False for
    a single reward.

    A reward that is not finite differs from all others, so that it shows in the advantages instead of being left out.
    """
    values = tuple(rewards)
    return len(values) > 1 and (max(values) - min(values) >= SPREAD_MIN or not all(map(isfinite, values)))


def rewards_by_turn(
    rewards: Sequence[float], call_rewards: Sequence[Sequence[float] | None], calls: Sequence[int]
) -> list[dict[int, float]]:
    """Return, for each turn, the rewards of the episodes that reached it, by the episodes' indices in their group.

    In an episode without call rewards, each call gets the reward of the episode; `calls` has the number of calls in
    each episode.
    """
    spread = [
        [reward] * count if given is None else given
        for reward, given, count in zip(rewards, call_rewards, calls, strict=True)
    ]
    turns = max(map(len, spread), default=0)
    return [{place: given[turn] for place, given in enumerate(spread) if turn < len(given)} for turn in range(turns)]


def have_signal(rewards: Sequence[float], call_rewards: Sequence[Sequence[float] | None], calls: Sequence[int]) -> bool:
    """Return whether the rewards of a group's episodes differ. If they do not, every advantage within the group is 0.

    The rewards are compared as in `bombus.datums.advantages`: turn by turn if any episode has rewards for its calls.
    """
    if all(given is None for given in call_rewards):
        return differ(rewards)
    return any(differ(turn.values()) for turn in rewards_by_turn(rewards, call_rewards, calls))
