"""The share of what a LoRA adapter adds to a bfloat16 layer that is in its output: merged, added, or in one product."""

import argparse

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from bombus_inference.backends.torch.adapters.own import AdaptedLinear, LowRank

SIZES = (3e-4, 1e-3, 3e-3, 1e-2)  # the norm of the change, relative to the weight's


def shares(width: int, rank: int, tokens: int, size: float, random: torch.Generator) -> list[float]:
    """Return how far the output moves in the direction in which it should, as a share of that move."""
    layer = nn.Linear(width, width, bias=False)
    layer.weight.data = (0.03 * torch.randn(width, width, generator=random)).bfloat16()
    weight = layer.weight.detach().double()
    low_a, low_b = torch.randn(rank, width, generator=random), torch.randn(width, rank, generator=random)
    low_b *= float(size * weight.norm() / (low_b @ low_a).norm())
    added = low_b.double() @ low_a.double()
    x = torch.randn(tokens, width, generator=random).bfloat16()
    without, wanted = x.double() @ weight.T, x.double() @ added.T

    def share(out: Tensor) -> float:
        return float(((out.double() - without) * wanted).sum() / (wanted * wanted).sum())

    factors = LowRank(low_a.bfloat16(), low_b.bfloat16())
    summed = linear(x, weight.bfloat16()) + linear(linear(x, factors.low_a), factors.low_b)
    return [share(linear(x, (weight + added).bfloat16())), share(summed), share(AdaptedLinear(layer, factors)(x))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=576)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=256)
    arguments = parser.parse_args()
    random = torch.Generator().manual_seed(0)
    print("| size of the change | merged | added to the product | one product |\n|---|---|---|---|")
    with torch.no_grad():
        for size in SIZES:
            found = shares(arguments.width, arguments.rank, arguments.tokens, size, random)
            print(f"| {size} | {' | '.join(f'{share:.2f}' for share in found)} |")


if __name__ == "__main__":
    main()
