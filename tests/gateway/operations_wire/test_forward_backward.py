"""Tinker's forward_backward, with bytes put together by hand."""

import re
import struct
import subprocess
import sys

import pytest

from bombus.errors import Code, Refused
from bombus.operations import Array, Category, DType, Failed, ForwardBackward, LossSpec, Scores
from bombus_gateway import limits
from bombus_gateway.operations_wire.data.forward_backward import read_forward_backward
from bombus_gateway.operations_wire.data.scores import write_scores
from tests.gateway.operations_wire.protobuf_bodies import (
    BFLOAT16,
    DATUM,
    FLOAT32,
    INT32,
    INT64,
    MODEL,
    TARGETS,
    chunk,
    datum,
    dense,
    float32s,
    int32s,
    int64s,
    number,
    part,
    request,
    sparse,
)


def operation(body: bytes) -> ForwardBackward:
    read = read_forward_backward(body).operation
    assert isinstance(read, ForwardBackward), read
    return read


def failure(body: bytes) -> str:
    submission = read_forward_backward(body)
    assert (submission.model, submission.seq) == (MODEL, 1)
    assert isinstance(submission.operation, Failed)
    assert submission.operation.category == Category.USER
    return submission.operation.error


def test_a_request_becomes_an_operation_of_its_model_and_number() -> None:
    weights = dense(float32s(0.5, -2.0), FLOAT32, 2)
    submission = read_forward_backward(request(datum(chunk(5, 6), target_tokens=TARGETS, weights=weights), seq=9))
    assert (submission.model, submission.seq) == ("S:train:0", 9)
    read = submission.operation
    assert isinstance(read, ForwardBackward)
    assert read.loss == LossSpec("cross_entropy")
    assert not read.forward_only
    (one,) = read.data
    assert one.tokens == int32s(5, 6)
    assert one.inputs == {
        "target_tokens": Array(DType.INT64, (2,), int64s(6, 7)),
        "weights": Array(DType.FLOAT32, (2,), float32s(0.5, -2.0)),
    }


def test_forward_alone_says_so() -> None:
    assert operation(request(DATUM, more=number(6, 1))).forward_only


def test_chunks_of_text_are_one_sequence() -> None:
    (one,) = operation(request(datum(chunk(5), chunk(), chunk(6, 7), target_tokens=TARGETS))).data
    assert one.tokens == int32s(5, 6, 7)


def test_a_batch_may_be_empty() -> None:
    assert operation(request()).data == ()


def test_numbers_of_each_type_become_those_of_the_operation() -> None:
    half = struct.pack("<3H", 0x3F80, 0xC020, 0x3DCD)  # 1, -2.5 and 0.10009765625 in bfloat16
    inputs = (
        operation(
            request(
                datum(
                    chunk(5, 6, 7),
                    target_tokens=dense(int32s(6, 7, 8), INT32, 3),
                    weights=dense(int64s(1, 0, -1), INT64, 3),
                    advantages=dense(half, BFLOAT16, 3),
                    logprobs=dense(float32s(-1.0, -2.0, -3.0), FLOAT32),  # of one dimension without a shape
                )
            )
        )
        .data[0]
        .inputs
    )
    assert inputs["target_tokens"] == Array(DType.INT64, (3,), int64s(6, 7, 8))
    assert inputs["weights"] == Array(DType.FLOAT32, (3,), float32s(1.0, 0.0, -1.0))
    assert inputs["advantages"].values() == [1.0, -2.5, 0.10009765625]
    assert inputs["logprobs"].shape == (3,)


def test_several_targets_for_each_token_keep_their_shape() -> None:
    targets = dense(int64s(1, 2, 3, 4, 5, 6), INT64, 2, 3)
    (one,) = operation(request(datum(chunk(5, 6), target_tokens=targets))).data
    assert one.inputs["target_tokens"].shape == (2, 3)


def pair(key: str, value: bytes) -> bytes:
    return part(1, key.encode()) + value


def double(value: float) -> bytes:
    return struct.pack("<d", value)


OLD = part(5, pair("clip_low_threshold", b"\x11" + double(0.7)))
NEW = part(7, pair("clip_low_threshold", part(2, b"\x09" + double(0.9)))) + part(
    7, pair("mode", part(2, part(2, b"x")))
)


