"""xorl-client's requests, as it writes them, and our answers, as it reads them."""

from array import array
from typing import Any

import msgspec
import numpy
import pytest
from xorl_client import SamplingClient, types
from xorl_client.client.chunked_helpers import combine_fwd_bwd_output_results
from xorl_client.types.future_retrieve_response import parse_future_retrieve_response

from bombus.hive.records import FinishReason
from bombus.operations import (
    AdamParams,
    AdapterSpec,
    Array,
    Category,
    CheckpointKind,
    CheckpointSaved,
    CreateModel,
    DType,
    EndModel,
    Failed,
    ForwardBackward,
    LossSpec,
    ModelEnded,
    ModelReady,
    OptimStep,
    Reduction,
    SaveWeights,
    Scores,
    StepTaken,
)
from bombus_gateway.operations_wire.data.json_data import read_json_data
from bombus_gateway.operations_wire.dialects import TrainingDialect
from bombus_gateway.operations_wire.futures import failed, read_retrieve, try_again
from bombus_gateway.operations_wire.generate import read_generate, write_generated
from bombus_gateway.operations_wire.models import AdapterDefaults, drawn_seed, read_create_model
from bombus_gateway.operations_wire.results import kill_session_answer, write_result
from bombus_gateway.operations_wire.samples import SampledTokens
from bombus_gateway.operations_wire.steps import read_optim_step
from bombus_gateway.operations_wire.submission import Submission

XORL = TrainingDialect.XORL


def body(data: list[Any], loss: str, params: dict[str, Any] | None = None) -> bytes:
    """Return what `TrainingClient.forward_backward` posts."""
    given: dict[str, Any] = {"data": [each.to_dict() for each in data], "loss_fn": loss}
    if params:
        given["loss_fn_params"] = params
    return msgspec.json.encode({"model_id": "default", "seq_id": 1, "forward_backward_input": given})


def datum(tokens: list[int], **inputs: Any) -> Any:
    return types.Datum(model_input=types.ModelInput.from_ints(tokens), loss_fn_inputs=inputs)


def read(given: bytes) -> tuple[Submission, ForwardBackward]:
    submission = read_json_data(given, forward_only=False)
    assert isinstance(submission.operation, ForwardBackward), submission.operation
    return submission, submission.operation


def float32s(*values: float) -> Array:
    return Array.of(DType.FLOAT32, values)


def test_labels_that_the_client_tags_as_floats_are_tokens() -> None:
    labels = [-100, 6, 7]
    assert datum([5, 6, 7], labels=labels).to_dict()["loss_fn_inputs"]["labels"]["dtype"] == "float32"
    _, operation = read(body([datum([5, 6, 7], labels=labels)], "causallm_loss"))
    assert array("i", operation.data[0].tokens).tolist() == [5, 6]
    assert operation.data[0].inputs["target_tokens"] == Array.of(DType.INT64, [6, 7])


def test_rl_inputs_of_lists_and_arrays_are_read() -> None:
    made = datum(
        [5, 6], target_tokens=[6, 7], logprobs=[-1.0, -2.0], advantages=numpy.array([0.5, -0.5]), ref_logprobs=[0, 0]
    )
    _, operation = read(body([made], "drgrpo", {"beta": 0.1, "kl_type": "k3"}))
    assert operation.loss == LossSpec("drgrpo", {"beta": 0.1, "kl_type": "k3"})
    assert operation.data[0].inputs["advantages"] == float32s(0.5, -0.5)
    assert operation.data[0].inputs["ref_logprobs"] == float32s(0.0, 0.0)


def test_the_client_reads_scores_as_arrays_and_combines_them() -> None:
    submission, _ = read(body([datum([5, 6], target_tokens=[6, 7])], "cross_entropy"))
    outputs = ({"logprobs": float32s(-1.0, -2.0), "elementwise_loss": float32s(1.0, 2.0)},)
    answer = write_result(XORL, submission, Scores(outputs=outputs, loss=3.0, tokens=2, metrics={"kl": 0.5}))
    found = parse_future_retrieve_response(msgspec.json.decode(answer.body))
    assert isinstance(found, types.ForwardBackwardOutput)
    (one,) = found.loss_fn_outputs
    assert one["logprobs"].to_numpy().tolist() == [-1.0, -2.0]
    assert one["elementwise_loss"].tolist() == [1.0, 2.0]
    assert one["loss"]["data"][0] == 3.0
    combined = combine_fwd_bwd_output_results([found, found])
    assert combined.metrics["loss:sum"] == 6.0
    assert combined.metrics["loss:mean"] == 1.5
    assert combined.metrics["valid_tokens:sum"] == 4.0


