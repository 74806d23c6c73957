"""Advantages over a whole batch. Advantages within a group are in `bombus.datums.advantages`."""

from math import sqrt

import numpy as np

from bombus.hive.rewards import differ
from bombus_trainer.data.sequences import Floats


def whitening(values_N: Floats) -> tuple[float, float]:
    """Return the mean of the values at a batch's trained tokens, and the factor by which to scale deviations from that
    mean.

    The factor is 1 / sqrt(variance + 1e-8), where the variance divides by n - 1: REINFORCE++, arXiv:2501.03262, as
    computed by verl's masked_whiten. With fewer than two tokens, or if all values are equal, the factor is 0.
    """
    if not len(values_N) or not differ((float(values_N.min()), float(values_N.max()))):
        return 0.0, 0.0
    values = values_N.astype(np.float64)
    return float(values.mean()), float(1.0 / sqrt(values.var(ddof=1) + 1e-8))
