"""FLOPs against numbers worked out by hand, and against torch's own count."""

from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from bombus.weights.models import load_model
from bombus_trainer.backends.torch.flops import Cost, attention_pairs, cost_of, flops_of_step, peak_flops, peak_of
from bombus_trainer.data.packing import Segment
from tests.trainer.small_batches import VOCAB, tiny_model_folder


def test_a_step_by_hand() -> None:
    """The step has 10 matrix elements, 6 of the head, 2 of attention; 3 rows, 1 with logits, 6 pairs."""
    cost = Cost(matrices=10, head=6, attention=2, trained=True)
    # forward: 2 x (10 x 3 + 6 x 1) = 72, and 4 x 2 x 6 = 48
    assert flops_of_step(cost, tokens=3, heads=1, pairs=6, backward=False) == 72 + 48
    assert flops_of_step(cost, tokens=3, heads=1, pairs=6) == 3 * 72 + 3 * 48
    frozen = Cost(matrices=10, head=6, attention=2, trained=False)
    assert flops_of_step(frozen, tokens=3, heads=1, pairs=6) == 2 * 72 + 3 * 48


def test_pairs_of_a_trunk_with_two_branches() -> None:
    """3 tokens attend to 1 + 2 + 3; two more after them to 4 + 5, and another one to 4."""
    segments = [Segment(0, 3, 0, -1), Segment(3, 2, 3, 0), Segment(5, 1, 3, 0)]
    assert attention_pairs(segments) == 6 + 9 + 4


def test_a_models_cost_is_that_of_its_layers(tmp_path: Path) -> None:
    model = load_model(tiny_model_folder(tmp_path))
    # Two layers: q 32 x 32, k and v 16 x 32, o 32 x 32, three of 64 x 32.
    assert cost_of(model, trained=True) == Cost(
        matrices=2 * (2 * 32 * 32 + 2 * 16 * 32 + 3 * 64 * 32), head=VOCAB * 32, attention=2 * 32, trained=True
    )


def test_torch_counts_the_same_but_for_the_half_of_attention_that_is_masked(tmp_path: Path) -> None:
    model = load_model(tiny_model_folder(tmp_path), attn="eager")
    tokens = 24
    with FlopCounterMode(display=False) as counter:
        model(input_ids=torch.arange(tokens)[None], use_cache=False).logits.sum().backward()
    found = flops_of_step(cost_of(model, trained=True), tokens, tokens, pairs=tokens * tokens)
    # The first layer's input needs no gradient, and rotary positions multiply a little.
    assert counter.get_total_flops() == pytest.approx(found, rel=0.03)


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H20", 148e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A10", 125e12),
        ("NVIDIA A10G", 70e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA L40", 181e12),
        ("NVIDIA L40S", 362e12),
        ("Somebody's FPGA", None),
    ],
)
def test_peaks_are_found_by_the_names_that_cuda_gives(name: str, peak: float | None) -> None:
    assert peak_flops(name) == peak


def test_the_peak_of_a_cpu_is_unknown() -> None:
    assert peak_of(torch.device("cpu")) is None
