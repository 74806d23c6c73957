"""The weights that adapters apply to: those that the engine had when the run began, kept when the engine loads
others."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from bombus.errors import Code, EngineFault, Refused, in_one_line


class AdapterBase:
    """The model tensors that adapters apply to.

    These are the engine's own tensors until the engine's weights change. If an adapter has been loaded by then, this
    object keeps copies of the tensors that change. The copies are kept until the run ends, and take as much memory as
    the tensors.
    """

    def __init__(self, tensors: Callable[[], Mapping[str, Tensor]], version: int, *, is_base: bool) -> None:
        self._tensors = tensors  # returns the model's tensors by name
        self._kept: dict[str, Tensor] = {}
        self._wanted = False
        self._gone = "" if is_base else f"version {version}, which it started with"

    @property
    def is_apart(self) -> bool:
        """Whether the engine's own tensors differ from the base."""
        return bool(self._kept)

    def want(self) -> None:
        """Keep the base from now on. Raises `Refused` if this engine never had the base or no longer has it."""
        if self._gone:
            why = (
                f"this replica has no base for adapters: its own weights are {self._gone}. Load adapters into "
                "an engine that serves the model that they were trained on, before it serves other weights"
            )
            raise Refused(Code.UNSUPPORTED, why)
        self._wanted = True

    @torch.no_grad()
    def before_change(self, version: int, changed: Mapping[str, object] | None) -> None:
        """Keep the values of the tensors that a change of the engine's own weights is about to overwrite.

        If `changed` is None, all tensors change, and parameters are replaced rather than written in place. Raises
        `EngineFault`, having kept nothing, if there is not enough memory.
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
        except (MemoryError, RuntimeError) as error:  # torch has no error type for CPU memory
            raise EngineFault(
                f"version {version} cannot be loaded alongside the weights that adapters apply to: "
                f"{in_one_line(error)}; start the replica with a smaller KV cache, or use another engine for adapters"
            ) from error
        self._kept = kept

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Put the base's tensors into the model, and put the engine's own tensors back after the block."""
        if not self._kept:
            yield
            return
        tensors = self._tensors()
        own = {name: _exchange(tensors[name], kept) for name, kept in self._kept.items()}
        try:
            yield
        finally:
            # During the block, a half-precision layer may have moved the base's weight into another matrix.
            self._kept = {name: _exchange(tensors[name], tensor) for name, tensor in own.items()}


@torch.no_grad()
def _exchange(tensor: Tensor, values: Tensor) -> Tensor:
    """Set a model tensor to `values`, and return its previous values."""
    if isinstance(tensor, nn.Parameter):
        had, tensor.data = tensor.data, values
        return had
    had = tensor.clone()  # buffers are overwritten in place
    tensor.copy_(values)
    return had
