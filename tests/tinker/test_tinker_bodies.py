"""Tinker's requests in JSON, as its SDK writes them, and our answers, as its SDK reads them."""

from typing import Any

import msgspec
import pytest
from tinker._compat import model_dump
from tinker.lib._pydantic_conv import deserialize_json_response
from tinker.types._pydantic_types.save_weights_for_sampler_response import SaveWeightsForSamplerResponseInternal
from tinker.types.create_model_request import CreateModelRequest
from tinker.types.create_sampling_session_request import CreateSamplingSessionRequest
from tinker.types.future_retrieve_request import FutureRetrieveRequest
from tinker.types.load_weights_request import LoadWeightsRequest
from tinker.types.optim_step_request import OptimStepRequest
from tinker.types.request_failed_response import RequestFailedResponse
from tinker.types.sample_request import SampleRequest as SdkSampleRequest
from tinker.types.save_weights_external_request import SaveWeightsExternalRequest
from tinker.types.save_weights_for_sampler_request import SaveWeightsForSamplerRequest
from tinker.types.save_weights_request import SaveWeightsRequest
from tinker.types.try_again_response import TryAgainResponse

from bombus.hive.records import SamplingParams
from bombus.operations import (
    AdamParams,
    AdapterSpec,
    Category,
    CheckpointKind,
    CheckpointLoaded,
    CheckpointSaved,
    CreateModel,
    Failed,
    LoadWeights,
    ModelReady,
    OptimStep,
    Reduction,
    SaveWeights,
    StepTaken,
)
from bombus_gateway.operations_wire.checkpoints import read_load, read_save
from bombus_gateway.operations_wire.dialects import JSON, TrainingDialect, dialect_of
from bombus_gateway.operations_wire.futures import FutureAnswer, failed, read_retrieve, try_again
from bombus_gateway.operations_wire.models import AdapterDefaults, read_create_by_load, read_create_model
from bombus_gateway.operations_wire.results import write_result
from bombus_gateway.operations_wire.sampling import SampleRequest, read_sample, read_sampling_session
from bombus_gateway.operations_wire.steps import read_optim_step
from tinker import types

TINKER = TrainingDialect.TINKER
MODEL = "S:train:0"


def sent(route: str, request: Any) -> bytes:
    """Return the body that the SDK sends for a request, which is told to be Tinker's."""
    body = model_dump(request, exclude_unset=False, exclude_none=True, mode="json")
    assert dialect_of(f"/api/v1/{route}", JSON, body, body.get("model_id", "")) == TINKER
    return msgspec.json.encode(body)


def taken(answer: FutureAnswer, kind: type) -> Any:
    return deserialize_json_response(msgspec.json.decode(answer.body), kind)


def test_a_model_is_made() -> None:
    lora = types.LoraConfig(rank=8, seed=3)
    request = CreateModelRequest(session_id="S", model_seq_id=0, base_model="b", lora_config=lora)
    submission = read_create_model(TINKER, sent("create_model", request), AdapterDefaults())
    assert submission.model == MODEL
    assert submission.operation == CreateModel(base="b", adapter=AdapterSpec(rank=8, alpha=32.0, seed=3))
    assert taken(write_result(TINKER, submission, ModelReady()), types.CreateModelResponse).model_id == MODEL


def test_a_step_is_taken() -> None:
    params = types.AdamParams(learning_rate=3e-4, weight_decay=0.1)
    submission = read_optim_step(
        TINKER, sent("optim_step", OptimStepRequest(optim_params=params, model_id=MODEL, seq_id=2))
    )
    adam = AdamParams(learning_rate=3e-4, weight_decay=0.1)
    assert submission.operation == OptimStep(adam=adam, reduction=Reduction.SUM)
    answer = write_result(TINKER, submission, StepTaken(step=1, divisor=1.0, grad_norm=0.5))
    assert taken(answer, types.OptimStepResponse).metrics == {"optimizer_step": 1.0, "divisor": 1.0, "grad_norm": 0.5}


