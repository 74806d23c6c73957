"""forward_backward and samples: what Tinker's SDK writes is read here, and what is written here it reads."""

import math
from array import array
from typing import Any

import numpy
import pytest
import torch
import zstandard
from google.protobuf import message_factory
from hypothesis import given, settings
from hypothesis import strategies as st
from tinker.lib.chunked_fwdbwd_helpers import combine_fwd_bwd_output_results
from tinker.proto import tinker_public_pb2
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.proto.response_conv import deserialize_forward_backward_output, deserialize_sample_response
from tinker.types.forward_backward_input import ForwardBackwardInput
from tinker.types.forward_backward_request import ForwardBackwardRequest

from bombus.hive.records import FinishReason
from bombus.operations import Array, DType, Failed, ForwardBackward, LossSpec, Scores
from bombus_gateway.operations_wire import messages
from bombus_gateway.operations_wire.compression import decompressed
from bombus_gateway.operations_wire.data.forward_backward import read_forward_backward
from bombus_gateway.operations_wire.data.scores import write_scores
from bombus_gateway.operations_wire.samples import SampledTokens, unscored, write_samples
from tinker import types


def written(data: list[Any], loss: str = "cross_entropy", config: dict[str, Any] | None = None, seq: int = 1) -> bytes:
    """Return the body that the SDK sends."""
    asked = ForwardBackwardInput(data=data, loss_fn=loss, loss_fn_config=config)
    request = ForwardBackwardRequest(model_id="S:train:0", seq_id=seq, forward_backward_input=asked)
    return bytes(forward_backward_request_to_proto(request).SerializeToString())


def read(body: bytes) -> ForwardBackward:
    operation = read_forward_backward(body).operation
    assert isinstance(operation, ForwardBackward), operation
    return operation


def datum(tokens: list[int], **inputs: Any) -> Any:
    return types.Datum(model_input=types.ModelInput.from_ints(tokens), loss_fn_inputs=inputs)


def test_our_messages_have_the_numbers_and_types_of_the_sdks() -> None:
    ours = messages.FORWARD_BACKWARD_REQUEST.DESCRIPTOR.file.message_types_by_name
    opaque = {("Chunk", "image"), ("Chunk", "dmel")}  # bytes here: a message has the same form on the wire
    for name, message in ours.items():
        theirs = tinker_public_pb2.DESCRIPTOR.message_types_by_name[name].fields_by_name
        for field in message.fields:
            other = theirs[field.name]
            assert field.number == other.number, (name, field.name)
            assert field.is_repeated == other.is_repeated, (name, field.name)
            if (name, field.name) not in opaque:
                kinds = {other.TYPE_ENUM: field.TYPE_INT32}
                assert field.type == kinds.get(other.type, other.type), (name, field.name)


def test_both_sets_of_classes_are_in_one_process() -> None:
    theirs = tinker_public_pb2.Tensor(dense=b"1234", dtype=1, shape=[1])
    assert messages.TENSOR.FromString(theirs.SerializeToString()).dense == b"1234"
    assert message_factory.GetMessageClass(theirs.DESCRIPTOR) is not messages.TENSOR


def test_lists_and_arrays_of_a_batch_are_read() -> None:
    batch = [
        datum([1, 2, 3], target_tokens=[2, 3, 4], weights=[0, 1, 1]),
        datum([7], target_tokens=numpy.array([8], dtype=numpy.int32), weights=torch.tensor([-0.5])),
    ]
    operation = read(written(batch, "ppo", {"clip_low_threshold": 0.9, "mode": "x"}, seq=5))
    assert operation.loss == LossSpec("ppo", {"clip_low_threshold": 0.9, "mode": "x"})
    assert [array("i", each.tokens).tolist() for each in operation.data] == [[1, 2, 3], [7]]
    assert operation.data[0].inputs["weights"] == Array.of(DType.FLOAT32, [0, 1, 1])
    assert operation.data[1].inputs["target_tokens"] == Array.of(DType.INT64, [8])
    assert operation.data[1].inputs["weights"] == Array.of(DType.FLOAT32, [-0.5])


def test_weights_of_bfloat16_and_of_whole_numbers_are_read() -> None:
    (one,) = read(written([datum([1, 2], target_tokens=[1, 2], weights=torch.tensor([1, 0]).bfloat16())])).data
    assert one.inputs["weights"].values() == [1.0, 0.0]
    (one,) = read(written([datum([1, 2], target_tokens=[1, 2], weights=numpy.array([1, 0]))])).data
    assert one.inputs["weights"].values() == [1.0, 0.0]


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_matrices_that_the_sdk_makes_sparse_come_back_whole(data: st.DataObject) -> None:
    rows, columns = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 40))
    cells = st.lists(st.integers(0, 30).map(lambda each: max(each - 20, 0)), min_size=columns, max_size=columns)
    targets = torch.tensor(data.draw(st.lists(cells, min_size=rows, max_size=rows)))
    weights = targets.flip(0).float() / 4 - 1 * (targets > 5)
    made = datum([1] * rows, target_tokens=targets, weights=weights)
    (one,) = read(written([made])).data
    assert one.inputs["target_tokens"].shape == one.inputs["weights"].shape == (rows, columns)
    assert one.inputs["target_tokens"].values() == targets.flatten().tolist()
    assert one.inputs["weights"].values() == weights.flatten().tolist()


