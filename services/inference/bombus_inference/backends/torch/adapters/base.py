"""The weights that adapters are on: the engine's own as the run began, kept when the engine loads others."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from bombus.errors import Code, EngineFault, Refused, in_one_line


class AdapterBase:
    """The tensors of the model that adapters are on.

    They are the engine's own until those change. If any adapter has been loaded by then, a copy of what changes stays
    here until the run ends, which takes as much memory as the engine's own tensors that change.
    """

    def __init__(self, tensors: Callable[[], Mapping[str, Tensor]], version: int, *, is_base: bool) -> None:
        self._tensors = tensors  # those of the model, by name
        self._kept: dict[str, Tensor] = {}
        self._wanted = False
        self._gone = "" if is_base else f"version {version}, with which it began"

    @property
    def is_apart(self) -> bool:
        """Whether the engine's own tensors have changed since."""
        return bool(self._kept)

    def want(self) -> None:
        """Keep the base from now on. Raises `Refused` when this engine does not have it, or no longer."""
        if self._gone:
            why = (
                f"this replica has no base for adapters: its own weights are those of {self._gone}. Load adapters into "
                "an engine that serves the model that they were trained on, before it serves other weights"
            )
            raise Refused(Code.UNSUPPORTED, why)
        self._wanted = True

    @torch.no_grad()
    def before_change(self, version: int, changed: Mapping[str, object] | None) -> None:
        """Keep what the engine's own change of weights is about to overwrite: the values of these tensors.

        None stands for all, whose parameters are about to be replaced by others and not written to. Raises
        `EngineFault`, having kept nothing, when there is no memory for it.
        """
        if self._gone or (changed is not None and not changed):
            return
        if not self._wanted:
            self._gone = f"version {version}, and no adapter was loaded before that"
            return
        kept = dict(self._kept)
        try:
            for name, tensor in self._tensors().items():
                if name in kept or (changed is not None and name not in changed):
                    continue
                replaced = changed is None and isinstance(tensor, nn.Parameter)
                kept[name] = tensor.data if replaced else tensor.detach().clone()
        except (MemoryError, RuntimeError) as error:  # torch has no error of its own for a CPU's memory
            raise EngineFault(
                f"version {version} cannot be loaded alongside the weights that adapters are on: {in_one_line(error)}; "
                "start the replica with less for keys and values, or give adapters their own engine"
            ) from error
        self._kept = kept

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Have the base's tensors in the model, and after the block the engine's own again."""
        if not self._kept:
            yield
            return
        tensors = self._tensors()
        own = {name: _exchange(tensors[name], kept) for name, kept in self._kept.items()}
        try:
            yield
        finally:
            # A layer in half precision may have put the base's weight into a matrix of its own meanwhile.
            self._kept = {name: _exchange(tensors[name], tensor) for name, tensor in own.items()}


@torch.no_grad()
def _exchange(tensor: Tensor, values: Tensor) -> Tensor:
    """Give a tensor of the model these values, and return those that it had."""
    if isinstance(tensor, nn.Parameter):
        had, tensor.data = tensor.data, values
        return had
    had = tensor.clone()  # a buffer cannot be exchanged by its name
    tensor.copy_(values)
    return had
