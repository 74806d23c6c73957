"""Which rewards of a group teach anything: the one definition of a signal, for whatever collects, filters or trains."""

from collections.abc import Iterable, Sequence
from math import isfinite

SPREAD_MIN = 1e-6  # rewards that differ by less are equal


def differ(rewards: Iterable[float]) -> bool:
    """Return whether some of these rewards differ, so that comparing them gives advantages. One alone does not.

    One that is not finite equals no other: it gives advantages that are not finite either, by which it is found.
    """
    values = tuple(rewards)
    return len(values) > 1 and (max(values) - min(values) >= SPREAD_MIN or not all(map(isfinite, values)))


def rewards_by_turn(
    rewards: Sequence[float], call_rewards: Sequence[Sequence[float] | None], calls: Sequence[int]
) -> list[dict[int, float]]:
    """Return for each turn the rewards of the episodes that reached it, by the episodes' places in their group.

    An episode without call rewards gives its own to each of its `calls`.
    """
    spread = [
        [reward] * count if given is None else given
        for reward, given, count in zip(rewards, call_rewards, calls, strict=True)
    ]
    turns = max(map(len, spread), default=0)
    return [{place: given[turn] for place, given in enumerate(spread) if turn < len(given)} for turn in range(turns)]


def have_signal(rewards: Sequence[float], call_rewards: Sequence[Sequence[float] | None], calls: Sequence[int]) -> bool:
    """Return whether the episodes of a group can be told apart: where they cannot, every advantage within it is 0.

    They are compared as `bombus.datums.advantages` does: turn by turn where any episode has rewards for its calls.
    """
    if all(given is None for given in call_rewards):
        return differ(rewards)
    return any(differ(turn.values()) for turn in rewards_by_turn(rewards, call_rewards, calls))
