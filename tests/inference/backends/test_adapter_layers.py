"""Columns of adapters in the layers of a model: how many there are, and what each row gets."""

from copy import deepcopy

import torch
from torch import nn
from transformers import PreTrainedModel

from bombus_inference.backends.torch.adapters.layers import SPARE_COLUMNS, AdapterColumns, SideBySide
from tests.inference.backends.small_adapters import SCALE, loaded, random_adapter
from tests.inference.backends.small_engines import llama

Q_PROJ = "model.layers.0.self_attn.q_proj"


def layer_of(model: PreTrainedModel) -> nn.Linear:
    layer = model.get_submodule(Q_PROJ)
    assert isinstance(layer, nn.Linear)
    return layer


def test_each_row_gets_its_own_adapter_and_a_row_without_one_gets_exactly_the_layer() -> None:
    model = llama()
    weight = deepcopy(layer_of(model)).weight
    factors = {"a": random_adapter(model, 1, rank=3), "b": random_adapter(model, 2, rank=5)}
    columns = AdapterColumns(model)
    columns.place({address: loaded(each) for address, each in factors.items()})
    columns.use_rows(["a", "", "b"], [2, 1, 1])
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        out = layer_of(model)(x)
        for rows, address in ((slice(0, 2), "a"), (slice(3, 4), "b")):
            low_a, low_b = factors[address][Q_PROJ]
            torch.testing.assert_close(out[rows], x[rows] @ (weight + SCALE * low_b @ low_a).T)
        assert torch.equal(out[2], (x @ weight.T)[2])


def test_an_overflow_in_another_adapters_columns_does_not_reach_a_row() -> None:
    model = llama().bfloat16()
    huge, usual = random_adapter(model, 1), random_adapter(model, 2)
    huge[Q_PROJ] = (torch.full((4, 32), 3e38), torch.ones(32, 4))
    columns = AdapterColumns(model)
    columns.place({"huge": loaded(huge, torch.bfloat16), "usual": loaded(usual, torch.bfloat16)})
    columns.use_rows(["usual", "huge"], [1, 1])
    with torch.no_grad():
        out = layer_of(model)(torch.ones(2, 32, dtype=torch.bfloat16))
    assert out[0].isfinite().all()
    assert not out[1].isfinite().all()


def test_columns_of_adapters_that_are_not_needed_stay_while_they_are_few_and_go_when_they_are_many() -> None:
    model = llama()
    rank = SPARE_COLUMNS // 2
    adapters = {str(seed): loaded(random_adapter(model, seed, rank, ("q_proj",))) for seed in range(7)}
    columns = AdapterColumns(model)
    columns.place({"0": adapters["0"]})
    assert columns.columns == rank
    columns.place({"1": adapters["1"]})
    columns.place({"2": adapters["2"]})
    columns.place({"3": adapters["3"]})
    assert columns.columns == 3 * rank  # of 3, and of the two before it
    columns.place(adapters)
    assert columns.columns == 7 * rank
    columns.place({"6": adapters["6"]})
    assert columns.columns == 3 * rank  # seven are over twice what this pass may have


def test_a_layer_that_no_adapter_of_the_columns_changes_is_computed_as_it_is() -> None:
    model = llama()
    plain = deepcopy(layer_of(model))
    wide = {seed: loaded(random_adapter(model, seed, SPARE_COLUMNS, ("q_proj",))) for seed in (1, 2, 3)}
    columns = AdapterColumns(model)
    columns.place({str(seed): adapter for seed, adapter in wide.items()})
    columns.place({"other": loaded(random_adapter(model, 4, 1, ("v_proj",)))})
    columns.use_rows(["other"], [2])
    assert isinstance(layer_of(model), SideBySide)
    x = torch.randn(2, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(layer_of(model)(x), plain(x))


def test_when_the_last_adapter_goes_the_model_is_as_it_was() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        model = llama().to(dtype)
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        columns = AdapterColumns(model)
        columns.place({address: loaded(random_adapter(model, 1), dtype) for address in ("a", "b")})
        columns.forget("a")
        assert isinstance(layer_of(model), SideBySide)
        columns.forget("b")
        assert type(layer_of(model)) is nn.Linear
        assert columns.columns == 0
        after = model.state_dict()
        assert after.keys() == before.keys()
        assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
        assert all(tensor.is_contiguous() for tensor in model.parameters())
