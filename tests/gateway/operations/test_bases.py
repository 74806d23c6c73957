"""Bases by the names of the gateway's settings, over its routes, and the settings themselves."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from bombus.config.cluster import Cluster
from bombus.errors import Refused
from bombus.hive.events import Collection, EngineConfigured
from bombus.hive.state import EngineState, Phase
from bombus.host.layout import Layout, services
from bombus_gateway.operations.bases import Bases
from bombus_gateway.settings import GatewaySettings
from tests.gateway.operations.scripted_trainer import OperationHive
from tests.gateway.operations.test_routes import ask, configure, result, step

NAMED = ("meta-llama/Llama-3.2-1B=org/tiny", "tiny=org/tiny", "Qwen/Qwen3-8B-Base=/models/a=b")


@pytest.fixture
def gateway_settings() -> dict[str, Any]:
    return {"bases": NAMED}


async def create(client: httpx.AsyncClient, base: str) -> tuple[str, dict[str, Any]]:
    session = (await ask(client, "create_session", sdk_version="0.38.0", tags=[]))["session_id"]
    made = await ask(client, "create_model", session_id=session, model_seq_id=0, base_model=base)
    return f"{session}:train:0", (await result(client, made)).json()


async def capabilities(client: httpx.AsyncClient) -> list[str]:
    found = (await client.get("get_server_capabilities")).json()["supported_models"]
    return [each["model_name"] for each in found]


def test_a_name_leads_to_a_path_and_a_path_is_told_by_the_first_of_its_names() -> None:
    bases = Bases(NAMED)
    assert bases.path_of("meta-llama/Llama-3.2-1B") == bases.path_of("tiny") == "org/tiny"
    assert bases.path_of("Qwen/Qwen3-8B-Base") == "/models/a=b"
    assert bases.path_of("another") == bases.name_of("another") == "another"
    assert bases.name_of("org/tiny") == "meta-llama/Llama-3.2-1B"


def test_an_engine_that_is_offline_takes_all_names_and_one_that_serves_those_of_its_base() -> None:
    bases = Bases(NAMED)
    engine = EngineState(name="main")
    assert bases.names_of(engine, True) == ["meta-llama/Llama-3.2-1B", "tiny", "Qwen/Qwen3-8B-Base"]
    assert Bases([]).names_of(engine, True) == ["tiny", "smollm2"], "those that need no folder and no hub"
    assert Bases([]).names_of(engine, False) == [], "and only for those who may give the engine its job"
    engine.configured = engine.active = EngineConfigured(
        config="{}", config_digest="", collection=Collection(), model="org/tiny"
    )
    engine.phase = Phase.ROLLING
    assert bases.names_of(engine, True) == ["meta-llama/Llama-3.2-1B", "tiny", "org/tiny", "main"]


async def test_where_the_operator_has_given_a_job_only_the_names_of_its_base_are_listed(
    hive: OperationHive, client: httpx.AsyncClient
) -> None:
    await configure(hive, trainer={"lr": 0.5})
    assert await capabilities(client) == ["meta-llama/Llama-3.2-1B", "tiny", "org/tiny", "main"]
    _, refused = await create(client, "Qwen/Qwen3-8B-Base")
    assert "has a job for models on org/tiny" in refused["error"]


async def test_a_model_is_made_on_the_base_that_a_name_leads_to_and_answers_tell_the_name(
    hive: OperationHive, client: httpx.AsyncClient
) -> None:
    assert await capabilities(client) == ["meta-llama/Llama-3.2-1B", "tiny", "Qwen/Qwen3-8B-Base"]
    model, made = await create(client, "meta-llama/Llama-3.2-1B")
    assert made == {"model_id": model, "type": "create_model"}
    assert hive.engine.active is not None
    assert hive.engine.active.model == hive.engine.clients.models[model].base == "org/tiny"
    assert await capabilities(client) == ["meta-llama/Llama-3.2-1B", "tiny", "org/tiny", "main"]
    saved = await result(client, await ask(client, "save_weights", model_id=model, seq_id=1, path="here"))
    info = await ask(client, "get_info", model_id=model)
    weights = await ask(client, "weights_info", tinker_path=saved.json()["path"])
    run = (await client.get(f"training_runs/{model}")).json()
    (listed,) = (await client.get("training_runs")).json()["training_runs"]
    told = [
        info["model_name"],
        info["model_data"]["model_name"],
        *(each["base_model"] for each in (weights, run, listed)),
    ]
    assert told == ["meta-llama/Llama-3.2-1B"] * 5


async def test_all_names_of_a_base_and_its_path_are_the_same_model(
    hive: OperationHive, client: httpx.AsyncClient
) -> None:
    for name in ("tiny", "org/tiny", "meta-llama/Llama-3.2-1B", "main"):
        model, made = await create(client, name)
        assert made == {"model_id": model, "type": "create_model"}
        assert "metrics" in (await result(client, await step(client, model, 1))).json()
    _, refused = await create(client, "Qwen/Qwen3-8B-Base")
    assert "serves models on org/tiny" in refused["error"]


async def test_the_base_is_sampled_from_by_its_name(hive: OperationHive, client: httpx.AsyncClient) -> None:
    model, _ = await create(client, "tiny")
    session = model.partition(":")[0]
    asked = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "meta-llama/Llama-3.2-1B"}
    sampler = (await ask(client, "create_sampling_session", **asked))["sampling_session_id"]
    found = (await client.get(f"samplers/{sampler}")).json()
    assert found["base_model"] == "meta-llama/Llama-3.2-1B"
    other = await client.post("create_sampling_session", json={**asked, "base_model": "Qwen/Qwen3-8B-Base"})
    assert other.status_code == 404, "it is on another base"


def test_bases_reach_gateways_from_the_cluster_file_and_the_command_line(tmp_path: Path) -> None:
    cluster = Cluster.model_validate({"gateway": {"bases": ("a/b=tiny", "c=d e")}, "engines": {"main": {}}})
    words = services(Layout(cluster=cluster), "nats://nowhere")[-1].command
    assert words[(first := words.index("--base")) : first + 4] == (
        "--base",
        "a/b=tiny",
        "--base",
        "c=d e",
    )
    command = [sys.executable, "-m", "bombus", "up", "--dry-run", "--base", "Qwen/Qwen3-8B-Base=smollm2"]
    planned = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path, check=True).stdout
    assert "--base Qwen/Qwen3-8B-Base=smollm2" in planned


@pytest.mark.parametrize("wrong", [("a",), ("a=",), ("=b",), ("a b=c",), ("a=b", "a=c"), ("a=b\nc",)])
def test_what_is_no_name_with_a_path_or_a_name_twice_is_refused(wrong: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=r"given twice|pattern"):
        GatewaySettings(bases=wrong)
    with pytest.raises((ValueError, Refused)):
        Cluster.model_validate({"gateway": {"bases": wrong}, "engines": {"main": {}}})
