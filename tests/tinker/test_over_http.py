"""Both clients as their users use them, over HTTP, against a server of what we read and write."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import xorl_client
from xorl_client import types as xorl_types
from xorl_client.exceptions import RequestFailedError as XorlRequestFailedError

import tinker
from bombus.operations import (
    AbortEpoch,
    CheckpointKind,
    CreateModel,
    Failed,
    ForwardBackward,
    LoadWeights,
    OptimStep,
    Reduction,
    SaveWeights,
)
from tests.tinker.served import Served, Server
from tinker import types


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    server = Server()
    yield server
    server.close()


@pytest.fixture
def trained(server: Server) -> Any:
    service = tinker.ServiceClient(base_url=server.url, api_key="tml-key")
    return service.create_lora_training_client(base_model="b", rank=8).result()


@pytest.fixture
def xorl(server: Server) -> Any:
    service = xorl_client.ServiceClient(base_url=server.url, api_key="key")
    made = service.create_lora_training_client(base_model="b", rank=8)
    return made.result() if hasattr(made, "result") else made


def datum(tokens: list[int], **inputs: Any) -> Any:
    given = inputs or {"target_tokens": tokens, "weights": [1.0] * len(tokens)}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens), loss_fn_inputs=given)


def operations(served: Served, kind: type) -> list[Any]:
    return [each.operation for each in served.submissions if isinstance(each.operation, kind)]


# ---- Tinker -------------------------------------------------------------------------------------------------------


def test_a_batch_goes_out_in_parts_and_comes_back_in_its_order(server: Server, trained: Any) -> None:
    batch = [datum([index, 7]) for index in range(1, 1501)]
    found = trained.forward_backward(batch, "cross_entropy").result()
    assert [output["logprobs"].data for output in found.loss_fn_outputs] == [[-float(i)] * 2 for i in range(1, 1501)]
    assert found.metrics["loss:sum"] == 3000.0
    assert sorted(each.seq for each in server.served.submissions) == [0, 1, 2]
    assert trained.optim_step(types.AdamParams(learning_rate=2e-4)).result().metrics["grad_norm"] == 0.5
    (step,) = operations(server.served, OptimStep)
    assert (step.adam.learning_rate, step.reduction) == (2e-4, Reduction.SUM)
    assert server.served.statuses[408] > 0, "each was asked for too early once"


def test_forward_leaves_no_gradient(server: Server, trained: Any) -> None:
    trained.forward([datum([1, 2])], "cross_entropy").result()
    assert [each.forward_only for each in operations(server.served, ForwardBackward)] == [True]


def test_room_is_made_for_a_large_result_first(server: Server, trained: Any) -> None:
    (output,) = trained.forward([datum([3] * 300_000)], "cross_entropy").result().loss_fn_outputs
    assert output["logprobs"].data[-1] == -3.0
    assert server.served.sizes_told == 1


def test_a_custom_loss_over_sparse_targets_sends_its_gradient_back(server: Server, trained: Any) -> None:
    targets = torch.zeros(4, 12, dtype=torch.long)
    targets[:, 0] = 3
    made = datum([5, 2, 3, 4], target_tokens=targets, weights=torch.zeros(4, 12))

    def loss(data: Any, logprobs: list[torch.Tensor]) -> Any:
        return (logprobs[0][:, 0] ** 2).sum(), {"mine": 1.0}

    assert trained.forward_backward_custom([made], loss).result().metrics["loss:sum"] == 100.0  # four times 5 * 5
    forward, backward = operations(server.served, ForwardBackward)
    assert (forward.forward_only, backward.forward_only) == (True, False)
    weights = backward.data[0].inputs["weights"]
    assert weights.shape == (4, 12)
    assert weights.values()[::12] == [10.0] * 4  # minus the derivative of the square, 2 * -5
    assert sum(weights.values()) == 40.0


def test_a_request_that_fails_says_why_and_the_run_goes_on(server: Server, trained: Any) -> None:
    with pytest.raises(tinker.RequestFailedError, match="There is no loss 'hinge'; use one of cross_entropy"):
        trained.forward_backward([datum([1, 2])], "hinge").result()
    trained.optim_step(types.AdamParams()).result()
    assert [type(each.operation) for each in server.served.submissions] == [CreateModel, Failed, OptimStep]


def test_a_model_is_saved_sampled_and_begun_from(server: Server, trained: Any) -> None:
    path = trained.save_state("a", ttl_seconds=3600).result().path
    assert path == "tinker://S:train:0/weights/a"
    assert trained.save_weights_for_sampler("b").result().path == "tinker://S:train:0/sampler_weights/b"
    sampler = trained.save_weights_and_get_sampling_client().result()
    prompt = types.ModelInput.from_ints([1, 2, 3])
    params = types.SamplingParams(max_tokens=3, stop=[2])
    found = sampler.sample(prompt, num_samples=2, sampling_params=params).result()
    assert [(each.tokens, each.logprobs, each.stop_reason) for each in found.sequences] == [
        ([5, 2], [-1, -2], "stop")
    ] * 2
    assert sampler.compute_logprobs(prompt).result() == [None, -0.5, -0.5]
    service = tinker.ServiceClient(base_url=server.url, api_key="tml-key")
    service.create_training_client_from_state_with_optimizer(path).result()
    assert operations(server.served, CreateModel)[1].checkpoint == "S:train:0/training/a"
    names = [each.name for each in operations(server.served, SaveWeights)]
    assert names == ["a", "b", "sample-0"]


# ---- xorl ---------------------------------------------------------------------------------------------------------


def labelled(tokens: list[int], labels: list[int]) -> Any:
    return xorl_types.Datum(model_input=xorl_types.ModelInput.from_ints(tokens), loss_fn_inputs={"labels": labels})


def test_xorl_trains_on_labels(server: Server, xorl: Any) -> None:
    found = xorl.forward_backward([labelled([5, 6, 7], [-100, 6, 7])], "causallm_loss").result()
    (output,) = found.loss_fn_outputs
    assert output["logprobs"].data == [-5.0, -5.0]
    assert output["loss"]["data"][0] == 10.0
    xorl.forward([labelled([5, 6, 7], [-100, 6, 7])], "causallm_loss").result()
    assert xorl.optim_step(xorl_types.AdamParams(learning_rate=2e-4)).result().metrics["grad_norm"] == 0.5
    (step,) = operations(server.served, OptimStep)
    assert (step.adam.learning_rate, step.adam.grad_clip_norm, step.reduction) == (2e-4, 5.0, Reduction.TOKEN_MEAN)
    assert [each.forward_only for each in operations(server.served, ForwardBackward)] == [False, True]
    assert server.served.statuses[408] == 0, "xorl's client would ask again without a pause"


def test_xorls_failures_say_why_and_the_run_goes_on(server: Server, xorl: Any) -> None:
    with pytest.raises(XorlRequestFailedError, match="There is no loss 'hinge'"):
        xorl.forward_backward([labelled([5, 6], [5, 6])], "hinge").result()
    xorl.optim_step(xorl_types.AdamParams()).result()
    assert not operations(server.served, AbortEpoch)


def test_xorl_saves_and_loads(server: Server, xorl: Any) -> None:
    assert xorl.save_state("a").result().path == "xorl://default/weights/a"
    assert xorl.save_weights_for_sampler("b").result().path == "xorl://default/sampler_weights/b"
    assert xorl.load_state("xorl://default/weights/a").result().path == "xorl://default/weights/a"
    (loaded,) = operations(server.served, LoadWeights)
    assert loaded.checkpoint == "default/training/a"
    kinds = [each.checkpoint for each in operations(server.served, SaveWeights)]
    assert kinds == [CheckpointKind.TRAINING, CheckpointKind.SAMPLER]
