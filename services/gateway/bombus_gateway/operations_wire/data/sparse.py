"""Convert sparse targets and weights (SparseCsr) to the dense arrays that they represent.

An unlisted target is token 0, and an unlisted weight is 0: the SDK leaves out zeros, so a place may be listed in one of
the two and not in the other. If the whole request fits the limits on numbers and on the bytes of an operation, each
tensor becomes an array of its own shape, and `logprobs` are returned in that shape. If it does not fit (for example
because it has one column for each token in a vocabulary), the listed places in each row are moved to the left, and
`logprobs` are returned in this narrower shape.
"""

from array import array
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TypeAlias

import msgspec

from bombus.errors import Code, Refused
from bombus.hive.records import BODY_BYTES_MAX
from bombus.operations import Array
from bombus_gateway.operations_wire.data.tensors import TARGET_TOKENS, WEIGHTS, NumberBudget, Numbers, as_input

MAY_BE_SPARSE = (TARGET_TOKENS, WEIGHTS)
BYTES_IN_PLACE = BODY_BYTES_MAX - (2 << 20)  # maximum size of numbers; the rest is for names and shapes


class SparseTensor(msgspec.Struct, frozen=True):
    """A matrix of `rows` x `columns` in compressed sparse row form.

    Row i has `values[starts[i] : starts[i + 1]]`, in the columns that the same slice of `at` lists. Columns increase
    strictly within a row. Pass a tensor through `checked` before use.
    """

    rows: int
    columns: int
    values: Numbers
    starts: "array[int]"
    at: "array[int]"

    @property
    def cells(self) -> int:
        return self.rows * self.columns

    def row(self, index: int) -> Sequence[int]:
        """Return the columns that a row lists."""
        return self.at[self.starts[index] : self.starts[index + 1]]


Tensors: TypeAlias = Mapping[str, Array | SparseTensor]


def checked(tensor: SparseTensor, place: str) -> SparseTensor:
    """Return a tensor if its parts are consistent. Raises `Refused` if they are not."""
    why = ""
    starts, listed = tensor.starts, len(tensor.values)
    if min(tensor.rows, tensor.columns) < 0 or len(starts) != tensor.rows + 1:
        why = f"{len(starts)} row pointers, but {tensor.rows} rows need {tensor.rows + 1}"
    elif len(tensor.at) != listed:
        why = f"{len(tensor.at)} columns for {listed} values"
    elif starts[0] != 0 or starts[-1] != listed or any(end < start for start, end in pairwise(starts)):
        why = f"row pointers that do not increase from 0 to the {listed} values"
    elif tensor.at and not 0 <= min(tensor.at) <= max(tensor.at) < tensor.columns:
        why = f"column indices outside its {tensor.columns} columns"
    elif any(not _rises(tensor.row(index)) for index in range(tensor.rows)):
        why = "a row whose columns do not increase"
    if why:
        raise Refused(Code.MALFORMED, f"{place} is a sparse tensor with {why}.")
    return tensor


def _rises(columns: Sequence[int]) -> bool:
    return all(left < right for left, right in pairwise(columns))


def written_out(data: Sequence[Tensors], budget: NumberBudget, beside: int = 0) -> list[dict[str, Array]]:
    """Return the inputs of each sequence, with arrays in place of sparse tensors.

    `beside` is the size in bytes of everything else in the operation, since the log limits an operation's size. Raises
    `Refused` if a sequence's targets and weights differ in shape, or if the arrays exceed the limit on numbers.
    """
    size = beside + sum(_bytes(tensors) for tensors in data)
    in_place = budget.has(sum(_cells(tensors) for tensors in data)) and size <= BYTES_IN_PLACE
    return [_written_out(tensors, budget, in_place, f"data[{index}]") for index, tensors in enumerate(data)]


def _cells(tensors: Tensors) -> int:
    """Return how many numbers a sequence's sparse tensors contain when written as arrays. Targets without weights count
    twice, since weights are added for them."""
    sparse = [tensor for tensor in tensors.values() if isinstance(tensor, SparseTensor)]
    needs_weights = isinstance(tensors.get(TARGET_TOKENS), SparseTensor) and WEIGHTS not in tensors
    return sum(tensor.cells for tensor in sparse) + (sparse[0].cells if needs_weights else 0)


def _bytes(tensors: Tensors) -> int:
    """Return the size in bytes of a sequence's inputs, with sparse tensors written as arrays."""
    sparse = {name: tensor.cells for name, tensor in tensors.items() if isinstance(tensor, SparseTensor)}
    if TARGET_TOKENS in sparse and WEIGHTS not in tensors:
        sparse[WEIGHTS] = sparse[TARGET_TOKENS]
    dense = sum(len(tensor.data) for tensor in tensors.values() if isinstance(tensor, Array))
    return dense + sum(cells * (8 if name == TARGET_TOKENS else 4) for name, cells in sparse.items())


def _written_out(tensors: Tensors, budget: NumberBudget, in_place: bool, place: str) -> dict[str, Array]:
    done = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, Array)}
    sparse = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, SparseTensor)}
    if not sparse:
        return done
    shapes = {(tensor.rows, tensor.columns) for tensor in sparse.values()}
    shapes |= {done[name].shape for name in MAY_BE_SPARSE if name in done}  # type: ignore[misc]  # of any length
    if len(shapes) > 1:
        raise Refused(Code.MALFORMED, f"{place} has target_tokens and weights of different shapes: {sorted(shapes)}.")
    targets = sparse.get(TARGET_TOKENS)
    if targets is not None and WEIGHTS not in tensors:
        ones = array("f", [1.0]) * len(targets.values)
        sparse[WEIGHTS] = SparseTensor(targets.rows, targets.columns, ones, targets.starts, targets.at)
    one = next(iter(sparse.values()))
    if in_place or len(sparse) < len(MAY_BE_SPARSE):  # if only one is sparse, the other already has the full shape
        columns: list[Sequence[int]] = [range(one.columns)] * one.rows
        width = one.columns
    else:
        columns = [_union([tensor.row(index) for tensor in sparse.values()]) for index in range(one.rows)]
        width = max(map(len, columns), default=0)
    for name, tensor in sparse.items():
        budget.take(one.rows * width)
        done[name] = as_input(name, _placed(tensor, columns, width), (one.rows, width), place)
    return done


def _union(rows: Sequence[Sequence[int]]) -> list[int]:
    return sorted({column for row in rows for column in row})


def _placed(tensor: SparseTensor, columns: Sequence[Sequence[int]], width: int) -> Numbers:
    """Return the tensor as rows of `width` numbers. Each row begins with the numbers in the row's `columns`, in that
    order, and is filled up with zeros."""
    placed = array(tensor.values.typecode, [0]) * (tensor.rows * width)
    for index in range(tensor.rows):
        first = tensor.starts[index]
        if isinstance(columns[index], range):
            for offset, column in enumerate(tensor.row(index)):
                placed[index * width + column] = tensor.values[first + offset]
            continue
        seats = {column: seat for seat, column in enumerate(columns[index])}
        for offset, column in enumerate(tensor.row(index)):
            placed[index * width + seats[column]] = tensor.values[first + offset]
    return placed
