"""How much of what an adapter adds is left in the output of a layer in bfloat16."""

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from bombus_inference.backends.torch.adapters.own import AdaptedLinear, LowRank, set_adapter

WIDTH, RANK, TOKENS = 256, 8, 256
RELATIVE = 3e-4  # the norm of what is added, relative to the weight's: that of some steps at a learning rate of 1e-4


def share_that_is_left(out_TO: Tensor, without_TO: Tensor, wanted_TO: Tensor) -> float:
    """Return how far the output has moved in the direction in which it should, as a share of that move."""
    return float(((out_TO.double() - without_TO) * wanted_TO).sum() / (wanted_TO * wanted_TO).sum())


def test_what_an_adapter_adds_is_left_in_half_precision_where_a_merged_weight_and_a_second_sum_lose_it() -> None:
    random = torch.Generator().manual_seed(0)
    layer = nn.Linear(WIDTH, WIDTH, bias=False)
    layer.weight.data = (0.03 * torch.randn(WIDTH, WIDTH, generator=random)).bfloat16()
    weight = layer.weight.detach().double()
    low_a = torch.randn(RANK, WIDTH, generator=random)
    low_b = torch.randn(WIDTH, RANK, generator=random)
    low_b *= float(RELATIVE * weight.norm() / (low_b @ low_a).norm())
    added = low_b.double() @ low_a.double()
    x = torch.randn(TOKENS, WIDTH, generator=random).bfloat16()
    without, wanted = x.double() @ weight.T, x.double() @ added.T

    factors = LowRank(low_a.bfloat16(), low_b.bfloat16())
    merged = linear(x, (weight + added).bfloat16())
    summed = linear(x, weight.bfloat16()) + linear(linear(x, factors.low_a), factors.low_b)
    with torch.no_grad():
        adapted = AdaptedLinear(layer, factors)(x)
    assert share_that_is_left(merged, without, wanted) < 0.3
    assert share_that_is_left(summed, without, wanted) < 0.3
    assert 0.9 < share_that_is_left(adapted, without, wanted) < 1.1


def test_a_layer_that_the_next_adapter_leaves_out_is_plain_again() -> None:
    random = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    x = torch.randn(3, 8, generator=random)
    factors = LowRank(torch.randn(2, 8, generator=random), torch.randn(8, 2, generator=random))
    with torch.no_grad():
        without = model(x)
        set_adapter(model, {"0": factors, "1": factors})
        both = model(x)
        set_adapter(model, {"1": factors})
        assert type(model[0]) is nn.Linear
        assert not torch.allclose(model(x), both)
        set_adapter(model, {})
        torch.testing.assert_close(model(x), without)
    assert all(type(layer) is nn.Linear and layer.weight.is_contiguous() for layer in model)
