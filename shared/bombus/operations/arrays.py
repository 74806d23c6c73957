"""Arrays of numbers as bytes: row-major and little-endian, with their type and shape."""

import sys
from array import array
from collections.abc import Iterable
from enum import StrEnum
from math import prod

import msgspec

if sys.byteorder != "little":
    raise ImportError("bombus sends arrays in the machine's byte order, so it needs a little-endian machine")


class DType(StrEnum):
    FLOAT32 = "float32"
    INT32 = "int32"
    INT64 = "int64"

    @property
    def code(self) -> str:
        """Return the code of this type in the standard library's `array`."""
        return {DType.FLOAT32: "f", DType.INT32: "i", DType.INT64: "q"}[self]


class Array(msgspec.Struct, frozen=True, array_like=True):
    """An array of `shape`, with its numbers in `data`, row after row.

    Raises `ValueError` if the number of bytes does not fit the shape, even while decoding.
    """

    dtype: DType
    shape: tuple[int, ...]
    data: bytes

    def __post_init__(self) -> None:
        if any(length < 0 for length in self.shape):
            raise ValueError(f"an array cannot have the shape {list(self.shape)}")
        wanted = prod(self.shape) * array(self.dtype.code).itemsize
        if len(self.data) != wanted:
            raise ValueError(
                f"{self.dtype} of shape {list(self.shape)} takes {wanted} bytes, but there are {len(self.data)}"
            )

    @classmethod
    def of(cls, dtype: DType, values: Iterable[float], shape: tuple[int, ...] | None = None) -> "Array":
        """Make an array from numbers. The array is one-dimensional unless a `shape` is given.

        Raises `ValueError` if a number does not fit the type, or if the shape needs more or fewer numbers.
        """
        try:
            packed = array(dtype.code, values)
        except (TypeError, OverflowError) as error:
            raise ValueError(f"not all of these numbers are {dtype}: {error}") from error
        return cls(dtype, (len(packed),) if shape is None else shape, packed.tobytes())

    def values(self) -> list[float]:
        """Return the numbers, row after row. Integers stay integers."""
        return list(array(self.dtype.code, self.data))

    def __len__(self) -> int:
        """Return how many numbers there are, over all dimensions."""
        return prod(self.shape)
