"""The records of rollout groups."""

import math
import struct

import msgspec
import pytest

from bombus.errors import LogCorrupted
from bombus.hive.trajectories.records import (
    PackedCandidates,
    PackedFloats,
    RolloutGroup,
    decode_group,
    encode_group,
    int_rows,
    pack_ints,
    unpack_ints,
)

# Two sequences, of two tokens and of one.
GROUP = RolloutGroup(
    lengths=pack_ints([2, 1]),
    tokens=pack_ints([5, 6, 7]),
    masks=pack_ints([-100, 6, 7]),
    scores=PackedFloats.of([1.0, 0.1]),
    inference_logprobs=PackedFloats.of([1.0, -0.5, -0.25]),
    distill_token_ids=PackedCandidates(counts=pack_ints([0, 2, 1]), tokens=pack_ints([6, 9, 7])),
    distill_logprobs=PackedCandidates(counts=pack_ints([0, 2, 1]), logprobs=PackedFloats.of([-0.5, -1.5, -2.0])),
    messages=b'[[{"role":"user","content":"a"}],[]]',
    environment=3,
)


def test_a_group_is_read_back_as_it_was_written() -> None:
    assert decode_group(encode_group(GROUP)) == GROUP


def test_a_group_tells_its_size() -> None:
    assert (GROUP.sequences, GROUP.total_tokens, GROUP.longest) == (2, 3, 2)
    assert GROUP.sequence_lengths() == [2, 1]


def test_numbers_come_back_in_the_rows_of_their_sequences() -> None:
    lengths = GROUP.sequence_lengths()
    assert int_rows(GROUP.masks, lengths) == [[-100, 6], [7]]
    assert GROUP.inference_logprobs is not None
    assert GROUP.inference_logprobs.rows(lengths) == [[1.0, -0.5], [-0.25]]
    assert GROUP.distill_token_ids is not None
    assert GROUP.distill_token_ids.rows(lengths) == [[[], [6, 9]], [[7]]]
    assert GROUP.distill_logprobs is not None
    assert GROUP.distill_logprobs.rows(lengths) == [[[], [-0.5, -1.5]], [[-2.0]]]


@pytest.mark.parametrize(
    ("numbers", "bytes_each"),
    [
        ([1.0, -0.25, 0.0], 4),
        ([0.1], 8),  # no float32 is 0.1
        ([0.1, *[1.0] * 8], 8),  # only the first of nine is not
        ([1e300], 8),
        ([1e-46], 8),  # a float32 would be zero
        ([struct.unpack("<f", struct.pack("<f", 0.1))[0]], 4),
    ],
)
def test_a_number_takes_four_bytes_where_they_give_it_back(numbers: list[float], bytes_each: int) -> None:
    packed = PackedFloats.of(numbers)
    assert len(packed.data) == bytes_each * len(numbers)
    assert (len(packed), packed.rows([len(numbers)])) == (len(numbers), [numbers])


def test_the_sign_of_zero_is_kept() -> None:
    ((zero,),) = PackedFloats.of([-0.0]).rows([1])
    assert math.copysign(1.0, zero) == -1.0


def test_no_numbers_are_no_bytes() -> None:
    assert PackedFloats.of([]) == PackedFloats(b"")
    assert PackedFloats(b"").rows([0, 0]) == [[], []]
    assert int_rows(b"", [0]) == [[]]
    assert unpack_ints(b"") == []


ONE = {"lengths": pack_ints([1]), "tokens": pack_ints([5]), "masks": pack_ints([5]), "scores": PackedFloats.of([1.0])}
TWO_POSITIONS = PackedCandidates(counts=pack_ints([1, 0]), tokens=pack_ints([5]))


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"lengths": b"", "scores": PackedFloats(b"")}, "a group of 0 sequences has 0 scores"),
        ({"lengths": b"\1\0\0\0\0"}, "a group of 1 sequences"),
        ({"scores": PackedFloats.of([1.0, 2.0])}, "a group of 1 sequences has 2 scores"),
        ({"masks": b""}, "4 bytes of tokens and 0 of masks are not 1 each"),
        ({"ref_logprobs": PackedFloats(b"")}, "1 tokens have 0 logprobs"),
        ({"distill_token_ids": TWO_POSITIONS}, "1 tokens have candidates for 2 positions"),
    ],
)
def test_a_group_whose_parts_do_not_belong_together_cannot_be_made(fields: dict[str, object], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        RolloutGroup(**(ONE | fields))  # type: ignore[arg-type]  # what is wrong is the test


@pytest.mark.parametrize(("counts", "tokens"), [([2], [5]), ([-1, 1], [])])
def test_candidates_are_as_many_as_their_positions_have(counts: list[int], tokens: list[int]) -> None:
    with pytest.raises(ValueError, match="candidates do not match the counts of their positions"):
        PackedCandidates(counts=pack_ints(counts), tokens=pack_ints(tokens))


@pytest.mark.parametrize("body", [b"", b"\x80", encode_group(GROUP)[:-1], encode_group(GROUP).replace(b"v1", b"v9")])
def test_bytes_that_are_not_a_record_are_a_corrupted_log(body: bytes) -> None:
    with pytest.raises(LogCorrupted, match="not a rollout group"):
        decode_group(body)


def test_a_record_whose_parts_do_not_belong_together_is_a_corrupted_log() -> None:
    fields = {"kind": "group.v1", "lengths": pack_ints([1]), "tokens": b"", "masks": b"", "scores": [b"\0" * 4]}
    with pytest.raises(LogCorrupted, match="0 bytes of tokens and 0 of masks are not 1 each"):
        decode_group(msgspec.msgpack.encode(fields))


def test_a_record_of_this_version_stays_readable() -> None:
    """These bytes are on logs."""
    body = bytes.fromhex(
        "de000aa46b696e64a867726f75702e7631a76c656e67746873c4080200000001000000a6746f6b656e73c40c05000000"
        "0600000007000000a56d61736b73c40c9cffffff0600000007000000a673636f72657392c410000000000000f03f9a99"
        "99999999b93fc3b2696e666572656e63655f6c6f6770726f627392c40c0000803f000000bf000080bec2b16469737469"
        "6c6c5f746f6b656e5f69647382a6636f756e7473c40c000000000200000001000000a6746f6b656e73c40c0600000009"
        "00000007000000b064697374696c6c5f6c6f6770726f627382a6636f756e7473c40c000000000200000001000000a86c"
        "6f6770726f627392c40c000000bf0000c0bf000000c0c2a86d65737361676573c4245b5b7b22726f6c65223a22757365"
        "72222c22636f6e74656e74223a2261227d5d2c5b5d5dab656e7669726f6e6d656e7403"
    )
    assert decode_group(body) == GROUP
