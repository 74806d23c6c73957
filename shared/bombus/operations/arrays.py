"""Arrays of numbers as bytes: row-major and little-endian, with their type and shape."""

import sys
from array import array
from collections.abc import Iterable
from enum import StrEnum
from math import prod

import msgspec

if sys.byteorder != "little":
    raise ImportError("bombus sends arrays as this machine has them, and needs a little-endian one")


class DType(StrEnum):
    FLOAT32 = "float32"
    INT32 = "int32"
    INT64 = "int64"

    @property
    def code(self) -> str:
        """Return the type's code in the standard library's `array`."""
        return {DType.FLOAT32: "f", DType.INT32: "i", DType.INT64: "q"}[self]


class Array(msgspec.Struct, frozen=True, array_like=True):
    """An array of `shape`, with its numbers one after the other. Its bytes are as many as the shape says.

    Raises `ValueError` where they are not, so that what was decoded holds what it promises.
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
        """Make an array of numbers; of one dimension without a `shape`.

        Raises `ValueError` where they are not numbers of this type, or not as many as the shape says.
        """
        try:
            packed = array(dtype.code, values)
        except (TypeError, OverflowError) as error:
            raise ValueError(f"these are not all {dtype}: {error}") from error
        return cls(dtype, (len(packed),) if shape is None else shape, packed.tobytes())

    def values(self) -> list[float]:
        """Return the numbers, row after row. Integers stay integers."""
        return list(array(self.dtype.code, self.data))

    def __len__(self) -> int:
        """Return how many numbers there are, over all dimensions."""
        return prod(self.shape)
