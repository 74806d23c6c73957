"""Convert the numbers of a request to an operation's arrays: target tokens to int64, everything else to float32."""

from array import array
from collections.abc import Iterable
from math import prod
from typing import Any, TypeAlias

from bombus.errors import Code, Refused
from bombus.operations import Array, DType
from bombus_gateway import limits

TARGET_TOKENS = "target_tokens"
WEIGHTS = "weights"
ADVANTAGES = "advantages"
MASK = "mask"

Numbers: TypeAlias = "array[Any]"  # integers or floats, according to its typecode: i, q, f or d
INT32_MAX = (1 << 31) - 1


class NumberBudget:
    """How many more numbers a request may have."""

    def __init__(self) -> None:
        self._left = limits.TRAINING_NUMBERS

    def take(self, numbers: int) -> None:
        """Reserve room for `numbers` more. Raises `Refused` if there is not enough."""
        self._left -= numbers
        if self._left < 0:
            why = f"The request has more than {limits.TRAINING_NUMBERS} tokens and numbers; send less data at once."
            raise Refused(Code.TOO_LARGE, why)

    def has(self, numbers: int) -> bool:
        return numbers <= self._left


def numbers_of(code: str, data: bytes, place: str) -> Numbers:
    """Return the little-endian numbers in `data`. `code` is their type code in the standard library's `array`."""
    numbers = array(code)
    if len(data) % numbers.itemsize:
        why = f"{place} has {len(data)} bytes, but its numbers take {numbers.itemsize} each."
        raise Refused(Code.MALFORMED, why)
    numbers.frombytes(data)
    return numbers


def widened(data: bytes, place: str) -> Numbers:
    """Return bfloat16 numbers, which are the upper halves of float32, as float32."""
    if len(data) % 2:
        raise Refused(Code.MALFORMED, f"{place} has {len(data)} bytes, but its numbers take 2 each.")
    wide = bytearray(2 * len(data))
    wide[2::4] = data[0::2]
    wide[3::4] = data[1::2]
    return numbers_of("f", bytes(wide), place)


def as_input(name: str, numbers: Numbers, shape: tuple[int, ...], place: str) -> Array:
    """Return an input of a loss in the type that its name requires, since clients mark tokens as floats.

    Raises `Refused` if the numbers do not fill the shape.
    """
    if any(length < 0 for length in shape) or prod(shape) != len(numbers):
        why = f"{place} has {len(numbers)} numbers, which are not of shape {list(shape)[:8]}."
        raise Refused(Code.MALFORMED, why)
    if name == TARGET_TOKENS:
        return Array(DType.INT64, shape, whole(numbers, place).tobytes())
    return Array(DType.FLOAT32, shape, (numbers if numbers.typecode == "f" else array("f", numbers)).tobytes())


def whole(numbers: Numbers, place: str) -> "array[int]":
    """Return tokens as int64. Raises `Refused` if a token is not a whole number."""
    if numbers.typecode in "iq":
        return array("q", numbers)
    for index, number in enumerate(numbers):
        if not float(number).is_integer() or abs(number) > INT32_MAX:
            why = f"{place} has {number} at {index}, but tokens are 32-bit integers."
            raise Refused(Code.MALFORMED, why)
    return array("q", map(int, numbers))


def as_tokens(numbers: Iterable[int], place: str) -> bytes:
    """Return tokens as int32. Raises `Refused` for a number that cannot be a token id."""
    try:
        packed = array("i", numbers)
    except (OverflowError, TypeError):
        raise Refused(Code.MALFORMED, f"{place} has tokens that are not 32-bit integers.") from None
    if packed and min(packed) < 0:
        raise Refused(Code.MALFORMED, f"{place} has the token {min(packed)}, but tokens cannot be negative.")
    return packed.tobytes()
