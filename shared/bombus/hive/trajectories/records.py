"""The record of a rollout group: several sequences of tokens with their masks and scores, as an environment sent them.

Numbers are packed row by row, in four bytes each (floats in eight if four would lose precision). Fields that bombus
does not compute with are kept as the JSON text in which they were sent.
"""

import struct
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

import msgspec

from bombus.errors import LogCorrupted
from bombus.hive.decoding import decoded

_INT_BYTES = 4
_PROBED = 8  # how many of the last numbers are tried first: the first ones often belong to masked tokens and are all 1

_NumberT = TypeVar("_NumberT", int, float)


class PackedFloats(msgspec.Struct, frozen=True, array_like=True):
    """Little-endian floats: float32 if it represents every number exactly, otherwise float64 (`is_wide`)."""

    data: bytes
    is_wide: bool = False

    @classmethod
    def of(cls, numbers: Sequence[float]) -> "PackedFloats":
        """Pack numbers. Numbers from inference engines usually fit float32; those computed in Python do not."""
        narrow = _as_float32(numbers[-_PROBED:]) and _as_float32(numbers)
        return cls(narrow) if narrow else cls._wide(numbers)

    @classmethod
    def of_rows(cls, rows: Iterable[Sequence[float]]) -> "PackedFloats":
        """Pack the numbers of all rows, one row after another, in the same way as `of`."""
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
        """Return the numbers, split into rows of these lengths."""
        return _split(array("d" if self.is_wide else "f", self.data), lengths)


class PackedCandidates(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A teacher's candidates for each position: token ids, or their logprobs. A position may have any number of them.

    `counts` (int32) gives the number of candidates of each position, over all sequences in order.
    """

    counts: bytes
    tokens: bytes = b""  # int32
    logprobs: PackedFloats | None = None

    def __post_init__(self) -> None:
        numbers = len(self.tokens) // _INT_BYTES if self.logprobs is None else len(self.logprobs)
        counts = unpack_ints(self.counts)
        if len(self.counts) % _INT_BYTES or sum(counts) != numbers or min(counts, default=0) < 0:
            raise ValueError(f"{numbers} candidates do not match the counts of their positions")

    @property
    def positions(self) -> int:
        return len(self.counts) // _INT_BYTES

    def rows(self, lengths: Sequence[int]) -> Sequence[Sequence[Sequence[float]]]:
        """Return the candidates of each position, split into sequences of these lengths."""
        counts = unpack_ints(self.counts)
        by_position: Sequence[Sequence[float]] = (
            int_rows(self.tokens, counts) if self.logprobs is None else self.logprobs.rows(counts)
        )
        return [by_position[start:end] for start, end in _bounds(lengths)]


class RolloutGroup(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="group.v1", tag_field="kind"):
    """One rollout group, as stored in the stream `trajectories`.

    `lengths` (int32) gives the number of tokens of each sequence. `tokens` and `masks` (int32), `advantages` and the
    logprobs have one number for each token of all sequences, one sequence after another. `scores` has one number for
    each sequence. Text fields are JSON, or empty for null. Without `environment` the group is anonymous. If the rows of
    `advantages` are not as long as the sequences, `advantage_lengths` (int32) gives their lengths; otherwise it is
    empty.

    Raises `ValueError` if the sizes do not match, so every decoded record is consistent.
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
                raise ValueError(f"{total} tokens have {len(numbers)} logprobs")
        self._check_advantages()
        for candidates in (self.distill_token_ids, self.distill_logprobs):
            if candidates is not None and candidates.positions != total:
                raise ValueError(f"{total} tokens have candidates for {candidates.positions} positions")

    def _check_advantages(self) -> None:
        if self.advantages is None:
            return
        rows = self.advantage_rows()
        if len(self.advantage_lengths) % _INT_BYTES or min(rows) < 0 or sum(rows) != len(self.advantages):
            raise ValueError(f"{len(self.advantages)} advantages do not match the lengths of their rows")

    def advantage_rows(self) -> list[int]:
        """Return the length of each row of advantages: the length of its sequence, unless the environment sent other
        rows."""
        return unpack_ints(self.advantage_lengths or self.lengths)

    @property
    def sequences(self) -> int:
        return len(self.lengths) // _INT_BYTES

    @property
    def total_tokens(self) -> int:
        return len(self.tokens) // _INT_BYTES

    @property
    def longest(self) -> int:
        """Return the length of the longest sequence, in tokens."""
        return max(self.sequence_lengths())

    def sequence_lengths(self) -> list[int]:
        return unpack_ints(self.lengths)


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(RolloutGroup)


def encode_group(group: RolloutGroup) -> bytes:
    return _encoder.encode(group)


def decode_group(body: bytes) -> RolloutGroup:
    """Decode a record. Raises `LogCorrupted` if the bytes are not a rollout group."""
    try:
        return decoded(_decoder.decode, body)
    except msgspec.MsgspecError as error:
        raise LogCorrupted(f"not a rollout group: {error}") from error


def pack_ints(numbers: Sequence[int]) -> bytes:
    """Pack integers. Raises `struct.error` for a value that is not a 32-bit integer."""
    return struct.pack(f"<{len(numbers)}i", *numbers)


def unpack_ints(data: bytes) -> list[int]:
    return array("i", data[: len(data) // _INT_BYTES * _INT_BYTES]).tolist()


def int_rows(data: bytes, lengths: Sequence[int]) -> list[list[int]]:
    """Return integers, split into rows of these lengths."""
    return _split(array("i", data), lengths)


def _as_float32(numbers: Sequence[float]) -> bytes:
    """Return numbers as float32, or empty bytes if float32 cannot represent all of them exactly."""
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
