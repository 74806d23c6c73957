"""Keeps track of which adapters are loaded, how much room they take, and which to drop. Pure accounting."""

from collections import OrderedDict
from collections.abc import Mapping
from typing import Generic, Protocol, TypeVar

from bombus.errors import Code, Refused


class AdapterEntry(Protocol):
    """What `AdapterStore` knows about an adapter. `uses` is the number of open requests that use it."""

    uses: int

    @property
    def scales(self) -> Mapping[str, float]: ...

    @property
    def bytes(self) -> int: ...


E = TypeVar("E", bound=AdapterEntry)


class AdapterStore(Generic[E]):
    """Adapters by address, up to `bytes_max` in total. To make room, the least recently used idle adapters are
    dropped."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.bytes = 0
        self.evictions = 0
        self._loaded: OrderedDict[str, E] = OrderedDict()  # least recently used first

    def __len__(self) -> int:
        return len(self._loaded)

    def items(self) -> list[tuple[str, E]]:
        """Return the addresses and adapters, least recently used first."""
        return list(self._loaded.items())

    def find(self, address: str) -> E | None:
        return self._loaded.get(address)

    def put(self, address: str, adapter: E) -> list[str] | None:
        """Add an adapter. Return the addresses of the adapters that were dropped to make room, or None if it was
        already loaded.

        Raises `Refused`, having changed nothing, if there is no room, or if the same tensors are loaded with a
        different scale.
        """
        present = self._loaded.get(address)
        if present is not None:
            if present.scales != adapter.scales:
                layer, scale = next(each for each in adapter.scales.items() if present.scales.get(each[0]) != each[1])
                why = (
                    f"adapter {address} is loaded with a scale of {present.scales[layer]:g} for {layer}, but this "
                    f"folder has the same tensors with a scale of {scale:g}: write the configuration into the metadata "
                    "of the file, so that the two adapters get different addresses"
                )
                raise Refused(Code.MALFORMED, why)
            self._loaded.move_to_end(address)
            return None
        dropped = self._to_drop(adapter.bytes)
        for each in dropped:
            self.remove(each)
            self.evictions += 1
        self._loaded[address] = adapter
        self.bytes += adapter.bytes
        return dropped

    def use(self, address: str) -> None:
        """Count one more request that uses an adapter, so that the adapter stays loaded. Raises `Refused` if it is not
        loaded."""
        adapter = self._loaded.get(address)
        if adapter is None:
            raise Refused(Code.UNKNOWN_MODEL, f"this replica does not have adapter {address[:80]}: load it first")
        adapter.uses += 1
        self._loaded.move_to_end(address)

    def release(self, address: str) -> None:
        """Count one fewer request that uses an adapter."""
        self._loaded[address].uses -= 1

    def remove(self, address: str) -> None:
        """Forget an adapter. Raises `Refused` while a request uses it, or if it is not loaded."""
        adapter = self._loaded.get(address)
        if adapter is None:
            raise Refused(Code.UNKNOWN_MODEL, f"this replica does not have adapter {address}")
        if adapter.uses:
            raise Refused(
                Code.OVERLOADED, f"{adapter.uses} requests use adapter {address}: unload it when they have ended"
            )
        del self._loaded[address]
        self.bytes -= adapter.bytes

    def _to_drop(self, wanted: int) -> list[str]:
        """Return the adapters to drop to make room for `wanted` bytes. Raises `Refused` if not enough can be
        dropped."""
        if wanted > self.bytes_max:
            raise Refused(
                Code.TOO_LARGE,
                f"the adapter takes {wanted} bytes, but all adapters of this replica together may take only "
                f"{self.bytes_max}: start the replica with a larger --adapters-mb",
            )
        dropped: list[str] = []
        left = self.bytes
        for address, adapter in self._loaded.items():
            if left + wanted <= self.bytes_max:
                break
            if not adapter.uses:
                dropped.append(address)
                left -= adapter.bytes
        if left + wanted > self.bytes_max:
            raise Refused(
                Code.OVERLOADED,
                f"requests use {left} of the {self.bytes_max} bytes for adapters, and this adapter takes {wanted}: try "
                "again later, or start the replica with a larger --adapters-mb",
            )
        return dropped
