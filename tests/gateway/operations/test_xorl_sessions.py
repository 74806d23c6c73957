"""Models as xorl's clients know them: sessions that are models, and a model of all weights that is there by itself."""

from typing import Any

import httpx

from bombus.hive import inbox
from bombus.operations import (
    Category,
    CreateModel,
    EndModel,
    Failed,
    LoadWeights,
    Operation,
    OptimStep,
    Result,
    SaveWeights,
)
from tests.gateway.operations.scripted_trainer import OperationHive, plain_results
from tests.gateway.operations.test_routes import BASE, ask, configure, xorl_result

ADAM = {"learning_rate": 1e-4}


async def step(client: httpx.AsyncClient, seq: int, model: str = "default") -> dict[str, Any]:
    accepted = await ask(client, "optim_step", model_id=model, seq_id=seq, adam_params=ADAM)
    return await xorl_result(client, accepted)


async def test_an_engine_of_full_weights_has_its_model_without_being_asked(
    hive: OperationHive, client: httpx.AsyncClient
) -> None:
    await configure(hive, trainer={"enable_lora": False})
    assert (await client.get("session_info")).json()["registered_models"] == ["default"]
    assert "metrics" in await step(client, 1)
    assert [each for _, each in hive.executed[:1]] == [CreateModel(base=BASE)]
    made = await ask(client, "create_model", model_id="default", base_model=BASE, lora_config={"rank": 32})
    assert (await xorl_result(client, made))["model_id"] == "default"
    assert [type(each) for _, each in hive.executed] == [CreateModel, OptimStep], "it was there already"
    runs = (await client.get("training_runs")).json()
    assert [(run["training_run_id"], run["is_lora"]) for run in runs["training_runs"]] == [("default", False)]


async def test_the_model_that_is_there_by_itself_is_described_and_ended_before_its_first_operation(
    hive: OperationHive, client: httpx.AsyncClient
) -> None:
    await configure(hive, trainer={"enable_lora": False})
    info = await ask(client, "get_info", model_id="default")
    assert (info["model_id"], info["model_name"], info["is_lora"]) == ("default", BASE, False)
    assert (await ask(client, "weights_info", model_id="default"))["base_model"] == BASE
    assert (await ask(client, "list_checkpoints", model_id="default"))["checkpoints"] == []
    assert (await ask(client, "session_heartbeat", model_id="default"))["type"] == "session_heartbeat"
    assert (await ask(client, "kill_session", model_id="default"))["success"]
    assert hive.engine.clients.models == {}, "nobody has begun to use it"
    assert (await client.post("get_info", json={"model_id": "another"})).status_code == 404
    assert "metrics" in await step(client, 1)
    assert (await ask(client, "kill_session", model_id="default", save_checkpoint=False))["success"]
    assert not (await ask(client, "kill_session", model_id="default"))["success"], "it has ended"


async def test_a_client_whose_model_has_ended_is_not_given_another_one_in_its_place(
    hive: OperationHive, client: httpx.AsyncClient
) -> None:
    await configure(hive, trainer={"enable_lora": False})
    await step(client, 1)
    assert (await ask(client, "kill_session", model_id="default", save_checkpoint=False))["success"]
    assert "has ended" in (await step(client, 2))["error"]
    assert "metrics" in await step(client, 1), "but one that begins is"


async def test_an_engine_of_adapters_has_no_model_that_nobody_created(
    hive: OperationHive, client: httpx.AsyncClient
) -> None:
    await configure(hive, trainer={"enable_lora": None})
    assert (await client.get("session_info")).json()["registered_models"] == []
    assert "create it first" in (await step(client, 1))["error"]


