"""Operations and results as bytes."""

import math

import msgspec
import pytest

from bombus.operations import (
    AdamParams,
    AdapterPart,
    AdapterSpec,
    Array,
    Category,
    CreateModel,
    Datum,
    DType,
    Failed,
    ForwardBackward,
    LossSpec,
    Operation,
    OptimStep,
    Reduction,
    Rejected,
    Result,
    Scores,
    StepTaken,
    decode_operation,
    decode_result,
    encode_operation,
    encode_result,
)

DATUM = Datum(
    Array.of(DType.INT32, [5, 6]).data,
    {"target_tokens": Array.of(DType.INT64, [6, 7]), "weights": Array.of(DType.FLOAT32, [0.5, -2.0])},
)


@pytest.mark.parametrize(
    "operation",
    [
        CreateModel(base="tiny", adapter=AdapterSpec(rank=8, alpha=32.0, parts=(AdapterPart.MLP,))),
        ForwardBackward(loss=LossSpec("ppo", {"clip_low_threshold": 0.8, "mode": "x"}), data=(DATUM,)),
        OptimStep(adam=AdamParams(learning_rate=1e-4), reduction=Reduction.TOKEN_MEAN),
        Rejected(failure=Failed(error="data is not a list", category=Category.USER), counts=True),
    ],
)
def test_an_operation_is_read_back_as_it_was_written(operation: Operation) -> None:
    assert decode_operation(encode_operation(operation)) == operation


@pytest.mark.parametrize(
    "result",
    [
        Scores(outputs=({"logprobs": Array.of(DType.FLOAT32, [-1.0, -0.25])},), loss=1.25, tokens=2),
        StepTaken(step=3, divisor=17.0, grad_norm=0.5),
        Failed(error="there is no loss named x", category=Category.USER),
    ],
)
def test_a_result_is_read_back_as_it_was_written(result: Result) -> None:
    assert decode_result(encode_result(result)) == result


def test_values_survive_in_their_type() -> None:
    assert Array.of(DType.INT64, [1 << 40, -1]).values() == [1 << 40, -1]
    assert Array.of(DType.FLOAT32, [0.5, math.inf]).values() == [0.5, math.inf]
    matrix = Array.of(DType.INT32, range(6), (3, 2))
    assert (matrix.shape, len(matrix), matrix.values()) == ((3, 2), 6, [0, 1, 2, 3, 4, 5])


@pytest.mark.parametrize(
    ("dtype", "values", "shape"),
    [
        (DType.INT32, [1.5], None),
        (DType.INT32, [1 << 31], None),
        (DType.FLOAT32, ["1"], None),
        (DType.FLOAT32, [1.0, 2.0], (3,)),
        (DType.FLOAT32, [], (-1, 0)),
    ],
)
def test_numbers_that_do_not_fit_are_refused(dtype: DType, values: list[float], shape: tuple[int, ...] | None) -> None:
    with pytest.raises(ValueError, match=r"not all of these numbers are|takes \d+ bytes|cannot have the shape"):
        Array.of(dtype, values, shape)


def test_bytes_that_are_no_operation_are_one_error() -> None:
    short = msgspec.msgpack.encode(
        {"kind": "forward_backward", "loss": {"name": "x"}, "data": [[b"", {"a": ["int32", [2], b""]}]]}
    )
    for body in (b"", b"\xc1", msgspec.msgpack.encode({"kind": "nothing"}), short):
        with pytest.raises(msgspec.MsgspecError):
            decode_operation(body)