@pytest.mark.parametrize(
    ("route", "kind", "request_", "response"),
    [
        (
            "save_weights",
            CheckpointKind.TRAINING,
            SaveWeightsRequest(model_id=MODEL, path="a", seq_id=2),
            types.SaveWeightsResponse,
        ),
        (
            "save_weights_for_sampler",
            CheckpointKind.SAMPLER,
            SaveWeightsForSamplerRequest(model_id=MODEL, path="a", seq_id=2),
            SaveWeightsForSamplerResponseInternal,
        ),
        (
            "save_weights_external",
            CheckpointKind.EXTERNAL,
            SaveWeightsExternalRequest(model_id=MODEL, path="a", seq_id=2),
            types.SaveWeightsExternalResponse,
        ),
    ],
)
def test_a_model_is_saved(route: str, kind: CheckpointKind, request_: Any, response: type) -> None:
    submission = read_save(TINKER, kind, sent(route, request_))
    assert submission.operation == SaveWeights(checkpoint=kind, name="a")
    saved = CheckpointSaved(checkpoint=kind, name="a", folder="f", address="00", size_bytes=1)
    path = taken(write_result(TINKER, submission, saved), response).path
    assert path.startswith(f"tinker://{MODEL}/")
    loading = LoadWeightsRequest(session_id="S", model_seq_id=1, path=path, optimizer=True)
    made = read_create_by_load(sent("load_weights", loading))
    assert made.operation == CreateModel(base="", checkpoint=f"{MODEL}/{kind}/a", with_optimizer=True)
    assert taken(write_result(TINKER, made, ModelReady()), types.LoadWeightsResponse).path == path


def test_an_unnamed_checkpoint_begins_a_session_of_sampling() -> None:
    request = SaveWeightsForSamplerRequest(model_id=MODEL, sampling_session_seq_id=3, seq_id=2, kind="inflight")
    submission = read_save(TINKER, CheckpointKind.SAMPLER, sent("save_weights_for_sampler", request))
    assert submission.inflight
    saved = CheckpointSaved(checkpoint=CheckpointKind.SAMPLER, name="sample-3", folder="f", address="00", size_bytes=1)
    found = taken(write_result(TINKER, submission, saved), SaveWeightsForSamplerResponseInternal)
    assert (found.path, found.sampling_session_id) == (None, "S:sample:3")


def test_a_checkpoint_is_loaded_into_a_model() -> None:
    request = LoadWeightsRequest(model_id=MODEL, seq_id=1, path="tinker://R:train:0/weights/a", optimizer=False)
    submission = read_load(TINKER, sent("load_weights", request))
    assert submission.operation == LoadWeights(checkpoint="R:train:0/training/a")
    loaded = CheckpointLoaded(checkpoint="R:train:0/training/a", step=3)
    assert taken(write_result(TINKER, submission, loaded), types.LoadWeightsResponse).path == request.path


def test_what_has_to_wait_and_what_failed_are_understood() -> None:
    asked = FutureRetrieveRequest(request_id="r", allow_metadata_only=True)
    request = read_retrieve(sent("retrieve_future", asked))
    assert (request.dialect, request.may_be_size) == (TINKER, True)
    assert taken(try_again(request, "why"), TryAgainResponse).queue_state == "active"
    found = taken(failed(Failed(error="why", category=Category.USER)), RequestFailedResponse)
    assert (found.error, found.category.value) == ("why", "user")


@pytest.mark.parametrize(
    ("params", "sampling", "stops", "ends_at_eos"),
    [
        (types.SamplingParams(), SamplingParams(), (), True),
        (types.SamplingParams(max_tokens=5, stop=[3]), SamplingParams(max_tokens=5, stop_token_ids=(3,)), (), False),
        (types.SamplingParams(stop="x", top_k=4, seed=1), SamplingParams(top_k=4, seed=1), ("x",), False),
        (types.SamplingParams(stop=[]), SamplingParams(), (), False),
    ],
)
def test_a_sample_is_asked_for(
    params: Any, sampling: SamplingParams, stops: tuple[str, ...], ends_at_eos: bool
) -> None:
    session = CreateSamplingSessionRequest(session_id="S", sampling_session_seq_id=0, base_model="b")
    assert read_sampling_session(TINKER, sent("create_sampling_session", session)).id == "S:sample:0"
    request = SdkSampleRequest(
        prompt=types.ModelInput.from_ints([1, 2]), sampling_params=params, sampling_session_id="S:sample:0", seq_id=0
    )
    asked = read_sample(sent("asample", request)).asked
    assert isinstance(asked, SampleRequest)
    assert (asked.sampling, asked.stops, asked.ends_at_eos) == (sampling, stops, ends_at_eos)
