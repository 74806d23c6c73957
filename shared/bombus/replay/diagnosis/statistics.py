"""The statistics that the rules rely on. All use only a few numbers: one for each step, or counts of episodes."""

import statistics
from collections.abc import Iterable, Sequence
from itertools import pairwise
from math import inf, sqrt
from typing import TypeVar

import msgspec

from bombus.hive.rollouts import MetricSum

# A change of more standard errors than this counts as certain. About 40 rules examine each step: with normal noise, a
# probability of 3.4e-6 for each rule makes one false alarm in 7,000 steps. Noise is estimated from a few steps, so its
# tails are heavier, and every rule also demands a change that matters.
CERTAIN = 4.5
VISIBLE = 2.0  # the same limit for a rise that counts as evidence against a fault
FEW = 3.0  # the noise of this many steps counts twice
# The same limit for large changes where the noise comes from single episodes and follows from their number. The
# probability is 2.3e-4.
EPISODES_CERTAIN = 3.5
SHARE_CERTAIN = 3.0  # the same limit for shares, whose binomial bound needs no estimate of the noise


class Spread(MetricSum, array_like=True):
    """The sum, the count and the sum of squares of numbers."""

    squares: float = 0.0

    def add(self, value: float) -> None:
        self.total += value
        self.count += 1
        self.squares += value * value

    def extend(self, values: Sequence[float]) -> None:
        self.total += sum(values)
        self.count += len(values)
        self.squares += sum([value * value for value in values])

    @property
    def variance(self) -> float:
        return max(0.0, self.squares / self.count - self.mean * self.mean) if self.count else 0.0


class Moments(msgspec.Struct, array_like=True):
    """Sums over pairs (x, y), minus each group's mean, from which the correlation within groups follows."""

    degrees: int = 0  # number of pairs minus number of groups
    xx: float = 0.0
    xy: float = 0.0
    yy: float = 0.0

    def add_group(self, xs: Sequence[float], ys: Sequence[float]) -> None:
        """Add a group of pairs. Groups with a constant x or y are skipped: they say nothing about the correlation."""
        x_mean, y_mean = mean(xs), mean(ys)
        xx = sum([(x - x_mean) * (x - x_mean) for x in xs])
        yy = sum([(y - y_mean) * (y - y_mean) for y in ys])
        if xx > 0 and yy > 0:
            self.degrees += len(xs) - 1
            self.xx += xx
            self.yy += yy
            self.xy += sum([(x - x_mean) * (y - y_mean) for x, y in zip(xs, ys, strict=True)])

    @property
    def correlation(self) -> float:
        scale = sqrt(self.xx * self.yy)
        return self.xy / scale if scale > 0 else 0.0

    @property
    def errors(self) -> float:
        """Return how many standard errors the correlation is away from 0, the value for independent pairs."""
        return self.correlation * sqrt(self.degrees)


SumsT = TypeVar("SumsT", Spread, Moments)


def total(parts: Iterable[SumsT], of: type[SumsT]) -> SumsT:
    """Add up sums, field by field."""
    return of(*map(sum, zip(*map(msgspec.structs.astuple, parts), strict=True)))


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def median(values: Sequence[float]) -> float:
    """Return the median, or 0 if there are no values."""
    return statistics.median(values) if values else 0.0


def noise(values: Sequence[float]) -> float:
    """Return the standard deviation around a slow trend, from the differences between neighbours (von Neumann 1941)."""
    return sqrt(mean([(b - a) * (b - a) for a, b in pairwise(values)]) / 2)


def change(before: Sequence[float], recent: Sequence[float]) -> float:
    """Return by how many standard errors the mean has changed. If there is no noise, any change is infinite.

    The noise of a few steps may be far too small by chance, so with fewer steps the noise counts more.
    """
    if not before or not recent:
        return 0.0
    difference = mean(recent) - mean(before)
    error = noise(before) * sqrt(1 / len(before) + 1 / len(recent)) * (1 + FEW / len(before))
    if error > 0:
        return difference / error
    return 0.0 if difference == 0 else inf if difference > 0 else -inf


def drift(before: Sequence[float], recent: Sequence[float]) -> float:
    """Return by how much the mean changes if the trend of the earlier values continues (least squares)."""
    middle, level = (len(before) - 1) / 2, mean(before)
    scale = sum((at - middle) ** 2 for at in range(len(before)))
    slope = sum((at - middle) * (value - level) for at, value in enumerate(before)) / scale if scale else 0.0
    return slope * (len(before) + len(recent)) / 2


def surprise(before: Sequence[float], recent: Sequence[float], noise_min: float = 0.0) -> float:
    """Return by how many standard errors the mean differs from where the earlier trend would have led.

    `noise_min` is the noise that a step's value has at least: a few earlier steps may be alike by chance.
    """
    count = len(before)
    if count < 3 or not recent:
        return 0.0
    scale = count * (count**2 - 1) / 12
    extrapolated = sqrt(1 / count + 1 / len(recent) + ((count + len(recent)) / 2) ** 2 / scale)
    error = max(noise(before), noise_min) * extrapolated
    difference = mean(recent) - mean(before) - drift(before, recent)
    return difference / error if error > 0 else 0.0


def rises(before: Sequence[float], recent: Sequence[float]) -> bool:
    """Return whether the mean has visibly risen, and has not fallen behind its earlier trend."""
    return change(before, recent) > VISIBLE and surprise(before, recent) > -VISIBLE / 2


def ratio(before: Sequence[float], recent: Sequence[float]) -> float:
    """Return the recent median divided by the earlier median, or 1 if there is nothing to compare."""
    base, now = median(before), median(recent)
    if base <= 0:
        return 1.0 if now <= 0 or not before else inf
    return now / base


def share_at_least(hits: float, of: float, errors: float = SHARE_CERTAIN) -> float:
    """Return a share that the true share exceeds almost certainly: the lower end of its interval (Wilson 1927)."""
    if of <= 0:
        return 0.0
    share, weight = min(1.0, max(0.0, hits / of)), errors**2 / of
    center = share + weight / 2
    return max(0.0, (center - errors * sqrt(share * (1 - share) / of + weight / of / 4)) / (1 + weight))
