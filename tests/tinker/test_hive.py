"""Both clients, unmodified, against a whole hive whose trainer really trains."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import xorl_client
from xorl_client import types as xorl_types

import tinker
from tests.tinker.lossy import LossyProxy
from tests.tinker.whole_hive import PYTHON, Hive, running
from tinker import types

BASE = "tiny"
ROOT = Path(__file__).parents[2]
SENTENCES = ([5, 6, 7, 8, 9, 10], [11, 12, 13, 14], [9, 8, 7, 6, 5])

pytestmark = pytest.mark.skipif(not PYTHON, reason="BOMBUS_PYTHON names the environment of the hive: make test-tinker")


def batch() -> list[Any]:
    """Return sentences whose next tokens are to be learnt."""
    return [datum(tokens[:-1], tokens[1:]) for tokens in SENTENCES]


def datum(tokens: list[int], targets: list[int]) -> Any:
    inputs = {"target_tokens": targets, "weights": [1.0] * len(targets)}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens), loss_fn_inputs=inputs)


def made(service: Any, rank: int, seed: int) -> Any:
    return service.create_lora_training_client(base_model=BASE, rank=rank, seed=seed).result()


def learn(model: Any, steps: int, rate: float = 1e-2) -> list[float]:
    """Train on the batch again and again, and return the loss of each time."""
    losses = []
    for _ in range(steps):
        scored = model.forward_backward(batch(), "cross_entropy")
        stepped = model.optim_step(types.AdamParams(learning_rate=rate))
        losses.append(scored.result().metrics["loss:sum"])
        stepped.result()
    return losses


def logprobs(model: Any) -> list[list[float]]:
    found = model.forward(batch(), "cross_entropy").result()
    return [list(output["logprobs"].data) for output in found.loss_fn_outputs]


# ---- Tinker -------------------------------------------------------------------------------------------------------


def test_a_repeated_batch_is_learnt_and_forward_scores_as_the_loss_does(service: Any) -> None:
    model = service.create_lora_training_client(base_model=BASE, rank=8, seed=1).result()
    losses = learn(model, 12)
    assert losses[-1] < 0.7 * losses[0]
    rows = logprobs(model)
    assert rows == logprobs(model), "forward leaves nothing behind"
    again = model.forward_backward(batch(), "cross_entropy").result().metrics["loss:sum"]
    assert -sum(map(sum, rows)) == pytest.approx(again, abs=1e-4)


def test_a_model_that_was_saved_goes_on_bit_for_bit(service: Any) -> None:
    model = service.create_lora_training_client(base_model=BASE, rank=4, seed=2).result()
    learn(model, 3)
    path = model.save_state("three").result().path
    whole = learn(model, 3)
    loaded = service.create_training_client_from_state_with_optimizer(path).result()
    assert learn(loaded, 3) == whole
    assert logprobs(loaded) == logprobs(model)
    fresh = service.create_training_client_from_state(path).result()
    assert learn(fresh, 3)[0] == whole[0]
    assert learn(fresh, 1) != learn(loaded, 1), "without the optimizer's state it goes on otherwise"


def test_two_models_of_different_rank_are_trained_at_once_as_each_alone(service: Any) -> None:
    alone = [learn(made(service, rank=rank, seed=3), 3) for rank in (4, 16)]
    both = [made(service, rank=rank, seed=3) for rank in (4, 16)]
    losses: list[list[float]] = [[], []]
    for _ in range(3):
        futures = [(each.forward_backward(batch(), "cross_entropy"), step(each)) for each in both]
        for found, (scored, stepped) in zip(losses, futures):
            found.append(scored.result().metrics["loss:sum"])
            stepped.result()
    assert losses == alone


def step(model: Any) -> Any:
    return model.optim_step(types.AdamParams(learning_rate=1e-2))


def test_a_loss_of_the_callers_own_is_learnt(service: Any) -> None:
    model = service.create_lora_training_client(base_model=BASE, rank=8, seed=4).result()

    def loss(data: Any, rows: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        value = -torch.cat(list(rows)).mean()
        return value, {"mean": float(value)}

    losses = []
    for _ in range(6):
        losses.append(model.forward_backward_custom(batch(), loss).result().metrics["mean"])
        step(model).result()
    assert losses[-1] < losses[0]


def test_what_is_wrong_fails_its_future_in_words_and_the_next_step_says_so(service: Any) -> None:
    model = service.create_lora_training_client(base_model=BASE, rank=4, seed=5).result()
    with pytest.raises(tinker.RequestFailedError, match="token"):
        model.forward_backward([datum([10**6], [1])], "cross_entropy").result()
    with pytest.raises(tinker.RequestFailedError, match="forward_backward"):
        step(model).result()
    assert len(learn(model, 1)) == 1


def test_answers_that_are_lost_and_requests_that_come_twice_change_nothing(url: str, service: Any) -> None:
    whole = learn(made(service, rank=8, seed=7), 10)
    proxy = LossyProxy(url, seed=1)
    try:
        lossy = tinker.ServiceClient(base_url=proxy.url, api_key="tml-key")
        assert learn(made(lossy, rank=8, seed=7), 10) == whole
    finally:
        proxy.close()
    assert proxy.lost > 3
    assert proxy.repeated > 3


def test_a_trainer_and_a_gateway_that_are_killed_in_the_middle_change_nothing(hive: Hive, service: Any) -> None:
    whole = learn(made(service, rank=8, seed=8), 9)
    model = made(service, rank=8, seed=8)
    losses = learn(model, 3)
    hive.kill("trainer")
    losses += learn(model, 3)
    hive.kill("gateway")
    losses += learn(model, 3)
    assert losses == whole


def test_the_example_learns(tmp_path: Path) -> None:
    """It trains all weights, so it has a hive for itself."""
    command = [sys.executable, str(ROOT / "examples/tinker_sft.py")]
    with running(tmp_path) as hive:
        environment = {**os.environ, "TINKER_BASE_URL": hive.url, "TINKER_TELEMETRY": "0"}
        ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    losses = [float(line.split()[3]) for line in ran.stdout.splitlines() if line.startswith("step ")]
    assert losses[-1] < losses[0] / 2
    assert "tinker://" in ran.stdout


def test_models_and_checkpoints_are_listed(service: Any) -> None:
    model = service.create_lora_training_client(base_model=BASE, rank=4, seed=6).result()
    path = model.save_state("listed").result().path
    rest = service.create_rest_client()
    run = path.removeprefix("tinker://").split("/")[0]
    assert rest.get_training_run(run).result().lora_rank == 4
    assert [each.tinker_path for each in rest.list_checkpoints(run).result().checkpoints] == [path]
    with pytest.raises(tinker.RequestFailedError, match="listed"):
        model.save_state("listed").result()
    rest.delete_checkpoint_from_tinker_path(path).result()
    assert rest.list_checkpoints(run).result().checkpoints == []


# ---- xorl ---------------------------------------------------------------------------------------------------------


def test_xorls_client_learns_a_repeated_batch(url: str) -> None:
    client = xorl_client.ServiceClient(base_url=url, api_key="key")
    model = settled(client.create_lora_training_client(base_model=BASE, rank=8))
    data = [
        xorl_types.Datum(
            model_input=xorl_types.ModelInput.from_ints(tokens[:-1]),
            loss_fn_inputs={"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)},
        )
        for tokens in SENTENCES
    ]
    losses = []
    for _ in range(30):
        losses.append(settled(model.forward_backward(data, "causallm_loss")).metrics["loss:mean"])
        settled(model.optim_step(xorl_types.AdamParams(learning_rate=1e-2)))
    assert losses[-1] < losses[0] / 2


def settled(future: Any) -> Any:
    """Return what a future of xorl's client has, or what is no future."""
    result: Callable[[], Any] | None = getattr(future, "result", None)
    return future if result is None else result()
