"""The weights that adapters are on, when the engine's own go on to others."""

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn

from bombus.errors import Refused
from bombus_inference.backends.torch.adapters.base import AdapterBase


class Model(nn.Module):
    """A weight and a buffer that belongs to the weights of a version."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0, 2.0]), requires_grad=False)
        self.other = nn.Parameter(torch.tensor([3.0]), requires_grad=False)
        self.register_buffer("bias", torch.tensor([4.0]))

    def tensors(self) -> Mapping[str, Tensor]:
        return {"weight": self.weight, "other": self.other, "bias": self.get_buffer("bias").detach()}

    def values(self) -> list[float]:
        return [*self.weight.tolist(), *self.other.tolist(), *self.get_buffer("bias").tolist()]


def base_of(model: Model) -> AdapterBase:
    return AdapterBase(model.tensors, 0, is_base=True)


def replaced(model: Model, base: AdapterBase, version: int) -> None:
    """Give the model other weights, as a whole version does."""
    base.before_change(version, None)
    model.weight.data = torch.tensor([10.0 * version, 20.0 * version])
    model.other.data = torch.tensor([30.0 * version])
    model.get_buffer("bias").copy_(torch.tensor([40.0 * version]))


def patched(model: Model, base: AdapterBase, version: int) -> None:
    """Write one element, as a delta does."""
    base.before_change(version, {"weight": None})
    model.weight.data[1] = 20.0 * version


def test_the_base_is_in_place_within_the_block_and_the_own_weights_are_after_it_whatever_changed_them() -> None:
    model = Model()
    base = base_of(model)
    base.want()
    assert not base.is_apart
    patched(model, base, 1)
    for own in ([1.0, 20.0, 3.0, 4.0], [20.0, 40.0, 60.0, 80.0], [20.0, 60.0, 60.0, 80.0]):
        assert base.is_apart
        assert model.values() == own
        with base.in_place():
            assert model.values() == [1.0, 2.0, 3.0, 4.0]
        assert model.values() == own
        if own[2] == 3.0:
            replaced(model, base, 2)
        elif own[1] == 40.0:
            patched(model, base, 3)


def test_the_own_weights_come_back_when_the_block_fails() -> None:
    model = Model()
    base = base_of(model)
    base.want()
    replaced(model, base, 1)
    with pytest.raises(ZeroDivisionError), base.in_place():
        raise ZeroDivisionError
    assert model.values() == [10.0, 20.0, 30.0, 40.0]


def test_nothing_is_kept_when_no_adapter_was_loaded_and_later_ones_are_refused() -> None:
    model = Model()
    base = base_of(model)
    replaced(model, base, 1)
    assert not base.is_apart
    with pytest.raises(Refused, match="version 1, and no adapter was loaded before that"):
        base.want()


def test_a_change_of_no_tensor_leaves_the_base_as_it_is() -> None:
    model = Model()
    base = base_of(model)
    base.before_change(1, {})
    base.want()
    assert not base.is_apart