@pytest.mark.parametrize(
    ("config", "adapter"),
    [
        (types.LoraConfig(rank=8), AdapterSpec(rank=8, alpha=32.0)),
        (
            types.LoraConfig(rank=8, alpha=16, target_modules=["q_proj"]),
            AdapterSpec(rank=8, alpha=16.0, targets=("q_proj",)),
        ),
    ],
)
def test_a_model_is_made(config: Any, adapter: AdapterSpec) -> None:
    given = {"model_id": "mine", "base_model": "b", "lora_config": config.to_dict()}
    submission = read_create_model(XORL, msgspec.json.encode(given), AdapterDefaults())
    assert submission.operation == CreateModel(
        base="b", adapter=msgspec.structs.replace(adapter, seed=drawn_seed("mine"))
    )
    answer = write_result(XORL, submission, ModelReady())
    found = parse_future_retrieve_response(msgspec.json.decode(answer.body))
    assert found == types.CreateModelResponse(model_id="mine")


def test_a_step_is_taken() -> None:
    given = {"model_id": "default", "seq_id": 2, "adam_params": types.AdamParams(learning_rate=2e-4).to_dict()}
    submission = read_optim_step(XORL, msgspec.json.encode(given))
    adam = AdamParams(learning_rate=2e-4, grad_clip_norm=5.0)
    assert submission.operation == OptimStep(adam=adam, reduction=Reduction.TOKEN_MEAN)
    answer = write_result(XORL, submission, StepTaken(step=1, divisor=7.0, grad_norm=0.5))
    found = parse_future_retrieve_response(msgspec.json.decode(answer.body))
    assert isinstance(found, types.OptimStepResponse)
    assert found.metrics["grad_norm"] == 0.5


def test_a_checkpoint_has_a_path() -> None:
    operation = SaveWeights(checkpoint=CheckpointKind.SAMPLER, name="a", overwrite=True)
    saved = CheckpointSaved(checkpoint=CheckpointKind.SAMPLER, name="a", folder="f", address="00", size_bytes=1)
    answer = write_result(XORL, Submission(model="m", seq=1, operation=operation), saved)
    found = types.SaveWeightsForSamplerResponse.from_dict(msgspec.json.decode(answer.body))
    assert (found.path, found.model_path) == ("xorl://m/sampler_weights/a", "sampler_weights/a")


def test_a_model_ends() -> None:
    answer = write_result(XORL, Submission(model="m", seq=0, operation=EndModel()), ModelEnded())
    found = parse_future_retrieve_response(msgspec.json.decode(answer.body))
    assert found == types.UnloadModelResponse(model_id="m", type="unload_model")
    killed = types.KillSessionResponse.from_dict(kill_session_answer(XORL, "m", ModelEnded()))
    assert killed.success


def test_what_has_to_wait_and_what_failed_are_understood() -> None:
    answer = try_again(read_retrieve(b'{"request_id": "r"}'), "behind run X", "paused_capacity")
    found = parse_future_retrieve_response(msgspec.json.decode(answer.body))
    assert isinstance(found, types.TryAgainResponse)
    assert (found.queue_state, found.queue_state_reason) == ("paused_capacity", "behind run X")
    answer = failed(Failed(error="why", category=Category.USER))
    found = parse_future_retrieve_response(msgspec.json.decode(answer.body))
    assert isinstance(found, types.RequestFailedResponse)
    assert (found.error, found.category.value) == ("why", "user")


@pytest.mark.parametrize(("finish", "reason"), [(FinishReason.STOP, "stop"), (FinishReason.LENGTH, "length")])
def test_the_sampling_client_is_understood_and_understands(finish: FinishReason, reason: str) -> None:
    params = types.SamplingParams(max_tokens=5, stop=["x"], stop_token_ids=[3], seed=1).to_dict()
    given = {"input_ids": [1, 2], "sampling_params": {**params, "n": 1}, "return_logprob": True, "lora_path": "a"}
    asked = read_generate(msgspec.json.encode(given)).asked
    assert (asked.sampling.max_tokens, asked.stops, asked.sampling.stop_token_ids) == (5, ("x",), (3,))
    one = SampledTokens(tokens=array("i", [5]).tobytes(), logprobs=array("f", [-1.0]).tobytes(), finish=finish)
    answer = write_generated([one], ["a"], 2, logprobs=True)
    client = SamplingClient.__new__(SamplingClient)  # nothing of its own is used to read an answer
    found = client._parse_sample_response(answer, return_logprobs=True)
    assert (found.tokens, found.logprobs, found.stop_reason) == ([5], [-1.0], reason)
