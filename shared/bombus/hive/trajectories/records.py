"""The record of a rollout group: several sequences of tokens with their masks and scores, as an environment sent them.

Numbers are packed, row after row, in four bytes each (eight where a float needs them). Whatever nobody here computes
with is kept as the text of JSON that it came as.
"""

import struct
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

import msgspec

from bombus.errors import LogCorrupted
from bombus.hive.decoding import decoded

_INT_BYTES = 4
_PROBED = 8  # numbers that are tried before all of them are; the first are often those of masked tokens, all 1

_NumberT = TypeVar("_NumberT", int, float)


class PackedFloats(msgspec.Struct, frozen=True, array_like=True):
    """Numbers, little-endian: float32 where each of them comes back equal, and float64 otherwise (`is_wide`)."""

    data: bytes
    is_wide: bool = False

    @classmethod
    def of(cls, numbers: Sequence[float]) -> "PackedFloats":
        """Pack numbers. Those that engines compute are float32, those that programs compute are not."""
        narrow = _as_float32(numbers[-_PROBED:]) and _as_float32(numbers)
        return cls(narrow) if narrow else cls._wide(numbers)

    @classmethod
    def of_rows(cls, rows: Iterable[Sequence[float]]) -> "PackedFloats":
        """Pack the numbers of rows, one row after the other, as `of` packs all of them."""
        packed: list[PackedFloats] = []
        is_wide = False
        for row in rows:
            numbers = cls._wide(row) if is_wide else cls.of(row)
            is_wide |= numbers.is_wide
            packed.append(numbers)
        if not is_wide:
            return cls(b"".join([each.data for each in packed]))
        return cls(b"".join([each._widened() for each in packed]), True)

    @classmethod
    def _wide(cls, numbers: Sequence[float]) -> "PackedFloats":
        return cls(struct.pack(f"<{len(numbers)}d", *numbers), bool(numbers))

    def _widened(self) -> bytes:
        return self.data if self.is_wide else array("d", array("f", self.data)).tobytes()

    def __len__(self) -> int:
        return len(self.data) // (8 if self.is_wide else 4)

    def rows(self, lengths: Sequence[int]) -> list[list[float]]:
        """Return the numbers in rows of these lengths."""
        return _split(array("d" if self.is_wide else "f", self.data), lengths)