@pytest.mark.parametrize(
    ("given", "settings"),
    [
        (b"", {}),
        (OLD, {"clip_low_threshold": 0.7}),
        (NEW, {"clip_low_threshold": 0.9, "mode": "x"}),
        (OLD + NEW, {"clip_low_threshold": 0.9, "mode": "x"}),
    ],
)
def test_the_newer_settings_of_a_loss_come_before_the_older(given: bytes, settings: dict[str, float | str]) -> None:
    assert operation(request(DATUM, loss="ppo", more=given)).loss == LossSpec("ppo", settings)


def test_sparse_targets_and_weights_are_written_out_in_their_own_shape() -> None:
    # [[9, 0, 8], [0, 7, 0]] with weights [[.5, 0, .25], [0, 0, -1]]: the target of -1 is token 0, which is not listed.
    targets = sparse(int64s(9, 8, 7), int64s(0, 2, 3), int64s(0, 2, 1), INT64, 2, 3)
    weights = sparse(float32s(0.5, 0.25, -1.0), int64s(0, 2, 3), int64s(0, 2, 2), FLOAT32, 2, 3)
    (one,) = operation(request(datum(chunk(5, 6), target_tokens=targets, weights=weights))).data
    assert one.inputs["target_tokens"] == Array.of(DType.INT64, [9, 0, 8, 0, 7, 0], (2, 3))
    assert one.inputs["weights"] == Array.of(DType.FLOAT32, [0.5, 0, 0.25, 0, 0, -1], (2, 3))


IMAGE = part(1, part(2, b"\x0a\x03png"))
AUDIO = part(1, part(3, b""))
UNKNOWN = part(1, part(7, b""))


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (request(datum(chunk(5), IMAGE)), r"data\[0\] has an image in its model_input, but the models here read only"),
        (request(datum(AUDIO)), r"has audio"),
        (request(DATUM, datum(UNKNOWN)), r"data\[1\] has something that this server does not know"),
        (request(datum(target_tokens=TARGETS)), r"data\[0\] has no tokens in its model_input; leave it out"),
        (request(datum(chunk(5, -1))), r"data\[0\].model_input has the token -1"),
        (request(datum(part(1, part(1, part(1, b"\1\2\3"))))), r"data\[0\].model_input has 3 bytes, but .* 4 each"),
        (request(datum(chunk(5), weights=dense(b"\1\2\3", BFLOAT16, 1))), r"\['weights'\] has 3 bytes, but .* 2 each"),
        (
            request(datum(chunk(5), weights=dense(float32s(1), FLOAT32, 2))),
            r"has 1 numbers, which are not of shape \[2\]",
        ),
        (request(datum(chunk(5), weights=dense(b"", 0, 1))), r"has numbers of type 0; supported: float32"),
        (
            request(datum(chunk(5), target_tokens=dense(float32s(1.5), FLOAT32, 1))),
            r"\['target_tokens'\] has 1.5 at 0, but tokens are 32-bit integers",
        ),
        (
            request(datum(chunk(5), target_tokens=dense(float32s(float("nan")), FLOAT32, 1))),
            r"\['target_tokens'\] has nan at 0",
        ),
        (request(DATUM, loss="hinge"), r"There is no loss 'hinge'; use one of cross_entropy, "),
        (request(DATUM, loss="custom"), r"pass your function to forward_backward_custom"),
        (request(DATUM, loss="stable_reinforce"), r"is not offered"),
        (request(DATUM, more=part(7, pair("beta", b""))), r"The setting 'beta' of the loss has no value"),
        (request(DATUM, more=part(5, pair("beta", b"\x11" + double(float("nan"))))), r"'beta' of the loss is nan"),
        (
            request(DATUM, more=b"".join(part(5, pair(f"k{each}", b"")) for each in range(65))),
            r"A loss may have up to 64 settings, not 65",
        ),
        (request(datum(chunk(5), **{f"x{each}": b"" for each in range(33)})), r"33 arrays, over the limit of 32"),
        (request(*[b""] * (limits.DATA + 1)), r"4097 data in one request are over the limit of 4096"),
    ],
)
def test_what_cannot_be_done_is_an_operation_that_has_failed(body: bytes, why: str) -> None:
    assert re.search(why, failure(body))


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (request(DATUM, model=""), "model_id must have 1 to 256 characters"),
        (request(DATUM, model="x" * 257), "but has 257"),
        (request(DATUM, seq=0), "seq_id is 0, but request numbers begin at 1"),
    ],
)
def test_a_request_without_a_model_or_a_number_is_refused_at_once(body: bytes, why: str) -> None:
    with pytest.raises(Refused, match=why) as refused:
        read_forward_backward(body)
    assert refused.value.code == Code.MALFORMED


# ---- answers ------------------------------------------------------------------------------------------------------


