"""The rewards of a run: numbers of every size that a hive takes, and some that it refuses."""

import math
import random

LARGEST = 1e9
TAKEN: tuple[float, ...] = (
    0.0,
    -0.0,
    5e-324,  # the smallest number that there is
    -5e-324,
    2.2250738585072014e-308,  # the smallest with all of its digits
    1e-30,
    -1e-3,
    1,
    -1,
    3,
    123_456_789,
    math.nextafter(LARGEST, 0.0),
    LARGEST,
    -LARGEST,
)
REFUSED: tuple[float, ...] = (
    math.nextafter(LARGEST, math.inf),
    -math.nextafter(LARGEST, math.inf),
    10**9 + 1,
    1.7976931348623157e308,
    -1.7976931348623157e308,
    math.inf,
    -math.inf,
    math.nan,
)


def reward_of(merit: int, pick: random.Random) -> float:
    """Return the reward of an episode: by its merit, often the same as its neighbours', or a number of any size."""
    kind = pick.random()
    if kind < 0.4:
        return merit + pick.random() / 8
    if kind < 0.7:
        return merit  # an exact tie with every episode that has done as well
    if kind < 0.85:
        return pick.choice(TAKEN)
    return math.copysign(10.0 ** pick.uniform(-323, math.log10(LARGEST)), pick.random() - 0.5)
