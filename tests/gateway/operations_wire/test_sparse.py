"""Sparse targets and weights, written out by hand."""

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bombus.errors import Refused
from bombus.operations import Array, DType
from bombus_gateway import limits
from bombus_gateway.operations_wire.data.sparse import SparseTensor, checked, written_out
from bombus_gateway.operations_wire.data.tensors import NumberBudget


def tensor(values: list[float], starts: list[int], at: list[int], columns: int, code: str = "q") -> SparseTensor:
    numbers = array(code, values) if code == "f" else array(code, map(int, values))
    return SparseTensor(len(starts) - 1, columns, numbers, array("q", starts), array("q", at))


def int64s(values: list[int], *shape: int) -> Array:
    return Array.of(DType.INT64, values, shape)


def float32s(values: list[float], *shape: int) -> Array:
    return Array.of(DType.FLOAT32, values, shape)


VOCABULARY = limits.TRAINING_NUMBERS  # a row of so many columns leaves no room for another


def test_without_weights_a_target_that_is_listed_counts_once_and_the_others_not() -> None:
    targets = tensor([9, 7], [0, 1, 2], [1, 0], 2)
    (inputs,) = written_out([{"target_tokens": targets}], NumberBudget())
    assert inputs == {
        "target_tokens": int64s([0, 9, 7, 0], 2, 2),
        "weights": float32s([0.0, 1.0, 1.0, 0.0], 2, 2),
    }


def test_a_sparse_tensor_beside_an_array_takes_the_arrays_shape() -> None:
    weights = tensor([0.5], [0, 0, 1], [1], 2, "f")
    targets = int64s([1, 2, 3, 4], 2, 2)
    (inputs,) = written_out([{"target_tokens": targets, "weights": weights}], NumberBudget())
    assert inputs == {"target_tokens": targets, "weights": float32s([0.0, 0.0, 0.0, 0.5], 2, 2)}


def test_rows_that_are_too_long_are_compacted_to_the_left_together() -> None:
    # Row 0 has targets at 3 and 5 and weights at 3 and 900: three places. Row 1 has a target at 7, and nothing else.
    targets = tensor([30, 50, 70], [0, 2, 3], [3, 5, 7], VOCABULARY)
    weights = tensor([0.5, 0.25, 1.0], [0, 2, 3], [3, 900, 7], VOCABULARY, "f")
    (inputs,) = written_out([{"target_tokens": targets, "weights": weights}], NumberBudget())
    assert inputs == {
        "target_tokens": int64s([30, 50, 0, 70, 0, 0], 2, 3),
        "weights": float32s([0.5, 0.0, 0.25, 1.0, 0.0, 0.0], 2, 3),
    }


def test_rows_for_which_an_operation_has_too_few_bytes_are_compacted_too() -> None:
    # 60 rows of 49,152 columns are 2,949,120 targets of 8 bytes and weights of 4: 33.75 MiB, and an operation has 32.
    columns, rows = 49_152, 60
    starts = [2 * row for row in range(rows + 1)]
    targets = tensor([3, 49_151] * rows, starts, [3, 49_151] * rows, columns)
    room = NumberBudget()
    (inputs,) = written_out([{"target_tokens": targets}], room, beside=4 * rows)
    assert inputs["target_tokens"] == int64s([3, 49_151] * rows, rows, 2)
    assert inputs["weights"] == float32s([1.0, 1.0] * rows, rows, 2)
    (fewer,) = written_out([{"target_tokens": tensor([3], [0, 1], [3], columns)}], room, beside=4)
    assert fewer["target_tokens"].shape == (1, columns)


def test_all_data_of_a_request_are_written_in_one_way() -> None:
    long = {"target_tokens": tensor([30], [0, 1], [VOCABULARY - 1], VOCABULARY)}
    short = {"target_tokens": tensor([9], [0, 1], [1], 2)}
    compact = [each["target_tokens"] for each in written_out([long, short], NumberBudget())]
    assert compact == [int64s([30], 1, 1), int64s([9], 1, 1)]


def test_targets_and_weights_of_different_shapes_are_refused() -> None:
    targets, weights = tensor([9], [0, 1], [1], 2), tensor([1], [0, 1], [1], 3, "f")
    with pytest.raises(
        Refused, match=r"data\[0\] has target_tokens and weights of different shapes: \[\(1, 2\), \(1, 3"
    ):
        written_out([{"target_tokens": targets, "weights": weights}], NumberBudget())
    with pytest.raises(Refused, match="different shapes"):
        written_out([{"target_tokens": targets, "weights": float32s([1.0], 1)}], NumberBudget())


def test_what_is_listed_counts_against_the_room_of_the_request() -> None:
    room = NumberBudget()
    room.take(limits.TRAINING_NUMBERS - 3)
    with pytest.raises(Refused, match="more than 8388608 tokens and numbers; send less data at once"):
        written_out([{"target_tokens": tensor([9, 8], [0, 2], [0, 1], 2)}], room)


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (tensor([9], [0, 1], [2], 2), "column indices outside its 2 columns"),
        (tensor([9], [0, 1], [-1], 2), "column indices outside"),
        (tensor([9, 8], [0, 2], [1, 1], 2), "a row whose columns do not increase"),
        (tensor([9, 8], [0, 2], [1, 0], 2), "a row whose columns do not increase"),
        (tensor([9], [0, 2], [1], 2), "row pointers that do not increase from 0 to the 1 values"),
        (tensor([9], [1, 1], [1], 2), "row pointers that do not increase"),
        (tensor([9, 8], [0, 2, 1, 2], [0, 1], 2), "row pointers that do not increase"),
        (tensor([9, 8], [0, 2], [1], 2), "1 columns for 2 values"),
        (SparseTensor(3, 2, array("q"), array("q", [0, 0]), array("q")), "2 row pointers, but 3 rows need 4"),
        (SparseTensor(-1, 2, array("q"), array("q"), array("q")), "0 row pointers, but -1 rows need 0"),
    ],
)
def test_parts_that_do_not_fit_each_other_are_refused(wrong: SparseTensor, why: str) -> None:
    with pytest.raises(Refused, match=f"weights is a sparse tensor with {why}"):
        checked(wrong, "weights")


matrices = st.integers(0, 4).flatmap(
    lambda columns: st.lists(st.lists(st.integers(0, 3), min_size=columns, max_size=columns), max_size=5).map(
        lambda rows: (rows, columns)
    )
)


@given(matrices, st.booleans())
def test_no_number_is_lost_in_either_form(matrix: tuple[list[list[int]], int], compact: bool) -> None:
    rows, columns = matrix
    starts, at, values = [0], list[int](), list[float]()
    for row in rows:
        at += [column for column, value in enumerate(row) if value]
        values += [value for value in row if value]
        starts.append(len(values))
    data = [{"target_tokens": tensor(values, starts, at, columns)}]
    if compact:  # one that fits nowhere in its own shape
        data.append({"target_tokens": tensor([1], [0, 1], [5], VOCABULARY)})
    inputs = written_out(data, NumberBudget())[0]
    width = inputs["target_tokens"].shape[1]
    found = inputs["target_tokens"].values()
    again = [found[start * width : (start + 1) * width] for start in range(len(rows))]
    if compact:
        assert [[value for value in row if value] for row in again] == [[v for v in row if v] for row in rows]
        assert width == max((sum(map(bool, row)) for row in rows), default=0)
    else:
        assert again == rows
    assert inputs["weights"].values() == [float(value > 0) for value in found]
