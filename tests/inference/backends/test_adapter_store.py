"""Which adapters are loaded, and which go when there is no room."""

import pytest
import torch

from bombus.errors import Code, Refused
from bombus_inference.backends.adapter_store import AdapterStore
from bombus_inference.backends.torch.adapters.loaded import LoadedAdapter
from bombus_inference.backends.torch.adapters.own import LowRank

BYTES = 4 * (2 * 8 + 8 * 2)  # of an adapter of rank 2 on one layer of 8 by 8


def adapter(scale: float = 1.0) -> LoadedAdapter:
    return LoadedAdapter({"layer": LowRank(torch.zeros(2, 8), torch.zeros(8, 2))}, {"layer": scale})


def store_of(*addresses: str, room: int) -> AdapterStore[LoadedAdapter]:
    store = AdapterStore[LoadedAdapter](room * BYTES)
    for address in addresses:
        store.put(address, adapter())
    return store


def addresses(store: AdapterStore[LoadedAdapter]) -> list[str]:
    return [address for address, _ in store.items()]


def test_the_least_recently_used_goes_first() -> None:
    store = store_of("a", "b", "c", room=3)
    store.use("a")
    store.release("a")
    assert store.put("d", adapter()) == ["b"]
    assert addresses(store) == ["c", "a", "d"]
    assert (store.bytes, store.evictions) == (3 * BYTES, 1)


def test_one_that_is_there_already_is_not_added_again_and_counts_as_used() -> None:
    store = store_of("a", "b", room=2)
    assert store.put("a", adapter()) is None
    assert addresses(store) == ["b", "a"]
    assert store.bytes == 2 * BYTES


def test_one_in_use_is_passed_over() -> None:
    store = store_of("a", "b", room=2)
    store.use("a")
    assert store.put("c", adapter()) == ["b"]
    assert addresses(store) == ["a", "c"]


def test_when_all_are_in_use_another_is_refused_and_nothing_is_dropped() -> None:
    store = store_of("a", "b", room=2)
    store.use("b")
    store.use("b")
    store.use("a")
    with pytest.raises(Refused, match="try again later") as refused:
        store.put("c", adapter())
    assert refused.value.code == Code.OVERLOADED
    assert addresses(store) == ["b", "a"]
    store.release("b")
    with pytest.raises(Refused):
        store.put("c", adapter())
    store.release("b")
    assert store.put("c", adapter()) == ["b"]


def test_one_larger_than_all_the_room_is_refused_with_the_flag_that_makes_more() -> None:
    with pytest.raises(Refused, match="--adapters-mb") as refused:
        AdapterStore[LoadedAdapter](BYTES - 1).put("a", adapter())
    assert refused.value.code == Code.TOO_LARGE


def test_one_that_is_not_there_can_neither_be_used_nor_removed() -> None:
    store = store_of(room=1)
    for call in (store.use, store.remove):
        with pytest.raises(Refused, match="does not have adapter a") as refused:
            call("a")
        assert refused.value.code == Code.UNKNOWN_MODEL


def test_the_same_tensors_with_another_scale_are_refused() -> None:
    store = store_of("a", room=1)
    with pytest.raises(Refused, match=r"scale of 1 for layer, .* with a scale of 2"):
        store.put("a", adapter(scale=2.0))


def test_an_adapter_counts_the_bytes_of_its_tensors_and_its_greatest_rank() -> None:
    layers = {
        "one": LowRank(torch.zeros(2, 8), torch.zeros(8, 2)),
        "two": LowRank(torch.zeros(3, 8, dtype=torch.bfloat16), torch.zeros(4, 3, dtype=torch.bfloat16)),
    }
    made = LoadedAdapter(layers, dict.fromkeys(layers, 1.0))
    assert (made.bytes, made.rank) == (BYTES + 2 * (3 * 8 + 4 * 3), 3)
