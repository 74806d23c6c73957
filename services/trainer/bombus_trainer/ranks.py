"""Collective operations between the processes that train together.

Gradients use torch's default process group, NCCL on GPUs. Everything else uses a gloo group, on the CPU.
"""

import pickle
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from bombus_trainer.data.sequences import Floats

T = TypeVar("T")
LEADER = 0


class Ranks:
    """This process as rank `rank` of `size`. Every rank must make each call, which blocks until all ranks have made
    it."""

    def __init__(self, rank: int, size: int, group: dist.ProcessGroup | None) -> None:
        self.rank = rank
        self.size = size
        self._group = group

    @classmethod
    def alone(cls) -> "Ranks":
        return cls(LEADER, 1, None)

    @classmethod
    def of_group(cls, timeout: timedelta) -> "Ranks":
        """Return the ranks of torch's default process group, which must exist."""
        return cls(dist.get_rank(), dist.get_world_size(), dist.new_group(backend="gloo", timeout=timeout))

    @property
    def leads(self) -> bool:
        return self.rank == LEADER

    def share(self, value: T | None = None) -> T:
        """Return the leader's value on every rank."""
        if self._group is None:
            return cast(T, value)
        held = [value if self.leads else None]
        dist.broadcast_object_list(held, src=LEADER, group=self._group)
        return cast(T, held[0])

    def gather(self, value: T) -> list[T]:
        """Return every rank's value, by rank."""
        if self._group is None:
            return [value]
        held: list[T | None] = [None] * self.size
        dist.all_gather_object(held, value, group=self._group)
        return cast(list[T], held)

    def of_all(self, work: Callable[[], T]) -> list[T]:
        """Return the result of `work` on each rank, by rank. If it fails on any rank, its error is raised on all."""
        if self._group is None:
            return [work()]
        found = self.gather(_outcome(work))
        return [_value(each) for each in found]

    def by_leader(self, work: Callable[[], T]) -> T:
        """Run `work` only on the leader. Return its result, or raise its error, on every rank."""
        if self._group is None:
            return work()
        return _value(self.share(_outcome(work) if self.leads else None))

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        """Sum tensors over the ranks, in place. They may be on any device."""
        if self._group is not None:
            for done in [dist.all_reduce(tensor, async_op=True) for tensor in tensors]:
                done.wait()

    def total(self, values_N: Floats) -> Floats:
        """Sum an array [N] over the ranks, in place."""
        if self._group is not None:
            dist.all_reduce(torch.from_numpy(values_N), group=self._group)
        return values_N

    def agree(self, flag: bool) -> bool:
        """Return the leader's flag on every rank."""
        if self._group is None:
            return flag
        held = np.array([flag if self.leads else False], dtype=np.float32)
        return bool(self.total(held)[0] > 0)


def _outcome(work: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return work(), None
    except Exception as error:  # whatever it is, every rank must raise it
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:  # another library's error may not survive pickling
            return None, RuntimeError(f"{type(error).__name__}: {error}")
        return None, error


def _value(outcome: tuple[T | None, Exception | None]) -> T:
    value, error = outcome
    if error is not None:
        raise error
    return cast(T, value)
