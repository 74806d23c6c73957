"""Whatever is in a body, its reader refuses it, or makes an operation of it that travels on the log."""

import json
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bombus.errors import Refused
from bombus.operations import CheckpointKind, decode_operation, decode_result, encode_operation, encode_result
from bombus.operations.kinds import Failed
from bombus_gateway.operations_wire.checkpoints import read_load, read_save, read_weights_info
from bombus_gateway.operations_wire.compression import decompressed
from bombus_gateway.operations_wire.data.forward_backward import read_forward_backward
from bombus_gateway.operations_wire.data.json_data import read_json_data
from bombus_gateway.operations_wire.dialects import TrainingDialect
from bombus_gateway.operations_wire.futures import read_retrieve
from bombus_gateway.operations_wire.generate import read_generate
from bombus_gateway.operations_wire.models import (
    AdapterDefaults,
    read_create_by_load,
    read_create_model,
    read_end_model,
)
from bombus_gateway.operations_wire.sampling import read_sample, read_sampling_session
from bombus_gateway.operations_wire.steps import read_abort_epoch, read_optim_step
from bombus_gateway.operations_wire.submission import Submission
from tests.gateway.operations_wire.protobuf_bodies import (
    FLOAT32,
    INT64,
    chunk,
    datum,
    dense,
    float32s,
    int64s,
    part,
    request,
    sparse,
)

TINKER, XORL = TrainingDialect.TINKER, TrainingDialect.XORL
READERS: dict[str, Callable[[bytes], object]] = {
    "json": lambda body: read_json_data(body, False),
    "create": lambda body: read_create_model(TINKER, body, AdapterDefaults()),
    "create xorl": lambda body: read_create_model(XORL, body, AdapterDefaults()),
    "create by load": read_create_by_load,
    "end": lambda body: read_end_model(body, "last"),
    "step": lambda body: read_optim_step(TINKER, body),
    "step xorl": lambda body: read_optim_step(XORL, body),
    "abort": read_abort_epoch,
    "save": lambda body: read_save(TINKER, CheckpointKind.SAMPLER, body),
    "load": lambda body: read_load(XORL, body),
    "info": read_weights_info,
    "session": lambda body: read_sampling_session(TINKER, body),
    "sample": read_sample,
    "generate": read_generate,
    "retrieve": read_retrieve,
}
BROAD = settings(max_examples=40)


def check(read: Callable[[bytes], object], body: bytes) -> None:
    try:
        made = read(body)
    except Refused:
        return
    if isinstance(made, Submission):
        if isinstance(made.operation, Failed):
            assert decode_result(encode_result(made.operation)) == made.operation
        else:
            assert decode_operation(encode_operation(made.operation)) == made.operation


TARGETS = sparse(int64s(9, 8, 7), int64s(0, 2, 3), int64s(0, 2, 1), INT64, 2, 3)
WHOLE = request(
    datum(chunk(5, 6), target_tokens=TARGETS, weights=dense(float32s(1, 2, 3, 4, 5, 6), FLOAT32, 2, 3)),
    datum(chunk(5), target_tokens=dense(int64s(6), INT64, 1)),
    more=part(5, part(1, b"beta") + b"\x11" + b"\0" * 8),
)


@BROAD
@given(st.binary(max_size=200))
def test_any_bytes_are_read_as_protobuf_or_refused(body: bytes) -> None:
    check(read_forward_backward, body)
    check(lambda given: decompressed("zstd", given, 1 << 16), body)


@BROAD
@given(st.lists(st.tuples(st.integers(0, len(WHOLE) - 1), st.integers(0, 255)), max_size=4), st.integers(0, 3))
def test_a_damaged_request_is_read_or_refused(damage: list[tuple[int, int]], cut: int) -> None:
    body = bytearray(WHOLE)
    for place, byte in damage:
        body[place] = byte
    check(read_forward_backward, bytes(body[: len(body) - cut]))


NAMES = [
    "model_id",
    "session_id",
    "seq_id",
    "model_seq_id",
    "base_model",
    "lora_config",
    "rank",
    "alpha",
    "seed",
    "target_modules",
    "forward_backward_input",
    "data",
    "model_input",
    "input_ids",
    "chunks",
    "tokens",
    "loss_fn_inputs",
    "labels",
    "target_tokens",
    "weights",
    "loss_fn",
    "loss_fn_params",
    "shape",
    "adam_params",
    "learning_rate",
    "path",
    "name",
    "ttl_seconds",
    "user_metadata",
    "sampling_session_id",
    "sampling_params",
    "prompt",
    "stop",
    "text",
    "request_id",
    "allow_metadata_only",
]
leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.sampled_from([0, 1, -100, 5, 1 << 70]),
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from(["", "S", "cross_entropy", "tinker://S/weights/a", "x" * 300]),
    st.text(max_size=5),
)
values = st.recursive(
    leaves,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.sampled_from(NAMES), inner, max_size=6)),
    max_leaves=25,
)


@pytest.mark.parametrize("name", READERS)
@BROAD
@given(fields=st.dictionaries(st.sampled_from(NAMES), values, max_size=12))
def test_any_json_of_known_names_is_read_or_refused(name: str, fields: dict[str, object]) -> None:
    check(READERS[name], json.dumps(fields).encode())


tensors = st.one_of(
    st.lists(st.integers(-101, 50), max_size=5),
    st.lists(st.lists(st.integers(0, 50), max_size=3), max_size=3),
    st.fixed_dictionaries(
        {"data": st.lists(st.floats(-50, 50), max_size=6), "shape": st.lists(st.integers(-2, 4), max_size=3)}
    ),
)
data = st.lists(
    st.fixed_dictionaries(
        {
            "model_input": st.fixed_dictionaries({"input_ids": tensors}),
            "loss_fn_inputs": st.dictionaries(
                st.sampled_from(["labels", "target_tokens", "weights", "mask", "advantages"]), tensors, max_size=4
            ),
        }
    ),
    max_size=3,
)


@BROAD
@given(data, st.sampled_from(["cross_entropy", "ppo", "per_token_ce"]))
def test_any_arrays_of_json_are_read_or_refused(given_: list[object], loss: str) -> None:
    body = json.dumps({"forward_backward_input": {"data": given_, "loss_fn": loss}}).encode()
    check(lambda each: read_json_data(each, True), body)
