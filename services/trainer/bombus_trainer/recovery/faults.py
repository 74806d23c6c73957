"""Distinguishes permanent faults of the job from transient faults, after which the same attempt may succeed.

A model that does not exist is a fault of the job; a full GPU, or an unavailable file system, is a transient fault.
"""

import errno
import re

import torch
from torch import distributed

from bombus.errors import BusUnavailable
from bombus.weights.checkpoints import CheckpointLost

DOUBLINGS_MAX = 32
NO_ROOM = re.compile(rf"No space left on device|os error ({errno.ENOSPC}|{errno.EDQUOT})\b")  # including Rust's wording
OF_THE_MOMENT = (
    BusUnavailable,
    CheckpointLost,  # transient, because the run depends on it, so it existed before
    MemoryError,
    OSError,
    torch.AcceleratorError,
    torch.OutOfMemoryError,
    distributed.DistError,
)
OF_THE_JOB = (FileNotFoundError, NotADirectoryError, IsADirectoryError)  # OSErrors that mean a wrong path


def may_pass(error: BaseException, has_loaded: bool) -> bool:
    """Return whether the work that raised `error` may succeed later with the same job.

    `has_loaded` means that the job has loaded before, and so is not at fault, whatever the error is.
    """
    return has_loaded or any(
        isinstance(each, OF_THE_MOMENT) and not isinstance(each, OF_THE_JOB) for each in _with_causes(error)
    )


def lacks_room(error: BaseException) -> bool:
    """Return whether a write failed for lack of disk space, inodes or quota, which an operator may free."""
    return any(
        (isinstance(each, OSError) and each.errno in (errno.ENOSPC, errno.EDQUOT)) or NO_ROOM.search(str(each))
        for each in _with_causes(error)
    )


def _with_causes(error: BaseException) -> list[BaseException]:
    """Return the error and its chain of causes, such as the `OSError` behind an `EngineFault`."""
    found = [error]
    while (cause := found[-1].__cause__) is not None and cause not in found:
        found.append(cause)
    return found


def backoff(failures: int, first_s: float, most_s: float) -> float:
    """Return how long to wait after `failures` failures in a row: `first_s`, doubled for each failure after the first,
    but at most `most_s`."""
    return min(first_s * 2.0 ** min(max(failures - 1, 0), DOUBLINGS_MAX), most_s)


class LoadPatience:
    """Decides how long to wait before a failed load is retried, until `limit_s` after its first failure.

    There is always a second attempt.
    """

    def __init__(self, first_s: float, most_s: float, limit_s: float) -> None:
        self.failures = 0
        self._first_s = first_s
        self._most_s = most_s
        self._limit_s = limit_s
        self._began_s = 0.0

    def pause(self, now_s: float) -> float | None:
        """Return how long to wait after a further failure at `now_s`, or None if `limit_s` has passed."""
        self.failures += 1
        if self.failures == 1:
            self._began_s = now_s
        elif now_s - self._began_s >= self._limit_s:
            return None
        return backoff(self.failures, self._first_s, self._most_s)