class PackedCandidates(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a teacher says of each position: token ids, or their logprobs, of which a position may have any number.

    `counts` (int32) has how many each position has, one position after the other over all sequences.
    """

    counts: bytes
    tokens: bytes = b""  # int32
    logprobs: PackedFloats | None = None

    def __post_init__(self) -> None:
        numbers = len(self.tokens) // _INT_BYTES if self.logprobs is None else len(self.logprobs)
        counts = unpack_ints(self.counts)
        if len(self.counts) % _INT_BYTES or sum(counts) != numbers or min(counts, default=0) < 0:
            raise ValueError(f"{numbers} candidates are not as many as their positions have")

    @property
    def positions(self) -> int:
        return len(self.counts) // _INT_BYTES

    def rows(self, lengths: Sequence[int]) -> Sequence[Sequence[Sequence[float]]]:
        """Return the candidates of each position, in sequences of these lengths."""
        counts = unpack_ints(self.counts)
        by_position: Sequence[Sequence[float]] = (
            int_rows(self.tokens, counts) if self.logprobs is None else self.logprobs.rows(counts)
        )
        return [by_position[start:end] for start, end in _bounds(lengths)]


class RolloutGroup(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="group.v1", tag_field="kind"):
    """One rollout group, as the stream `trajectories` has it.

    `lengths` (int32) are the tokens of each sequence. `tokens` and `masks` (int32) have one number for each token of
    all sequences, one sequence after the other, and so have `advantages` and logprobs. `scores` has one for each
    sequence. What is text is JSON, and empty where it was null. Without `environment` the group is anonymous.
    `advantage_lengths` (int32) are the rows of `advantages` where these are not as long as the sequences, else empty.

    Raises `ValueError` where the parts are not of these sizes, so that what was decoded holds what it promises.
    """

    lengths: bytes
    tokens: bytes
    masks: bytes
    scores: PackedFloats
    advantages: PackedFloats | None = None
    ref_logprobs: PackedFloats | None = None
    inference_logprobs: PackedFloats | None = None
    distill_token_ids: PackedCandidates | None = None
    distill_logprobs: PackedCandidates | None = None
    generation_params: bytes = b""
    messages: bytes = b""
    overrides: bytes = b""
    group_overrides: bytes = b""
    images: bytes = b""
    environment: int | None = None
    advantage_lengths: bytes = b""

    def __post_init__(self) -> None:
        total = sum(self.sequence_lengths())
        if not self.lengths or len(self.lengths) % _INT_BYTES or len(self.scores) != self.sequences:
            raise ValueError(f"a group of {self.sequences} sequences has {len(self.scores)} scores")
        if not len(self.tokens) == len(self.masks) == total * _INT_BYTES:
            raise ValueError(f"{len(self.tokens)} bytes of tokens and {len(self.masks)} of masks are not {total} each")
        for numbers in (self.ref_logprobs, self.inference_logprobs):
            if numbers is not None and len(numbers) != total:
                raise ValueError(f"{total} tokens have {len(numbers)} numbers beside them")
        self._check_advantages()
        for candidates in (self.distill_token_ids, self.distill_logprobs):
            if candidates is not None and candidates.positions != total:
                raise ValueError(f"{total} tokens have candidates for {candidates.positions} positions")

    def _check_advantages(self) -> None:
        if self.advantages is None:
            return
        rows = self.advantage_rows()
        if len(self.advantage_lengths) % _INT_BYTES or min(rows) < 0 or sum(rows) != len(self.advantages):
            raise ValueError(f"{len(self.advantages)} advantages are not as many as their rows have")

    def advantage_rows(self) -> list[int]:
        """Return how many advantages each row has: one for each token, unless an environment has sent others."""
        return unpack_ints(self.advantage_lengths or self.lengths)

    @property
    def sequences(self) -> int:
        return len(self.lengths) // _INT_BYTES

    @property
    def total_tokens(self) -> int:
        return len(self.tokens) // _INT_BYTES

    @property
    def longest(self) -> int:
        """Return the tokens of the longest sequence."""
        return max(self.sequence_lengths())

    def sequence_lengths(self) -> list[int]:
        return unpack_ints(self.lengths)


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(RolloutGroup)


def encode_group(group: RolloutGroup) -> bytes:
    return _encoder.encode(group)


def decode_group(body: bytes) -> RolloutGroup:
    """Decode a record. Raises `LogCorrupted` for bytes that are not one."""
    try:
        return decoded(_decoder.decode, body)
    except msgspec.MsgspecError as error:
        raise LogCorrupted(f"not a rollout group: {error}") from error


def pack_ints(numbers: Sequence[int]) -> bytes:
    """Pack integers. Raises `struct.error` for what is not an integer of 32 bits."""
    return struct.pack(f"<{len(numbers)}i", *numbers)


def unpack_ints(data: bytes) -> list[int]:
    return array("i", data[: len(data) // _INT_BYTES * _INT_BYTES]).tolist()


def int_rows(data: bytes, lengths: Sequence[int]) -> list[list[int]]:
    """Return integers in rows of these lengths."""
    return _split(array("i", data), lengths)


def _as_float32(numbers: Sequence[float]) -> bytes:
    """Return numbers as float32, or nothing where one of them would not come back equal."""
    try:
        packed = struct.pack(f"<{len(numbers)}f", *numbers)
    except OverflowError:
        return b""
    return packed if array("f", packed).tolist() == numbers else b""


def _split(numbers: "array[_NumberT]", lengths: Sequence[int]) -> list[list[_NumberT]]:
    return [numbers[start:end].tolist() for start, end in _bounds(lengths)]


def _bounds(lengths: Sequence[int]) -> Iterator[tuple[int, int]]:
    start = 0
    for length in lengths:
        yield start, start + length
        start += length