async def test_a_session_is_created_with_its_adapter_and_lives_while_it_beats(
    hive: OperationHive, client: httpx.AsyncClient
) -> None:
    opened = await ask(client, "create_session", session_id="mine", base_model=BASE, lora_config={"rank": 4})
    assert (opened["success"], opened["session_id"]) == (True, "mine")
    (created,) = [each for _, each in hive.executed]
    assert isinstance(created, CreateModel)
    assert created.adapter is not None
    assert created.adapter.rank == 4
    assert (await ask(client, "session_heartbeat", session_id="mine"))["type"] == "session_heartbeat"
    again = await ask(client, "create_session", session_id="mine", base_model=BASE, lora_config={"rank": 4})
    assert again["message"] == "The session of mine is open."
    assert len(hive.executed) == 1
    info = (await client.get("session_info")).json()
    assert (info["registered_models"], info["loaded_adapters"], info["idle_timeout_seconds"]) == (
        ["mine"],
        ["mine"],
        7200.0,
    )
    assert (await ask(client, "weights_info", model_id="mine"))["lora_rank"] == 4
    assert "metrics" in await step(client, 1, "mine")
    await ask(client, "kill_session", model_id="mine")
    gone = await client.post("session_heartbeat", json={"session_id": "unknown"})
    assert gone.status_code == 410


async def test_a_model_that_exists_or_cannot_be_created_opens_no_session(
    hive: OperationHive, client: httpx.AsyncClient
) -> None:
    await configure(hive, trainer={"enable_lora": None, "lr": 3e-5})
    lora = {"rank": 4}
    for base in ("org/other", BASE, BASE, "org/other"):
        made = await ask(client, "create_model", model_id="mine", base_model=base, lora_config=lora)
        assert ("error" in await xorl_result(client, made)) == (base != BASE)
    (session,) = hive.engine.clients.sessions.values()
    assert session.for_model


async def test_a_model_that_is_there_is_created_again_with_an_equal_spec_alone(
    hive: OperationHive, client: httpx.AsyncClient
) -> None:
    spec = {"model_id": "mine", "base_model": BASE, "lora_config": {"rank": 4, "alpha": 8}}
    first = await xorl_result(client, await ask(client, "create_model", **spec))
    await step(client, 1, "mine")
    assert await xorl_result(client, await ask(client, "create_model", **spec)) == first, "as before load_weights"
    for other in ({"rank": 8, "alpha": 8}, {"rank": 4, "alpha": 8, "train_mlp": False}):
        refused = await xorl_result(client, await ask(client, "create_model", **{**spec, "lora_config": other}))
        assert "Model mine already exists: end it first" in refused["error"]
    assert [type(each) for _, each in hive.executed] == [CreateModel, OptimStep], "it was not begun again"


async def test_a_client_that_asks_for_a_result_shows_that_its_session_lives(
    hive: OperationHive, client: httpx.AsyncClient
) -> None:
    await ask(client, "create_session", session_id="mine", base_model=BASE, lora_config={"rank": 4})
    assert hive.gateway is not None
    await hive.gateway.heartbeats.flush()
    (key,) = hive.engine.clients.models["mine"].operations
    await ask(client, "retrieve_future", request_id=f"mine:{key}")
    await hive.gateway.heartbeats.flush()
    stored = await hive.bus.last(hive.bus.subjects.inbox_stream)
    assert stored is not None
    touch = inbox.decode_message(stored.data)
    assert isinstance(touch, inbox.Touch)
    assert touch.sessions == (hive.engine.clients.models["mine"].session,)


async def test_a_session_that_cannot_be_created_is_refused_in_words(
    hive: OperationHive, client: httpx.AsyncClient
) -> None:
    def failing(operation: Operation) -> Result:
        return Failed(error="there are no layers of this name", category=Category.USER)

    hive.answering = failing
    refused = await client.post("create_session", json={"session_id": "mine", "base_model": BASE})
    assert refused.status_code == 400
    assert "no layers of this name" in refused.text
    nothing = await client.post("create_session", json={"session_id": "b", "lora_config": {"rank": -1}})
    assert "rank of an adapter" in nothing.text


async def test_a_session_needs_no_base_where_the_engine_has_one(hive: OperationHive, client: httpx.AsyncClient) -> None:
    refused = await client.post("create_session", json={"session_id": "mine"})
    assert "base_model is missing" in refused.text
    await configure(hive, trainer={"enable_lora": None})
    assert (await ask(client, "create_session", session_id="mine"))["success"]


