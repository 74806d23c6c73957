"""The adapters that an engine serves beside its own policy, and the passes that compute with them."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from torch import Tensor
from transformers import PreTrainedModel

from bombus.weights.models import persistent_buffers
from bombus_inference.backends.adapter_store import AdapterStore
from bombus_inference.backends.torch.adapters.base import AdapterBase
from bombus_inference.backends.torch.adapters.fitting import adaptable_layers, check_fits
from bombus_inference.backends.torch.adapters.layers import AdapterColumns
from bombus_inference.backends.torch.adapters.loaded import LoadedAdapter
from bombus_inference.backends.torch.adapters.own import AdaptedLinear, LowRank, set_adapter

BASE_VERSION = 0  # version of the weights that adapters apply to: the model that the run began with


class ServedAdapters:
    """The adapters of one engine, whose model begins with the weights of `version`."""

    def __init__(self, model: PreTrainedModel, bytes_max: int, version: int) -> None:
        self.store = AdapterStore[LoadedAdapter](bytes_max)
        self._model = model
        self._columns = AdapterColumns(model)
        self._adaptable: dict[str, tuple[int, int]] | None = None  # found when the first adapter is added
        self._own = any(isinstance(layer, AdaptedLinear) for layer in model.modules())
        # If the engine's own policy is an adapter, the model under it is version 0 in every version.
        self._base = AdapterBase(lambda: tensors_of(model), version, is_base=version == BASE_VERSION or self._own)

    @property
    def apart(self) -> bool:
        """Whether sequences with adapters need separate passes, since the engine's own policy is a different model."""
        return self._own or self._base.is_apart

    def add(self, address: str, adapter: LoadedAdapter) -> list[str] | None:
        """Load an adapter. Return the addresses of the adapters that were dropped to make room, or None if it was
        already loaded.

        Raises `Refused` if the adapter cannot be served.
        """
        if self._adaptable is None:
            self._adaptable = adaptable_layers(self._model)
        check_fits(adapter.layers, self._adaptable)
        self._base.want()
        dropped = self.store.put(address, adapter)
        for each in dropped or ():
            self._columns.forget(each)
        return dropped

    def remove(self, address: str) -> None:
        """Unload an adapter. Raises `Refused` while requests use it."""
        self.store.remove(address)
        self._columns.forget(address)

    @contextmanager
    def computing(self, addresses: Sequence[str], tokens: Sequence[int]) -> Iterator[None]:
        """Make the pass that is computed in the block use adapters: `addresses[i]`, or no adapter if it is "", applies
        to the next `tokens[i]` rows."""
        with self._base.in_place():
            self._columns.place(self._found(addresses))
            self._columns.use_rows(addresses, tokens)
            try:
                yield
            finally:
                self._columns.use_rows((), ())

    def keep_rows(self, index: Tensor | slice) -> None:
        self._columns.keep_rows(index)

    def detach(self) -> None:
        """Restore the model's own layers. Call this before the layers' weights are read or changed."""
        self._columns.detach()

    def before_change(self, version: int, changed: Mapping[str, object] | None) -> None:
        """Keep the weights that adapters need. Call this before the tensors in `changed` change, or all tensors if it
        is None.

        Raises `EngineFault` if there is not enough memory.
        """
        self._base.before_change(version, changed)

    def set_own(self, adapter: Mapping[str, LowRank]) -> None:
        """Set the adapter of the engine's own policy; an empty one removes it."""
        set_adapter(self._model, adapter)
        self._own = bool(adapter)

    def _found(self, addresses: Iterable[str]) -> dict[str, LoadedAdapter]:
        return {address: adapter for address in addresses if address and (adapter := self.store.find(address))}


def tensors_of(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return all tensors that a new version's weights replace: parameters and persistent buffers."""
    return dict(model.named_parameters()) | persistent_buffers(model)
