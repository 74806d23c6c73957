"""Numbers in JSON: lists, lists of lists, and the form `{data, dtype, shape}`.

A number that takes two bytes in a body takes thirty bytes in memory until it is put into an array, so numbers are
counted before they are decoded.
"""

from array import array

import msgspec

from bombus.errors import Code, Refused
from bombus.operations import Array
from bombus_gateway.decoding.json_body import decode_body
from bombus_gateway.operations_wire.data.tensors import NumberBudget, Numbers
from bombus_gateway.operations_wire.submission import NOT_GIVEN, is_given

_flat = msgspec.json.Decoder(list[float])
_rows = msgspec.json.Decoder(list[list[float]])


class JsonTensor(msgspec.Struct, frozen=True):
    """Numbers with their shape. Their `dtype` is ignored, since clients mark tokens as floats.

    Instead, the name of the input determines the type (see `as_input`).
    """

    data: msgspec.Raw
    shape: tuple[int, ...] | None = None
    sparse_crow_indices: msgspec.Raw = NOT_GIVEN


_tensor = msgspec.json.Decoder(JsonTensor)


def numbers_in(raw: msgspec.Raw, budget: NumberBudget, place: str) -> tuple[Numbers, tuple[int, ...]]:
    """Return the numbers in a JSON value, and their shape. Raises `Refused`."""
    text = bytes(raw).lstrip()
    shape: tuple[int, ...] | None = None
    if text.startswith(b"{"):
        tensor = decode_body(_tensor, text, place)
        if is_given(tensor.sparse_crow_indices):
            raise Refused(Code.UNSUPPORTED, f"{place} is sparse, which JSON bodies do not support; send it dense.")
        text, shape = bytes(tensor.data).lstrip(), tensor.shape
    budget.take(text.count(b",") + 1)
    if text[1:].lstrip().startswith(b"["):
        rows = decode_body(_rows, text, place)
        if len({len(row) for row in rows}) > 1:
            raise Refused(Code.MALFORMED, f"{place} has rows of different lengths; pad them, with weights of 0.")
        numbers = array("d", (number for row in rows for number in row))
        return numbers, (len(rows), len(rows[0])) if shape is None else shape
    numbers = array("d", decode_body(_flat, text, place))
    return numbers, (len(numbers),) if shape is None else shape


def as_json(values: Array) -> dict[str, object]:
    """Return an array in the JSON form that clients read."""
    return {"data": values.values(), "dtype": values.dtype.value, "shape": list(values.shape)}
