"""A copy of a policy version in host memory, for comparison with the next version and for writing full copies."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from bombus.weights.deltas import UNSIGNED, Bits, Patch, patch_between
from bombus_trainer.publish.tensorfile import bytes_of


class Changes:
    """Patches of tensors, collected until they exceed `bytes_max`. Then all of them are dropped, since a full copy is
    better."""

    def __init__(self, bytes_max: int) -> None:
        self.patches: dict[str, Patch] = {}
        self.bytes = 0
        self._bytes_max = bytes_max

    @property
    def too_many(self) -> bool:
        return self.bytes > self._bytes_max

    def note(self, name: str, before: Tensor, after: Tensor) -> None:
        if self.too_many:
            return
        patch = patch_between(bits_of(before), bits_of(after))
        if patch is not None:
            self.patches[name] = patch
            self.bytes += patch.bytes
        if self.too_many:
            self.patches.clear()


class HostCopy:
    """A version's values; empty at first. `sha256` is the digest of its file, or "" while two versions are mixed."""

    def __init__(self) -> None:
        self.version = -1
        self.sha256 = ""
        self._values: dict[str, Tensor] = {}

    def follow(
        self, tensors: Iterable[tuple[str, Tensor]], changes: Changes | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Copy the tensors one by one, recording changes, and yield the copies. Call `settle` afterwards."""
        self.sha256 = ""
        for name, tensor in tensors:
            value = tensor.detach()
            held = self._values.get(name)
            if held is None or held.shape != value.shape or held.dtype != value.dtype:
                held = self._values[name] = torch.empty_like(value, device="cpu", memory_format=torch.contiguous_format)
            elif changes is not None:
                value = value.cpu()
                changes.note(name, held, value)
            held.copy_(value)
            yield name, held

    def settle(self, version: int, sha256: str) -> None:
        """Record which version has been copied, and its digest."""
        self.version, self.sha256 = version, sha256

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from self._values.items()


def bits_of(tensor: Tensor) -> Bits:
    """Return a tensor's elements, flattened, as unsigned integers of the same width."""
    return bytes_of(tensor).numpy().view(UNSIGNED[tensor.dtype.itemsize])
