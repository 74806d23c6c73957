"""Tinker's messages, beside other classes of the same names, and bodies that would take too much memory."""

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool

from bombus.errors import Code, Refused
from bombus_gateway import limits
from bombus_gateway.operations_wire.messages import (
    FORWARD_BACKWARD_REQUEST,
    PACKAGE,
    SAMPLE_RESPONSE,
    TENSOR,
    parsed,
)
from tests.gateway.operations_wire.protobuf_bodies import FLOAT32, dense, float32s, number, part, request


def test_a_message_is_read_from_bytes_and_written_as_the_same() -> None:
    body = dense(float32s(0.5, -2.0), FLOAT32, 2)
    tensor = parsed(TENSOR, body)
    assert (tensor.dense, tensor.dtype, list(tensor.shape)) == (float32s(0.5, -2.0), 1, [2])
    assert tensor.WhichOneof("encoding") == "dense"
    assert tensor.SerializeToString(deterministic=True) == body


def test_a_part_that_may_be_missing_is_told_from_one_that_is_empty() -> None:
    assert not SAMPLE_RESPONSE.FromString(b"").HasField("prompt_logprobs")
    assert SAMPLE_RESPONSE.FromString(part(2, b"")).HasField("prompt_logprobs")


def test_the_messages_are_in_a_pool_of_their_own() -> None:
    with pytest.raises(KeyError):
        descriptor_pool.Default().FindMessageTypeByName(f"{PACKAGE}.Tensor")
    same = descriptor_pb2.FileDescriptorProto(name="bombus/tinker_wire.proto", package=PACKAGE, syntax="proto3")
    same.message_type.add(name="Tensor")
    descriptor_pool.Default().AddSerializedFile(same.SerializeToString())  # would clash if it knew ours


def test_fields_that_a_newer_client_adds_are_ignored() -> None:
    assert parsed(TENSOR, part(9, b"new") + number(3, 2) + b"\x7d1234" + b"\x7912345678").dtype == 2


@pytest.mark.parametrize(
    "body",
    [b"\x0a", b"\x0a\x05abc", b"\x08", b"\x0b", b"\x0d12", b"\xff" * 12, part(1, b"\xff\xfe"), b'{"model_id": 1}'],
)
def test_a_body_that_is_not_the_message_is_refused_in_words(body: bytes) -> None:
    with pytest.raises(Refused) as refused:
        parsed(FORWARD_BACKWARD_REQUEST, body)
    assert refused.value.code == Code.MALFORMED
    assert "protobuf" in refused.value.why


EMPTY_DATA = part(3, b"") * (limits.TRAINING_FIELDS + 1)
EMPTY_CHUNKS = b"\x1a\x80\x80\x80\x01" + part(1, b"") * (1 << 20)  # 2 MiB of chunks
ONES = b"\x22\x80\x80\x20" + b"\x01" * (1 << 19)  # dimensions of a shape


@pytest.mark.parametrize("body", [EMPTY_DATA, EMPTY_CHUNKS, ONES], ids=["data", "chunks", "shape"])
def test_fields_are_counted_before_they_take_memory(body: bytes) -> None:
    with pytest.raises(Refused, match="has more than 262144 fields; send less data"):
        parsed(TENSOR if body is ONES else FORWARD_BACKWARD_REQUEST, body)


def test_each_length_of_the_wire_is_read() -> None:
    body = request(part(1, part(1, part(1, b"\x05\x00\x00\x00" * 100))))
    assert len(parsed(FORWARD_BACKWARD_REQUEST, body).data[0].model_input[0].encoded_text.tokens) == 400