async def test_killing_a_session_again_gives_the_same_answer(hive: OperationHive, client: httpx.AsyncClient) -> None:
    def saving(operation: Operation) -> Result:
        if isinstance(operation, EndModel):
            saves.append(operation.save_as)
        return plain_results(operation)

    saves: list[str] = []
    hive.answering = saving
    await ask(client, "create_session", session_id="mine", base_model=BASE, lora_config={"rank": 4})
    first, again = [await ask(client, "kill_session", model_id="mine") for _ in range(2)]
    assert first == again
    assert first["success"]
    assert len(saves) == 1
    assert saves[0].startswith("ended-20")


async def test_killing_a_session_again_after_something_else_is_another_end(
    hive: OperationHive, client: httpx.AsyncClient
) -> None:
    await ask(client, "create_session", session_id="mine", base_model=BASE, lora_config={"rank": 4})
    await ask(client, "kill_session", model_id="mine", save_checkpoint=False)
    await ask(client, "create_session", session_id="mine", base_model=BASE, lora_config={"rank": 4})
    await ask(client, "kill_session", model_id="mine", save_checkpoint=False)
    assert [type(each) for _, each in hive.executed] == [CreateModel, EndModel] * 2


async def test_a_save_without_a_name_that_is_sent_again_is_one_save(
    hive: OperationHive, client: httpx.AsyncClient
) -> None:
    def naming(operation: Operation) -> Result:
        if isinstance(operation, SaveWeights) and not operation.name:
            return plain_results(SaveWeights(checkpoint=operation.checkpoint, name="20261123-101500-2"))
        return plain_results(operation)

    hive.answering = naming
    await ask(client, "create_session", session_id="mine", base_model=BASE, lora_config={"rank": 4})
    first, again = [await ask(client, "save_weights", model_id="mine", seq_id=1) for _ in range(2)]
    assert first == again
    assert (await xorl_result(client, first))["path"] == "xorl://mine/weights/20261123-101500-2"
    loaded = await ask(client, "load_weights", model_id="mine", seq_id=2, path="xorl://mine/weights/20261123-101500-2")
    await xorl_result(client, loaded)
    assert isinstance(hive.executed[-1][1], LoadWeights)


async def test_the_hive_says_whether_its_engine_runs_and_how_much_it_has_to_do(
    hive: OperationHive, client: httpx.AsyncClient
) -> None:
    idle = {"status": "ok", "engine_running": False, "active_requests": 0, "total_requests": 0}
    assert (await client.get("healthz")).json() == idle
    await ask(client, "create_session", session_id="mine", base_model=BASE, lora_config={"rank": 4})
    assert (await client.get("healthz")).json() == {**idle, "engine_running": True, "total_requests": 1}


async def test_equal_steps_without_a_number_are_steps_of_their_own(
    hive: OperationHive, client: httpx.AsyncClient
) -> None:
    await ask(client, "create_session", session_id="mine", base_model=BASE, lora_config={"rank": 4})
    for _ in range(3):
        stepped = await ask(client, "optim_step", model_id="mine", adam_params={"learning_rate": 1e-4})
        await xorl_result(client, stepped)
    assert len([each for _, each in hive.executed if isinstance(each, OptimStep)]) == 3


async def test_a_client_that_begins_to_count_again_is_another_one(
    hive: OperationHive, client: httpx.AsyncClient
) -> None:
    await ask(client, "create_session", session_id="mine", base_model=BASE, lora_config={"rank": 4})
    for _ in range(2):
        for seq in (1, 2):
            await ask(client, "optim_step", model_id="mine", seq_id=seq, adam_params=ADAM)
            await step(client, seq, "mine")
    steps = [each for _, each in hive.executed if isinstance(each, OptimStep)]
    assert len(steps) == 4, "each was sent twice, by each of two clients"