def test_what_the_sdk_sends_of_a_custom_loss_is_read() -> None:
    """It sends the targets as they were, with weights as a dense or a sparse matrix of the shape of our logprobs."""
    targets = torch.tensor([[5, 6, 0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0, 9]])
    assert datum([1, 2], target_tokens=targets).loss_fn_inputs["target_tokens"].sparse_crow_indices is not None
    for weights in (torch.randn(2, 8), torch.zeros(2, 8).index_fill(1, torch.tensor([7]), -0.5)):
        (one,) = read(written([datum([1, 2], target_tokens=targets, weights=weights)])).data
        assert one.inputs["weights"].values() == weights.flatten().tolist()


def test_an_image_fails_in_words() -> None:
    image = types.ImageChunk(data=b"\x89PNG", format="png", expected_tokens=3)
    made = types.Datum(model_input=types.ModelInput(chunks=[image]), loss_fn_inputs={"target_tokens": [1]})
    operation = read_forward_backward(written([made])).operation
    assert isinstance(operation, Failed)
    assert "data[0] has an image" in operation.error


def test_spans_of_provenance_are_passed_over() -> None:
    made = datum([1, 2], target_tokens=[2, 3]).with_provenance(
        model_input=[types.PromptProvenanceSpan(sequence_id="a", offset=0, length=2)],
        loss_fn_inputs=[types.SampledProvenanceSpan(sequence_id="b", offset=0, length=2)],
    )
    assert len(read(written([made])).data) == 1


def test_bodies_that_the_sdk_compresses_are_read() -> None:
    body = written([datum([1, 2], target_tokens=[2, 3])])
    assert decompressed("zstd", zstandard.ZstdCompressor().compress(body)) == body


# ---- answers ------------------------------------------------------------------------------------------------------


def numbers_of(shape: tuple[int, ...]) -> st.SearchStrategy[Array]:
    count = math.prod(shape)
    floats = st.lists(st.floats(width=32, allow_nan=False), min_size=count, max_size=count)
    return floats.map(lambda values: Array.of(DType.FLOAT32, values, shape))


shapes = st.one_of(
    st.tuples(st.integers(0, 4)), st.tuples(st.integers(0, 3), st.integers(1, 3)), st.just(()), st.just((2, 1, 2))
)
outputs = st.fixed_dictionaries({"logprobs": shapes.flatmap(numbers_of), "extra": numbers_of((1,))})


@settings(deadline=None)
@given(st.lists(outputs, max_size=8), st.floats(-1e6, 1e6))
def test_ragged_scores_are_read_by_the_sdk_as_they_were(given_: list[dict[str, Array]], loss: float) -> None:
    scores = Scores(outputs=tuple(given_), loss=loss, tokens=3, metrics={"kl": 0.5, "a:b": 1.0})
    found = deserialize_forward_backward_output(write_scores(scores))
    assert len(found.loss_fn_outputs) == len(given_)
    for output, wanted in zip(found.loss_fn_outputs, given_, strict=True):
        for name, values in wanted.items():
            assert tuple(output[name].shape or ()) == (values.shape or (1,))
            assert output[name].data == values.values()
    combined = combine_fwd_bwd_output_results([found, found])  # crashes on a metric without a reduction
    assert combined.metrics["loss:sum"] == 2 * loss
    assert combined.metrics["valid_tokens:sum"] == 6
    assert len(combined.loss_fn_outputs) == 2 * len(given_)


def test_samples_are_read_by_the_sdk_as_they_were() -> None:
    one = SampledTokens(
        tokens=array("i", [5, 6]).tobytes(),
        logprobs=array("f", [-1.0, -2.0]).tobytes(),
        finish=FinishReason.LENGTH,
        top=(((5, -1.0), (7, -1.5)), ((6, -2.0),)),
    )
    top = ((), ((3, -0.5),), ((4, -0.25), (9, -4.0)))
    found = deserialize_sample_response(write_samples([one], unscored(3, [-0.5, -0.25]), top, 2))
    (sequence,) = found.sequences
    assert (sequence.stop_reason, sequence.tokens, sequence.logprobs) == ("length", [5, 6], [-1.0, -2.0])
    assert sequence.topk_logprobs == [[(5, -1.0), (7, -1.5)], [(6, -2.0)]]
    assert found.prompt_logprobs == [None, -0.5, -0.25]
    assert found.topk_prompt_logprobs == [None, [(3, -0.5)], [(4, -0.25), (9, -4.0)]]
    assert found.prompt_cache_hit_tokens == 2


@pytest.mark.parametrize(("finish", "reason"), [(FinishReason.STOP, "stop"), (FinishReason.LENGTH, "length")])
def test_each_end_of_a_sample_has_its_name(finish: FinishReason, reason: str) -> None:
    body = write_samples([SampledTokens(tokens=b"\0\0\0\0", logprobs=b"\0\0\0\0", finish=finish)])
    assert deserialize_sample_response(body).sequences[0].stop_reason == reason
