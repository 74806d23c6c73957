"""What ranks find that attend to parts of a row each: outputs and gradients, beside those of the whole row."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bombus_trainer.backends.torch.attention import tree_attention
from bombus_trainer.backends.verl.ulysses import joined, split_row, ulysses_attention
from bombus_trainer.ranks import Ranks
from tests.verl.processes import on_ranks

LENGTHS = (5, 1, 17, 6)  # 29 tokens, and one of padding for two ranks
TOKENS, HEADS, WIDE = sum(LENGTHS), 4, 6


@dataclass(frozen=True)
class Case:
    key_heads: int = 2
    value_width: int = WIDE
    window: int | None = None
    sinks: bool = False
    in_full: bool = False


CASES = {
    "plain": Case(),
    "a head of keys for all ranks": Case(key_heads=1),
    "wider values": Case(key_heads=4, value_width=9),
    "a window": Case(window=4),
    "sinks": Case(sinks=True),
    "all scores in memory": Case(in_full=True),
}


def compute(folder: Path, ranks: Ranks) -> dict[str, object]:
    """Return how far the parts are from the whole: outputs, and gradients of queries, keys, values and sinks."""
    return {name: apart(case, ranks) for name, case in CASES.items()} | {"joined": of_joined(ranks)}


def apart(case: Case, ranks: Ranks) -> list[float]:
    group = dist.group.WORLD
    assert group is not None
    random = torch.Generator().manual_seed(0)
    shapes = [(HEADS, WIDE), (case.key_heads, WIDE), (case.key_heads, case.value_width)]
    row = split_row(LENGTHS, group, torch.device("cpu"), case.in_full)
    whole = [torch.randn(1, heads, row.tokens, width, generator=random) for heads, width in shapes]
    parts = [side[:, :, row.start : row.end].clone() for side in whole]
    sinks = [torch.randn(HEADS, generator=random)] if case.sinks else []
    pull = torch.randn(1, row.tokens, HEADS, case.value_width, generator=random)
    pull[:, TOKENS:] = 0.0
    options: dict[str, Any] = {"sliding_window": case.window}

    def attended(sides: list[Tensor], of_parts: bool) -> tuple[Tensor, list[Tensor]]:
        leaves = [side.requires_grad_() for side in sides] + [each.clone().requires_grad_() for each in sinks]
        query, key, value, *of_sinks = leaves
        given = options | ({"s_aux": of_sinks[0]} if of_sinks else {})
        layer = nn.Identity()
        if of_parts:
            out, _ = ulysses_attention(layer, query, key, value, None, row=row, **given)
            return out, list(torch.autograd.grad((out * pull[:, row.start : row.end]).sum(), leaves))
        out, _ = tree_attention(layer, query, key, value, None, tree=row.attention, **given)
        return out, list(torch.autograd.grad((out * pull).sum(), leaves))

    ours, gradients = attended(parts, of_parts=True)
    theirs, wanted = attended(whole, of_parts=False)
    found = [float((ours - theirs[:, row.start : row.end]).abs().max())]
    found += [
        float((mine - alone[:, :, row.start : row.end]).abs().max())
        for mine, alone in zip(gradients[:3], wanted[:3], strict=True)
    ]
    for mine, alone in zip(gradients[3:], wanted[3:], strict=True):
        dist.all_reduce(mine)  # each rank has the gradients of its own heads' sinks
        found.append(float((mine - alone).abs().max()))
    return [max(each) for each in zip(*ranks.gather(found), strict=True)]


def of_joined(ranks: Ranks) -> list[list[float]]:
    """Return what two ranks make of their terms, and the gradient of the second: it has three of five."""
    group = dist.group.WORLD
    assert group is not None
    mine = torch.tensor([[1.0, 2.0]] if ranks.leads else [[3.0, 4.0, 5.0]], requires_grad=True)
    whole = joined(mine, 0 if ranks.leads else 2, 5, group)
    (grad,) = torch.autograd.grad((whole * torch.arange(1.0, 6.0)).sum(), [mine])
    return [whole[0].tolist(), ranks.gather(grad[0].tolist())[1]]


if __name__ == "__main__":
    on_ranks(compute)