def floats(values: list[float], shape: tuple[int, ...] | None = None) -> Array:
    return Array.of(DType.FLOAT32, values, shape)


def in_order(answer: bytes) -> list[tuple[int, bytes]]:
    """Return the fields of an answer that have a length, with their numbers: each under 128 bytes."""
    found = []
    at = 0
    while at < len(answer):
        assert answer[at] & 7 == 2
        length = answer[at + 1]
        found.append((answer[at] >> 3, answer[at + 2 : at + 2 + length]))
        at += 2 + length
    return found


def test_arrays_of_different_lengths_are_one_record_with_offsets_in_bytes() -> None:
    scores = Scores(outputs=({"logprobs": floats([-1.0, -2.0])}, {"logprobs": floats([-3.0])}), loss=1.5, tokens=3)
    batched = part(1, float32s(-1.0, -2.0, -3.0)) + part(2, int64s(0, 8, 12)) + number(3, FLOAT32)
    record = part(1, b"ArrayRecord") + part(2, part(1, b"logprobs") + part(2, batched)) + number(3, 2)
    fields = in_order(write_scores(scores))
    assert fields[:2] == [(1, b"ArrayRecord"), (2, record)]
    metrics = {part(1, b"loss:sum") + b"\x11" + double(1.5), part(1, b"valid_tokens:sum") + b"\x11" + double(3.0)}
    assert {payload for field, payload in fields[2:] if field == 3} == metrics


def test_a_new_record_begins_where_the_other_dimensions_change() -> None:
    outputs = (
        {"logprobs": floats([-1.0])},
        {"logprobs": floats([-2.0, -3.0], (1, 2))},
        {"logprobs": floats([-4.0, -5.0], (1, 2))},
        {"logprobs": floats([-6.0])},
    )
    fields = in_order(write_scores(Scores(outputs=outputs, loss=0.0, tokens=5)))
    records = [payload for number, payload in fields if number == 2]
    assert len(records) == 3
    assert [record[-1] for record in records] == [1, 2, 1]  # num_datums, the last field
    assert part(4, b"\x02") in records[1]  # its trailing shape


def test_an_array_that_not_all_data_have_is_left_out() -> None:
    outputs = ({"logprobs": floats([-1.0]), "extra": floats([2.0])}, {"logprobs": floats([-3.0])})
    answer = write_scores(Scores(outputs=outputs, loss=0.0, tokens=2))
    assert b"logprobs" in answer
    assert b"extra" not in answer


def test_an_answer_about_no_data_has_its_metrics_alone() -> None:
    fields = in_order(write_scores(Scores(outputs=(), loss=0.0, tokens=0)))
    assert [number for number, _ in fields] == [1, 3, 3]


def test_every_metric_has_exactly_one_reduction() -> None:
    metrics = {"kl": 0.5, "ratio:max": 2.0, "a:b:min": 1.0, "x:nonsense": 4.0, ":sum": 5.0}
    answer = write_scores(Scores(outputs=({},), loss=0.0, tokens=0, metrics=metrics))
    keys = {payload[2 : 2 + payload[1]].decode() for number, payload in in_order(answer) if number == 3}
    assert keys == {"kl:mean", "ratio:max", "a_b:min", "x_nonsense:mean", "_sum:mean", "loss:sum", "valid_tokens:sum"}


IN_ANOTHER_PROCESS = """
import sys
from hashlib import sha256
from bombus.operations import Failed, Rejected, encode_operation
from bombus_gateway.operations_wire.data.forward_backward import read_forward_backward
operation = read_forward_backward(sys.stdin.buffer.read()).operation
if isinstance(operation, Failed):
    operation = Rejected(failure=operation)
print(sha256(encode_operation(operation)).hexdigest())
"""


def test_gateways_in_several_processes_read_one_body_as_one_operation() -> None:
    ones = dense(float32s(1.0, 1.0), FLOAT32, 2)
    names = ("logprobs", "advantages", "mask", "clip_low_threshold", "clip_high_threshold")
    inputs = {"target_tokens": TARGETS} | dict.fromkeys(names, ones)
    wrong = dict.fromkeys(names, dense(float32s(1.0), FLOAT32, 2))  # the failure is an operation too
    command = [sys.executable, "-c", IN_ANOTHER_PROCESS]
    for each in (inputs, inputs | wrong):
        body = request(datum(chunk(5, 6), **each), loss="ppo")
        digests = {subprocess.run(command, input=body, capture_output=True, check=True).stdout for _ in range(3)}
        assert len(digests) == 1
