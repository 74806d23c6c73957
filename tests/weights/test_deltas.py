"""Deltas restore every bit, whatever changed; a damaged delta, or one of another model, is refused."""

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from bombus.errors import EngineFault
from bombus.weights.deltas import TensorFile, apply_patch, patch_between

KINDS: tuple[type[np.unsignedinteger[Any]], ...] = (np.uint8, np.uint16, np.uint32, np.uint64)


@st.composite
def bits_before_and_after(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """Flat bits, and a copy with anything from none to all of them changed, close together or far apart."""
    kind = draw(st.sampled_from(KINDS))
    before = draw(hnp.arrays(kind, st.integers(0, 3000), elements=st.integers(0, np.iinfo(kind).max), fill=st.just(0)))
    after = before.copy()
    if len(after):
        where = draw(st.lists(st.integers(0, len(after) - 1), max_size=40))
        stretch = draw(st.sampled_from((1, 1, 2, 1000)))
        for at in where:
            after[at : at + stretch] ^= kind(draw(st.integers(0, np.iinfo(kind).max)))
    return before, after


@settings(deadline=None)
@given(bits_before_and_after())
def test_a_patch_turns_the_base_into_the_new_bits(pair: tuple[np.ndarray, np.ndarray]) -> None:
    before, after = pair
    patch = patch_between(before, after)
    if patch is None:
        assert np.array_equal(before, after)
        return
    assert patch.bytes <= after.nbytes
    made = before.copy()
    apply_patch(patch, made)
    assert np.array_equal(made, after)


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 400_000), st.integers(1, 400_000))
def test_gaps_between_distant_elements_are_bridged(first: int, second: int) -> None:
    before = np.zeros(first + second, dtype=np.uint16)
    after = before.copy()
    after[first - 1] = 1
    after[-1] = 2
    patch = patch_between(before, after)
    assert patch is not None
    made = before.copy()
    apply_patch(patch, made)
    assert np.array_equal(made, after)


def test_one_element_in_a_hundred_costs_three_bytes_and_one_in_ten_thousand_four() -> None:
    """In bfloat16: two for the value, and one or two for its distance from the one before."""
    before = np.zeros(1_000_000, dtype=np.uint16)
    for every, bytes_of_one in ((100, 3), (10_000, 4)):
        after = before.copy()
        after[every - 1 :: every] = 1
        patch = patch_between(before, after)
        assert patch is not None
        assert patch.bytes == 1_000_000 // every * bytes_of_one


def test_when_most_elements_have_changed_the_whole_tensor_is_stored() -> None:
    before = np.zeros(100, dtype=np.uint16)
    after = np.arange(1, 101, dtype=np.uint16)
    patch = patch_between(before, after)
    assert patch is not None
    assert patch.gaps is None
    assert patch.bytes == after.nbytes


def test_a_negative_zero_and_another_nan_are_changes() -> None:
    before = torch.tensor([0.0, float("nan"), 1.0, float("inf")], dtype=torch.bfloat16).view(torch.int16).numpy()
    after = before.copy()
    after[0] = np.int16(-0x8000)  # -0.0, which equals 0.0
    after[1] = after[1] | np.int16(1)  # NaN, which equals nothing
    patch = patch_between(before.view(np.uint16), after.view(np.uint16))
    assert patch is not None
    made = before.view(np.uint16).copy()
    apply_patch(patch, made)
    assert made.tobytes() == after.tobytes()


def test_a_patch_of_another_tensor_is_refused_and_changes_nothing() -> None:
    after = np.zeros(1000, dtype=np.uint16)
    after[999] = 1
    patch = patch_between(np.zeros(1000, dtype=np.uint16), after)
    assert patch is not None
    for other in (np.zeros(999, dtype=np.uint16), np.zeros(1000, dtype=np.uint32)):
        with pytest.raises(EngineFault, match="does not fit"):
            apply_patch(patch, other)
        assert not other.any()


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "no header"),
        (struct.pack("<Q", 1 << 60), "no header"),
        (struct.pack("<Q", 2) + b"[]", "not a safetensors file"),
        (struct.pack("<Q", 4) + b"nope", "not a safetensors file"),
    ],
)
def test_a_file_that_is_not_safetensors_is_refused(tmp_path: Path, content: bytes, why: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(EngineFault, match=why):
        TensorFile(path)


def test_a_tensor_whose_size_does_not_match_its_shape_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    text = json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(4))
    with pytest.raises(EngineFault, match=r"w is F32 \[2\] in 4 bytes"):
        TensorFile(path)


@pytest.mark.parametrize(
    "head", [b'{"a\xff": 1}', b'{"a": ' + b"[" * 5000, b'{"__metadata__": {"a": "\xff"}}', b"[]", b""]
)
def test_a_head_of_any_bytes_is_not_a_safetensors_file(tmp_path: Path, head: bytes) -> None:
    file = tmp_path / "x.safetensors"
    file.write_bytes(struct.pack("<Q", len(head)) + head)
    with pytest.raises(EngineFault, match="is not a safetensors file"):
        TensorFile(file)
