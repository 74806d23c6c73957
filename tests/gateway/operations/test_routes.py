"""The routes of training clients: a real gateway, coordinator and bus, and a trainer that is scripted."""

import asyncio
from typing import Any

import httpx

from bombus.bus import Bus
from bombus.config.job import RunConfig
from bombus.hive import inbox
from bombus.hive.state import Phase
from bombus.machine.hive_keys import HiveKeys
from bombus.operations import (
    Category,
    CreateModel,
    EndModel,
    Failed,
    ForwardBackward,
    Operation,
    OptimStep,
    Rejected,
    Result,
)
from bombus_gateway.operations_wire.messages import FORWARD_BACKWARD_OUTPUT
from tests.gateway.openai_hive import ENGINE, gateway_of, new_id
from tests.gateway.operations.scripted_trainer import OperationHive, plain_results
from tests.gateway.operations_wire.protobuf_bodies import TARGETS, chunk, datum, request

BASE = "org/tiny"


async def ask(client: httpx.AsyncClient, route: str, **body: Any) -> dict[str, Any]:
    response = await client.post(route, json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


async def result(client: httpx.AsyncClient, accepted: dict[str, Any]) -> httpx.Response:
    body = {"request_id": accepted["request_id"], "allow_metadata_only": False}
    while (response := await client.post("retrieve_future", json=body)).status_code == 408:
        pass
    return response


async def open_model(client: httpx.AsyncClient, number: int = 0, session: str = "") -> str:
    """Create a model of Tinker's client and return its id, once it is there."""
    session = session or (await ask(client, "create_session", sdk_version="0.38.0", tags=[]))["session_id"]
    lora = {"rank": 8, "train_attn": True, "train_mlp": True, "train_unembed": True}
    made = await ask(client, "create_model", session_id=session, model_seq_id=number, base_model=BASE, lora_config=lora)
    answer = (await result(client, made)).json()
    assert answer == {"model_id": f"{session}:train:{number}", "type": "create_model"}
    return f"{session}:train:{number}"


async def forward_backward(client: httpx.AsyncClient, model: str, seq: int, **more: Any) -> dict[str, Any]:
    body = request(datum(chunk(5, 6), target_tokens=TARGETS), model=model, seq=seq, **more)
    response = await client.post("forward_backward", content=body, headers={"content-type": "application/x-protobuf"})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


async def step(client: httpx.AsyncClient, model: str, seq: int) -> dict[str, Any]:
    return await ask(client, "optim_step", model_id=model, seq_id=seq, adam_params={"learning_rate": 1e-4})


async def test_a_model_is_made_on_an_engine_that_was_offline_and_trained_in_the_order_of_the_requests(
    hive: OperationHive, client: httpx.AsyncClient
) -> None:
    model = await open_model(client)
    scored = await forward_backward(client, model, 1)
    stepped = await step(client, model, 2)
    answer = await result(client, scored)
    assert answer.headers["content-type"] == "application/x-protobuf"
    output = FORWARD_BACKWARD_OUTPUT.FromString(answer.content)
    assert output.metrics["loss:sum"] == 2.0
    assert (await result(client, stepped)).json()["metrics"]["grad_norm"] == 0.5
    assert [type(each) for _, each in hive.executed] == [CreateModel, ForwardBackward, OptimStep]
    assert hive.engine.active is not None
    assert hive.engine.active.model == BASE


async def test_a_request_that_is_sent_again_is_one_operation_with_one_result(
    hive: OperationHive, client: httpx.AsyncClient
) -> None:
    model = await open_model(client)
    first, second = await asyncio.gather(*[forward_backward(client, model, 1) for _ in range(2)])
    assert first == second
    assert (await result(client, first)).content == (await result(client, first)).content
    again = await forward_backward(client, model, 1)
    assert again == first
    assert len(hive.executed) == 2


async def test_another_body_under_the_same_number_fails_and_the_first_one_stands(
    hive: OperationHive, client: httpx.AsyncClient
) -> None:
    model = await open_model(client)
    first = await step(client, model, 1)
    other = await ask(client, "optim_step", model_id=model, seq_id=1, adam_params={"learning_rate": 1.0})
    failure = (await result(client, other)).json()
    assert failure["category"] == "user"
    assert "a different body" in failure["error"]
    assert "metrics" in (await result(client, first)).json()


async def test_what_is_wrong_with_a_request_is_said_by_its_future_and_the_trainer_learns_of_it(
    hive: OperationHive, client: httpx.AsyncClient
) -> None:
    model = await open_model(client)
    wrong = await forward_backward(client, model, 1, loss="no_such_loss")
    failure = (await result(client, wrong)).json()
    assert "no_such_loss" in failure["error"]
    assert failure["category"] == "user"
    assert isinstance(hive.executed[-1][1], Rejected)
    unknown = await forward_backward(client, "s-none:train:0", 1)
    assert "no model" in (await result(client, unknown)).json()["error"].lower()
    assert "metrics" in (await result(client, await step(client, model, 2))).json(), "the run goes on"


async def test_an_operation_that_fails_says_so_with_its_category(
    hive: OperationHive, client: httpx.AsyncClient
) -> None:
    def failing(operation: Operation) -> Result:
        if isinstance(operation, OptimStep):
            return Failed(error="the gradient is not finite", category=Category.USER)
        return plain_results(operation)

    hive.answering = failing
    model = await open_model(client)
    failure = (await result(client, await step(client, model, 1))).json()
    assert failure == {"error": "the gradient is not finite", "category": "user"}


async def test_a_result_is_read_at_another_gateway_and_while_it_waits_it_says_for_what(
    hive: OperationHive, client: httpx.AsyncClient, bus: Bus
) -> None:
    model = await open_model(client)
    hive.may_work.clear()
    accepted = await step(client, model, 1)
    async with gateway_of(bus) as (_, url), httpx.AsyncClient(base_url=f"{url}/api/v1", timeout=60.0) as other:
        held = asyncio.create_task(other.post("retrieve_future", json={"request_id": accepted["request_id"]}))
        await asyncio.sleep(0)
        hive.may_work.set()
        assert "metrics" in (await held).json()
    gone = await client.post("retrieve_future", json={"request_id": "nothing:1", "allow_metadata_only": True})
    assert gone.status_code == 410


async def test_a_checkpoint_is_not_deleted_while_an_operation_waits_to_load_it(
    hive: OperationHive, client: httpx.AsyncClient
) -> None:
    model = await open_model(client)
    saved = await ask(client, "save_weights", model_id=model, seq_id=1, path="x")
    path = (await result(client, saved)).json()["path"]
    hive.may_work.clear()
    loads = await ask(client, "load_weights", model_id=model, seq_id=2, path=path, optimizer=True)
    of_run = f"training_runs/{model}/checkpoints/weights/x"
    refused = await client.delete(of_run)
    assert refused.status_code == 400
    assert f"{model}/training/x is about to be loaded by operation 2 of model {model}" in refused.text
    hive.may_work.set()
    await result(client, loads)
    assert (await client.delete(of_run)).status_code == 204


async def test_a_session_beats_until_it_is_finished_and_its_models_are_saved(
    hive: OperationHive, client: httpx.AsyncClient
) -> None:
    model = await open_model(client)
    session = model.removesuffix(":train:0")
    assert (await ask(client, "session_heartbeat", session_id=session))["type"] == "session_heartbeat"
    await ask(client, f"sessions/{session}/finish", reason={"type": "success"})
    assert (await client.post("session_heartbeat", json={"session_id": session})).status_code == 410
    await hive.follower.wait_for(lambda _: not hive.engine.clients.open_models, 30)


async def test_xorls_client_numbers_per_object_and_a_repeat_within_seconds_is_one_operation(
    hive: OperationHive, client: httpx.AsyncClient
) -> None:
    made = await ask(client, "create_model", model_id="mine", base_model=BASE, lora_config={"rank": 4})
    assert (await xorl_result(client, made))["model_id"] == "mine"
    body = {"model_id": "mine", "seq_id": 1, "adam_params": {"learning_rate": 1e-4}}
    first, again = [await ask(client, "optim_step", **body) for _ in range(2)]
    assert first == again
    other = await ask(client, "optim_step", **{**body, "adam_params": {"learning_rate": 1e-3}})
    assert other["request_id"] != first["request_id"]
    assert "metrics" in await xorl_result(client, other)
    saved = await ask(client, "save_weights", model_id="mine", seq_id=2, path="one")
    assert (await xorl_result(client, saved))["path"] == "xorl://mine/weights/one"
    listed = (await ask(client, "list_checkpoints", model_id="mine"))["checkpoints"]
    assert [each["path"] for each in listed] == ["xorl://mine/weights/one"]
    assert (await ask(client, "delete_checkpoint", model_id="mine", checkpoint_id="weights/one"))["success"]
    assert (await ask(client, "list_checkpoints", model_id="mine"))["checkpoints"] == []


async def test_operations_of_a_model_that_has_anothers_name_are_no_repeats_of_the_others(
    hive: OperationHive, client: httpx.AsyncClient
) -> None:
    for _ in range(2):
        made = await ask(client, "create_model", model_id="mine", base_model=BASE, lora_config={"rank": 4})
        await xorl_result(client, made)
        stepped = await ask(client, "optim_step", model_id="mine", seq_id=1, adam_params={"learning_rate": 1e-4})
        assert "metrics" in await xorl_result(client, stepped)
        assert (await ask(client, "kill_session", model_id="mine", save_checkpoint=False))["success"]
    executed = [type(each) for _, each in hive.executed]
    assert executed == 2 * [CreateModel, OptimStep, EndModel]


async def test_a_model_of_tinkers_client_is_ended_by_its_client_and_ended_once(
    hive: OperationHive, client: httpx.AsyncClient
) -> None:
    unloaded, killed = await open_model(client), await open_model(client, 1)
    for _ in range(2):
        ended = await result(client, await ask(client, "unload_model", model_id=unloaded))
        assert ended.json() == {"model_id": unloaded, "type": "unload_model"}
    assert (await ask(client, "kill_session", model_id=killed))["success"]
    assert [type(each) for _, each in hive.executed] == [CreateModel, CreateModel, EndModel, EndModel]


async def test_an_end_that_failed_does_not_stand_for_a_later_one(
    hive: OperationHive, client: httpx.AsyncClient
) -> None:
    def refusing(operation: Operation) -> Result:
        if isinstance(operation, EndModel) and operation.save_as:
            return Failed(error="the disk is full", category=Category.SERVER)
        return plain_results(operation)

    hive.answering = refusing
    model = await open_model(client)
    failed = await ask(client, "kill_session", model_id=model)
    assert not failed["success"]
    assert "the disk is full" in failed["message"]
    assert (await ask(client, "kill_session", model_id=model, save_checkpoint=False))["success"]


async def test_killing_a_session_ends_its_model_and_answers_when_it_has_ended(
    hive: OperationHive, client: httpx.AsyncClient
) -> None:
    made = await ask(client, "create_model", model_id="mine", base_model=BASE, lora_config={"rank": 4})
    await xorl_result(client, made)
    assert (await client.get("session_info")).json()["registered_models"] == ["mine"]
    assert (await ask(client, "kill_session", model_id="mine"))["success"]
    assert (await client.get("session_info")).json()["registered_models"] == []
    gone = await ask(client, "kill_session", model_id="mine", save_checkpoint=False)
    assert not gone["success"]
    assert "has ended" in gone["message"]
    again = await ask(client, "create_model", model_id="mine", base_model=BASE, lora_config={"rank": 4})
    assert (await xorl_result(client, again))["model_id"] == "mine"


async def xorl_result(client: httpx.AsyncClient, accepted: dict[str, Any]) -> dict[str, Any]:
    while (answer := await ask(client, "retrieve_future", request_id=accepted["request_id"])).get(
        "type"
    ) == "try_again":
        pass
    return answer


async def create_on(client: httpx.AsyncClient, base: str) -> dict[str, Any]:
    session = (await ask(client, "create_session", sdk_version="0.38.0", tags=[]))["session_id"]
    adapter = {"rank": 8}
    made = await ask(client, "create_model", session_id=session, model_seq_id=0, base_model=base, lora_config=adapter)
    answer: dict[str, Any] = (await result(client, made)).json()
    return answer


async def configure(hive: OperationHive, **more: object) -> None:
    job = RunConfig.model_validate({"model": {"path": BASE}, **more})
    await hive.bus.inbox.request(job.to_command(new_id(), ENGINE))
    await hive.follower.wait_for(
        lambda _: (now := hive.engine.configured) is not None and now.config_digest == job.digest
    )


async def test_a_model_does_not_replace_the_job_that_somebody_else_has_given_the_engine(
    hive: OperationHive, client: httpx.AsyncClient
) -> None:
    await configure(hive, trainer={"lr": 3e-5})
    failure = await create_on(client, "org/other")
    assert failure["category"] == "user"
    assert "has a job for models on org/tiny, and org/other is another base" in failure["error"]
    assert hive.engine.phase == Phase.OFFLINE
    assert hive.engine.configured is not None
    assert RunConfig.from_json(hive.engine.configured.config).trainer.lr == 3e-5
    assert "model_id" in await create_on(client, BASE)


async def test_a_job_that_says_nothing_but_a_base_is_replaced_by_that_of_the_next_base(
    hive: OperationHive, client: httpx.AsyncClient
) -> None:
    await configure(hive)
    assert "model_id" in await create_on(client, "org/other")
    assert hive.engine.active is not None
    assert hive.engine.active.model == "org/other"


async def test_the_longest_context_is_that_of_the_job_with_which_a_stopped_engine_would_start(
    hive: OperationHive, client: httpx.AsyncClient
) -> None:
    await configure(hive)
    assert "model_id" in await create_on(client, BASE)
    await hive.bus.inbox.request(inbox.Stop(id=new_id(), engine=ENGINE))
    await hive.follower.wait_for(lambda _: hive.engine.phase is Phase.OFFLINE)
    short = {"max_prompt_length": 10, "max_response_length": 10, "max_response_length_in_one_turn": 10}
    await configure(hive, rollout={**short, "max_model_len": 20})
    (first, *_) = (await client.get("get_server_capabilities")).json()["supported_models"]
    assert first["max_context_length"] == 20


async def test_where_there_is_an_admin_key_only_who_has_it_gives_the_engine_a_job(
    hive: OperationHive, bus: Bus
) -> None:
    keys = HiveKeys(admin="the-admin-key-0123456789", client="the-client-key-0123456789")
    async with gateway_of(bus, keys=keys) as (_, url):

        def client(key: str) -> httpx.AsyncClient:
            return httpx.AsyncClient(base_url=f"{url}/api/v1", timeout=60.0, headers={"x-api-key": key})

        async with client(keys.client) as stranger, client(keys.admin) as operator:
            assert "has no job yet" in (await create_on(stranger, BASE))["error"]
            assert hive.engine.configured is None
            assert "model_id" in await create_on(operator, BASE)
            assert "model_id" in await create_on(stranger, BASE)


async def test_a_base_that_the_operator_gave_a_name_needs_no_admin_key(hive: OperationHive, bus: Bus) -> None:
    keys = HiveKeys(admin="the-admin-key-0123456789", client="the-client-key-0123456789")
    async with gateway_of(bus, keys=keys, bases=(f"org/known={BASE}",)) as (_, url):
        headers = {"x-api-key": keys.client}
        async with httpx.AsyncClient(base_url=f"{url}/api/v1", timeout=60.0, headers=headers) as stranger:
            assert "has no job yet" in (await create_on(stranger, "org/other"))["error"]
            assert "model_id" in await create_on(stranger, "org/known")
    assert hive.engine.configured is not None
    assert hive.engine.configured.model == BASE
