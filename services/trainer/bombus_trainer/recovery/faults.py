"""Tell faults of the job, which stay, from faults of the moment, after which the same attempt may succeed.

A model that does not exist is a fault of the job; a full GPU, or a file system that is away, is one of the moment.
"""

import errno
import re

import torch
from torch import distributed

from bombus.errors import BusUnavailable
from bombus_trainer.publish.checkpoint import CheckpointLost

DOUBLINGS_MAX = 32
NO_ROOM = re.compile(rf"No space left on device|os error ({errno.ENOSPC}|{errno.EDQUOT})\b")  # also as Rust says it
OF_THE_MOMENT = (
    BusUnavailable,
    CheckpointLost,  # which the run began at, so it was there
    MemoryError,
    OSError,
    torch.AcceleratorError,
    torch.OutOfMemoryError,
    distributed.DistError,
)
OF_THE_JOB = (FileNotFoundError, NotADirectoryError, IsADirectoryError)  # OSErrors of a path that is wrong


def may_pass(error: BaseException, has_loaded: bool) -> bool:
    """Return whether what raised `error` may succeed later with the same job.

    `has_loaded` says that it did before: then the job is not at fault, whatever the error.
    """
    return has_loaded or any(
        isinstance(each, OF_THE_MOMENT) and not isinstance(each, OF_THE_JOB) for each in _with_causes(error)
    )


def lacks_room(error: BaseException) -> bool:
    """Return whether a disk has no room for what was to be written, or no inodes or quota: others may make some."""
    return any(
        (isinstance(each, OSError) and each.errno in (errno.ENOSPC, errno.EDQUOT)) or NO_ROOM.search(str(each))
        for each in _with_causes(error)
    )


def _with_causes(error: BaseException) -> list[BaseException]:
    """Return the error and what it was raised from, such as the `OSError` of an `EngineFault`."""
    found = [error]
    while (cause := found[-1].__cause__) is not None and cause not in found:
        found.append(cause)
    return found


def backoff(failures: int, first_s: float, most_s: float) -> float:
    """Return how long to wait after so many failures in a row: twice as long after each."""
    return min(first_s * 2.0 ** min(max(failures - 1, 0), DOUBLINGS_MAX), most_s)


class LoadPatience:
    """Says how long to wait before something that fails is tried again, until `limit_s` have passed since it first did.

    There is always a second attempt.
    """

    def __init__(self, first_s: float, most_s: float, limit_s: float) -> None:
        self.failures = 0
        self._first_s = first_s
        self._most_s = most_s
        self._limit_s = limit_s
        self._began_s = 0.0

    def pause(self, now_s: float) -> float | None:
        """Return how long to wait after one more failure, at `now_s`; None when there is no patience left."""
        self.failures += 1
        if self.failures == 1:
            self._began_s = now_s
        elif now_s - self._began_s >= self._limit_s:
            return None
        return backoff(self.failures, self._first_s, self._most_s)
