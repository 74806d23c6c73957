"""xorl's client, unmodified, with its model of all weights, its checkpoints and the end of its models."""

import json
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
import xorl_client
from xorl_client import types

from tests.tinker.test_hive import BASE, SENTENCES, settled
from tests.tinker.whole_hive import PYTHON, Hive, running

pytestmark = pytest.mark.skipif(not PYTHON, reason="BOMBUS_PYTHON names the environment of the hive: make test-tinker")

JOB = "bombus: {model: {path: tiny}, trainer: {enable_lora: false}}"


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hive]:
    """A hive whose job says that all weights are trained."""
    with running(tmp_path_factory.mktemp("full")) as hive:
        asked(hive, "/sync_train_config", yaml_as_string=JOB)
        yield hive


def asked(hive: Hive, path: str, **body: Any) -> Any:
    """Return the answer to a raw request."""
    data = json.dumps(body).encode() if body else None
    request = urllib.request.Request(hive.url + path, data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as response:
        return json.load(response)


def client_of(hive: Hive) -> Any:
    return xorl_client.ServiceClient(base_url=hive.url, api_key="key")


def batch() -> list[Any]:
    return [
        types.Datum(
            model_input=types.ModelInput.from_ints(tokens[:-1]),
            loss_fn_inputs={"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)},
        )
        for tokens in SENTENCES
    ]


def learn(model: Any, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        losses.append(settled(model.forward_backward(batch(), "causallm_loss")).metrics["loss:mean"])
        settled(model.optim_step(types.AdamParams(learning_rate=1e-3)))
    return losses


def begin_at_base(full: Hive) -> None:
    """Forget what the model of all weights has learnt, which may be from another test."""
    assert asked(full, "/api/v1/kill_session", model_id="default", save_checkpoint=False, reset_weights=True)["success"]


def test_a_model_of_all_weights_is_registered_trained_killed_and_begun_again(full: Hive) -> None:
    assert asked(full, "/api/v1/session_info")["registered_models"] == ["default"]
    client = client_of(full)
    model = settled(client.create_training_client(base_model=BASE))
    begin_at_base(full)
    losses = learn(model, 6)
    assert losses[-1] < losses[0]
    (run,) = settled(client.create_rest_client().list_training_runs()).training_runs
    assert (run.training_run_id, run.base_model, run.is_lora) == ("default", BASE, False)
    killed = settled(model.kill_session(save_checkpoint=True))
    assert killed.success, killed.message
    info = settled(client.create_rest_client().get_weights_info(killed.checkpoint_path))
    assert (info.base_model, info.is_lora) == (BASE, False)
    fresh = settled(client.create_training_client(base_model=BASE))
    assert learn(fresh, 1) == pytest.approx(losses[:1], abs=1e-6), "it begins at the base again"
    settled(fresh.load_state_with_optimizer(killed.checkpoint_path))
    gone_on = learn(fresh, 1)
    assert gone_on[0] < losses[-1], "and a checkpoint goes on"


def test_reset_weights_begins_again_at_the_base(full: Hive) -> None:
    client = client_of(full)
    model = settled(client.create_training_client(base_model=BASE))
    begin_at_base(full)
    losses = learn(model, 3)
    begin_at_base(full)
    assert learn(model, 3) == losses


def test_checkpoints_are_saved_with_and_without_names_listed_and_deleted(hive: Hive) -> None:
    client = client_of(hive)
    model = settled(client.create_lora_training_client(base_model=BASE, rank=4, model_id="saved"))
    learn(model, 1)
    unnamed = [settled(model.save_state()).path for _ in range(2)]
    named = [settled(model.save_state("again")).path for _ in range(2)]
    assert len(set(unnamed)) == 2
    assert set(named) == {"xorl://saved/weights/again"}
    sampler = settled(model.save_weights_for_sampler("step-1")).path
    rest = client.create_rest_client(model_id="saved")
    listed = settled(rest.list_checkpoints()).checkpoints
    assert [each.path for each in listed] == [sampler, named[0], *reversed(unnamed)]
    assert [each.checkpoint_type for each in listed] == ["sampler", "training", "training", "training"]
    assert all((each.size_bytes or 0) > 1000 for each in listed)
    assert settled(rest.get_weights_info(sampler)).lora_rank == 4
    assert settled(rest.delete_checkpoint(sampler)).success
    assert settled(model.delete_checkpoint("weights/again")).success
    assert not settled(model.delete_checkpoint("weights/again")).success
    assert [each.path for each in settled(model.list_checkpoints()).checkpoints] == list(reversed(unnamed))
    with pytest.raises(Exception, match="cannot be the name of a checkpoint"):
        settled(model.save_state("../outside"))


def test_a_model_that_is_unloaded_takes_nothing_any_more(hive: Hive) -> None:
    client = client_of(hive)
    model = settled(client.create_lora_training_client(base_model=BASE, rank=4, model_id="unloaded"))
    learn(model, 1)
    assert settled(model.unload()).model_id == "unloaded"
    with pytest.raises(Exception, match="has ended"):
        settled(model.optim_step(types.AdamParams()))
    again = settled(client.create_lora_training_client(base_model=BASE, rank=4, model_id="unloaded"))
    assert len(learn(again, 1)) == 1


def test_a_session_is_created_with_its_adapter_by_a_plain_request(hive: Hive) -> None:
    opened = asked(hive, "/api/v1/create_session", session_id="plain", base_model=BASE, lora_config={"rank": 8})
    assert opened["success"], opened
    asked(hive, "/api/v1/session_heartbeat", session_id="plain")
    runs = {run["training_run_id"]: run["lora_rank"] for run in asked(hive, "/api/v1/training_runs")["training_runs"]}
    assert runs["plain"] == 8
    killed = asked(hive, "/api/v1/kill_session", model_id="plain")
    assert killed["checkpoint_path"].startswith("xorl://plain/weights/ended-")


def test_a_client_goes_on_from_a_state_while_its_old_model_lives(hive: Hive) -> None:
    service = client_of(hive)
    model = service.create_lora_training_client(base_model="tiny", rank=4, model_id="goes-on")
    learn(model, 2)
    path = model.save_state("kept").result().path
    again = service.create_training_client_from_state(path, base_model="tiny", rank=4)
    assert again.model_id == "goes-on"
    learn(again, 1)
    assert again.load_state("goes-on/kept").result().path == path
    health = again.health_check()
    assert (health["status"], health["engine_running"]) == ("healthy", True)
    with pytest.raises(Exception, match="exists: end it first"):
        service.create_lora_training_client(base_model="tiny", rank=8, model_id="goes-on")
