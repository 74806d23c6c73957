"""Inference servers that training clients register, and weights that are put in sync: a real gateway, bus and servers
over HTTP, whose answers are scripted, and a scripted trainer."""

import asyncio
import json
from collections.abc import AsyncIterator, MutableMapping
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from fastapi import Request

from bombus.errors import Code, Refused
from bombus.hive.inbox import AnyAnswer, Message, RemoveWeights
from bombus.hive.operations.state import FOR_SYNC
from bombus.machine.http_server import http_server
from bombus.machine.process import listen
from bombus.operations import CheckpointKind, CheckpointSaved, CreateModel, Operation, OptimStep, SaveWeights
from bombus_gateway.context import Gateway
from bombus_gateway.operations.bases import Bases
from bombus_gateway.operations.endpoints.routes import EndpointRoutes
from bombus_gateway.operations.endpoints.syncing import WeightSync
from bombus_gateway.operations.full_weights import RegisteredModel
from bombus_gateway.operations.operation_log import OperationLog
from bombus_gateway.operations.results import OperationResults
from bombus_gateway.operations.sessions import Sessions
from bombus_gateway.operations_wire.endpoints import SyncRequest
from bombus_gateway.operations_wire.submission import Submission
from tests.gateway.openai_hive import ENGINE, gateway_of
from tests.gateway.operations.scripted_trainer import OperationHive, address_of
from tests.gateway.operations.test_catching_up import late_client
from tests.gateway.operations.test_routes import BASE, ask, configure, open_model, xorl_result
from tests.patience import PATIENCE_S, until

UPDATE = "/update_weights_from_disk"
SYNCED = SaveWeights(checkpoint=CheckpointKind.EXTERNAL, name="synced-29991231-000000-000", ttl_s=86_400.0, merged=True)


class ScriptedServer:
    """An SGLang server that notes what it is asked to load. With `refuses` it says why it did not, and where `garbled`
    has a path, these bytes are its answer there. It loads once the next of `held` is set, where there is one. It fails
    where it is sent a key."""

    def __init__(self) -> None:
        self.port = 0
        self.loaded: list[dict[str, Any]] = []
        self.refuses = ""
        self.garbled: dict[str, bytes] = {}
        self.held: list[asyncio.Event] = []

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        assert b"authorization" not in dict(scope["headers"]), "a stranger gets no key of the hive"
        status, answer = self._answer(scope["path"], (await receive()).get("body", b""))
        if scope["path"] == UPDATE and self.held:
            await self.held.pop(0).wait()
        await send({"type": "http.response.start", "status": status, "headers": []})
        body = self.garbled.get(scope["path"], json.dumps(answer).encode())
        await send({"type": "http.response.body", "body": body})

    def _answer(self, path: str, body: bytes) -> tuple[int, dict[str, Any]]:
        if path == "/model_info":
            return 200, {"model_path": "/models/tiny"}
        if path != UPDATE:
            return 404, {}
        self.loaded.append(json.loads(body))
        return (400, {"success": False, "message": self.refuses}) if self.refuses else (200, {"success": True})


@asynccontextmanager
async def scripted() -> AsyncIterator[ScriptedServer]:
    server = ScriptedServer()
    with listen("127.0.0.1", 0) as bound:
        server.port = bound.getsockname()[1]
        async with http_server(server, bound, drain_s=1):
            yield server


@pytest.fixture
async def server() -> AsyncIterator[ScriptedServer]:
    async with scripted() as server:
        yield server


@pytest.fixture
def gateway_settings() -> dict[str, Any]:
    return {"inference_hosts": ("LOCALHOST", "127.0.0.1", "gpu-1:30000")}


async def create(client: httpx.AsyncClient, model: str = "default", rank: int = 4) -> None:
    made = await ask(client, "create_model", model_id=model, base_model=BASE, lora_config={"rank": rank})
    await xorl_result(client, made)


async def post(hive: OperationHive, path: str, **body: Any) -> dict[str, Any]:
    async with httpx.AsyncClient(base_url=hive.url, timeout=60.0) as http:
        response = await http.post(path, json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


async def add(hive: OperationHive, port: int, host: str = "127.0.0.1", **more: Any) -> dict[str, Any]:
    return await post(hive, "/add_inference_endpoint", host=host, port=port, **more)


async def listed(url: str) -> list[dict[str, Any]]:
    async with httpx.AsyncClient(base_url=url) as http:
        answer = (await http.get("/list_inference_endpoints")).json()
    assert answer["count"] == len(answer["endpoints"])
    found: list[dict[str, Any]] = answer["endpoints"]
    return found


class KeepingGateway(Gateway):
    """A gateway whose removals of saved models are refused."""

    async def carry_out(self, command: Message, limit_s: float | None = None, traceparent: str = "") -> AnyAnswer:
        if isinstance(command, RemoveWeights):
            raise Refused(Code.WRONG_PHASE, "an operation waits to load it")
        return await super().carry_out(command, limit_s, traceparent)


@asynccontextmanager
async def another_gateway(hive: OperationHive) -> AsyncIterator[Gateway]:
    """Give another gateway of the hive, which can remove nothing."""
    async with gateway_of(hive.bus, inference_hosts=("127.0.0.1",)) as (other, _):
        yield KeepingGateway(other.settings, other.bus, other.follower, other.keys)


def saves(hive: OperationHive) -> list[SaveWeights]:
    return [each for _, each in hive.executed if isinstance(each, SaveWeights)]


async def test_an_endpoint_is_registered_listed_by_every_gateway_and_removed(
    hive: OperationHive, server: ScriptedServer
) -> None:
    added = await add(hive, server.port, world_size=2)
    assert (added["success"], added["weights_synced"]) == (True, False)
    assert added["endpoint"]["server_info"] == {"model_path": "/models/tiny", "version": "sglang"}
    async with gateway_of(hive.bus, inference_hosts=("127.0.0.1",)) as (_, url):  # as after a restart
        (found,) = await listed(url)
    assert (found["host"], found["port"], found["world_size"]) == ("127.0.0.1", server.port, 2)
    assert found["healthy"]
    removed = await post(hive, "/remove_inference_endpoint", host="127.0.0.1", port=server.port)
    assert removed["success"]
    assert await listed(hive.url) == []
    again = await post(hive, "/remove_inference_endpoint", host="127.0.0.1", port=server.port)
    assert again == {"success": False, "message": f"127.0.0.1:{server.port} is not registered."}


async def test_an_endpoint_that_is_gone_is_listed_as_not_healthy(hive: OperationHive) -> None:
    async with scripted() as server:
        await add(hive, server.port)
    (found,) = await listed(hive.url)
    assert not found["healthy"]
    assert "no server can be used" in found["why"]


@pytest.mark.parametrize(("host", "port"), [("10.0.0.1", 30000), ("gpu-1", 30001), ("gpu-1.evil", 30000)])
async def test_only_hosts_that_the_operator_allows_are_talked_to(hive: OperationHive, host: str, port: int) -> None:
    refused = await add(hive, port, host)
    assert not refused["success"]
    assert f"not at {host}:{port}" in refused["message"]
    assert "--inference-host" in refused["message"]
    assert await listed(hive.url) == []


async def test_where_nothing_is_allowed_the_refusal_says_so(hive: OperationHive) -> None:
    async with gateway_of(hive.bus) as (_, url), httpx.AsyncClient(base_url=url) as http:
        refused = (await http.post("/add_inference_endpoint", json={"host": "127.0.0.1", "port": 1})).json()
    assert "does not talk to external inference endpoints" in refused["message"]


async def test_an_endpoint_whose_host_is_not_allowed_any_more_is_not_talked_to(
    hive: OperationHive, client: httpx.AsyncClient, server: ScriptedServer
) -> None:
    await create(client)
    await add(hive, server.port)
    async with gateway_of(hive.bus, inference_hosts=("gpu-1",)) as (_, url), httpx.AsyncClient(base_url=url) as http:
        (found,) = await listed(url)
        assert not found["healthy"]
        assert f"not at 127.0.0.1:{server.port}" in found["why"]
        refused = (await http.post("/sync_inference_weights", json={})).json()
        assert not refused["success"]
        assert "--inference-host" in refused["message"]
    assert server.loaded == []
    assert saves(hive) == []


async def test_what_is_no_inference_server_is_not_registered(hive: OperationHive) -> None:
    with listen("127.0.0.1", 0) as bound:
        port = bound.getsockname()[1]
    assert "no server can be used" in (await add(hive, port))["message"]
    gateway_port = int(hive.url.rpartition(":")[2])
    assert not (await add(hive, gateway_port))["success"]
    for body in ({"host": "127.0.0.1", "port": 0}, {"host": "127.0.0.1"}, {"host": "", "port": 1}):
        assert not (await post(hive, "/add_inference_endpoint", **body))["success"]
    assert "no pool" in (await add(hive, port, pool="rollouts"))["message"]


async def test_a_sync_comes_in_the_models_order_and_each_endpoint_reads_the_merged_model(
    hive: OperationHive, client: httpx.AsyncClient, server: ScriptedServer
) -> None:
    await create(client)
    hive.may_work.clear()
    step = {"model_id": "default", "adam_params": {"learning_rate": 1e-4}}
    await ask(client, "optim_step", seq_id=1, **step)
    async with scripted() as other:
        for each in (server, other):
            await add(hive, each.port)
        nccl = {"master_address": "", "master_port": 29600, "group_name": "g", "buffer_size_mb": 64}
        syncing = asyncio.create_task(post(hive, "/sync_inference_weights", **nccl))
        await hive.follower.wait_for(lambda _: hive.engine.clients.waiting == 2, 30)
        await ask(client, "optim_step", seq_id=2, **step)
        hive.may_work.set()
        report = await syncing
    assert report["success"], report
    assert "NCCL was not used" in report["message"]
    (save,) = saves(hive)
    assert (save.checkpoint, save.merged) == (CheckpointKind.EXTERNAL, True)
    order: list[type[Operation]] = [type(each) for _, each in hive.executed][1:]
    assert order[:2] == [OptimStep, SaveWeights]
    assert [each["success"] for each in report["endpoints_synced"]] == [True, True]
    assert report["total_bytes"] == 2 * 3
    for each in (server, other):
        (loaded,) = each.loaded
        assert loaded["model_path"] == f"/w/{save.name}"
        assert loaded["weight_version"] == f"default/{save.name}"


async def test_an_endpoint_that_does_not_load_is_told_and_the_others_have_the_weights(
    hive: OperationHive, client: httpx.AsyncClient, server: ScriptedServer
) -> None:
    await create(client)
    server.refuses = "no such folder"
    async with scripted() as other:
        await add(hive, server.port)
        await add(hive, other.port)
        report = await post(hive, "/api/v1/sync_inference_weights", model_id="default", weight_version="v7")
        assert not report["success"]
        assert "1 of 2 endpoints" in report["message"]
        first, second = report["endpoints_synced"]
        assert (first["port"], first["success"]) == (server.port, False)
        assert "no such folder" in first["message"]
        assert (second["port"], second["success"]) == (other.port, True)
        assert other.loaded[0]["weight_version"] == "v7"
        async with scripted() as third:
            await add(hive, third.port)
        gone = await post(hive, "/sync_inference_weights")
    assert [each["success"] for each in gone["endpoints_synced"]] == [False, True, False]


@pytest.mark.parametrize("path", ["/model_info", UPDATE])
@pytest.mark.parametrize("answer", [b'"\xff"', b"[" * 100_000, b" " * (2 << 20)], ids=["no utf-8", "deep", "large"])
async def test_an_endpoint_whose_answers_cannot_be_read_keeps_weights_from_nobody_else(
    hive: OperationHive, client: httpx.AsyncClient, server: ScriptedServer, path: str, answer: bytes
) -> None:
    await create(client)
    async with scripted() as other:
        for each in (server, other):
            await add(hive, each.port)
        server.garbled[path] = answer
        report = await post(hive, "/sync_inference_weights")
        assert [each["healthy"] for each in await listed(hive.url)] == [path == UPDATE, True]
        assert len(other.loaded) == 1
    assert [each["success"] for each in report["endpoints_synced"]] == [False, True]


async def test_an_endpoint_may_get_weights_when_it_is_registered(
    hive: OperationHive, client: httpx.AsyncClient, server: ScriptedServer
) -> None:
    early = await add(hive, server.port, sync_weights=True)
    assert (early["success"], early["weights_synced"]) == (True, False)
    assert "Set model_id to the model to sync" in early["sync_message"]
    await create(client)
    added = await add(hive, server.port, sync_weights=True)
    assert added["weights_synced"], added
    assert len(server.loaded) == 1


async def test_an_endpoint_that_does_not_answer_holds_up_no_sync_to_another_one(
    hive: OperationHive, client: httpx.AsyncClient, server: ScriptedServer
) -> None:
    await create(client, "m1")
    await create(client, "m2")
    answers = asyncio.Event()
    async with scripted() as silent:
        silent.held.append(answers)
        await add(hive, silent.port)
        waits = asyncio.create_task(post(hive, "/sync_inference_weights", model_id="m1"))
        await until(lambda: silent.loaded)
        await post(hive, "/remove_inference_endpoint", host="127.0.0.1", port=silent.port)
        await add(hive, server.port)
        assert (await post(hive, "/sync_inference_weights", model_id="m2"))["success"]
        assert not waits.done()
        answers.set()
        assert (await waits)["success"]


async def test_what_earlier_syncs_have_saved_is_removed(
    hive: OperationHive, client: httpx.AsyncClient, server: ScriptedServer
) -> None:
    await create(client)
    await add(hive, server.port)
    for _ in range(3):
        assert (await post(hive, "/sync_inference_weights"))["success"]
    assert len(server.loaded) == 3
    kept = [each.noted.saved.name for each in hive.engine.clients.kept.values()]
    assert kept == [saves(hive)[-1].name]
    path = f"xorl://default/external_weights/{kept[0]}"
    async with httpx.AsyncClient(base_url=hive.url) as http:
        refused = await http.post("/generate", json={"input_ids": [5], "lora_path": path, "sampling_params": {}})
    assert "sample from those" in refused.json()["detail"]


async def test_a_sync_leaves_what_a_client_has_called_like_one_of_its_own_saves(
    hive: OperationHive, client: httpx.AsyncClient, server: ScriptedServer
) -> None:
    await create(client)
    await add(hive, server.port)
    name = "synced-20260101-000000-000"
    await xorl_result(client, await ask(client, "save_weights_for_sampler", model_id="default", seq_id=1, name=name))
    for _ in range(3):
        assert (await post(hive, "/sync_inference_weights"))["success"]
    kept = [each.noted.saved for each in hive.engine.clients.kept.values()]
    assert [(each.use, each.name) for each in kept] == [("sampler", name), ("external", saves(hive)[-1].name)]
    assert [save.ttl_s for save in saves(hive)] == [0.0, 86_400.0, 86_400.0, 86_400.0], "no sync may follow"


async def test_a_sync_leaves_what_another_gateway_has_just_saved(
    hive: OperationHive, client: httpx.AsyncClient, server: ScriptedServer
) -> None:
    await create(client)
    await add(hive, server.port)
    async with (
        gateway_of(hive.bus, inference_hosts=("127.0.0.1",)) as (_, url),
        httpx.AsyncClient(base_url=url, timeout=60.0) as other,
    ):
        for _ in range(2):
            assert (await other.post("/sync_inference_weights", json={})).json()["success"]
    assert (await post(hive, "/sync_inference_weights"))["success"]
    kept = [each.noted.saved.name for each in hive.engine.clients.kept.values()]
    assert kept == [save.name for save in saves(hive)[1:]], "each gateway has removed its own alone"


async def test_of_two_gateways_the_one_that_is_slower_leaves_servers_with_the_newest_weights(
    hive: OperationHive, client: httpx.AsyncClient, server: ScriptedServer
) -> None:
    await create(client)
    await add(hive, server.port)
    server.held = [slow := asyncio.Event()]
    first = asyncio.create_task(post(hive, "/sync_inference_weights"))
    await until(lambda: bool(server.loaded))
    async with (
        gateway_of(hive.bus, inference_hosts=("127.0.0.1",)) as (_, url),
        httpx.AsyncClient(base_url=url, timeout=60.0) as other,
    ):
        assert (await other.post("/sync_inference_weights", json={})).json()["success"]
    slow.set()
    assert (await first)["success"]
    older, newest = [f"/w/{save.name}" for save in saves(hive)]
    assert [each["model_path"] for each in server.loaded] == [older, newest, newest]


async def test_of_two_gateways_the_one_that_is_slower_removes_its_own_weights_and_not_the_newest(
    hive: OperationHive, client: httpx.AsyncClient, server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bombus_gateway.operations.endpoints.syncing.LOAD_S", 0.0)  # nobody reads for that long
    await create(client)
    await add(hive, server.port)
    server.held = [slow := asyncio.Event()]
    first = asyncio.create_task(post(hive, "/sync_inference_weights"))
    await until(lambda: bool(server.loaded))
    async with another_gateway(hive) as other:
        submission = Submission(model="default", seq=0, operation=SYNCED, metadata=FOR_SYNC)
        operations = OperationLog(other, ENGINE)
        newest = await operations.submit(hive.engine.clients.models["default"].session, submission)
        assert isinstance(await OperationResults(other, operations).outcome(newest, PATIENCE_S), CheckpointSaved)
    slow.set()
    assert (await first)["success"]
    assert server.loaded[-1]["model_path"] == f"/w/{SYNCED.name}"
    assert [each.noted.saved.name for each in hive.engine.clients.kept.values()] == [SYNCED.name]


async def test_a_sync_that_cannot_remove_what_earlier_ones_have_saved_has_succeeded(
    hive: OperationHive, client: httpx.AsyncClient, server: ScriptedServer
) -> None:
    await create(client)
    await add(hive, server.port)
    async with another_gateway(hive) as other:
        sync = WeightSync(other, OperationLog(other, ENGINE))
        for _ in range(2):
            assert (await sync.sync(SyncRequest(), "")).success
    assert [each.noted.saved.name for each in hive.engine.clients.kept.values()] == [each.name for each in saves(hive)]


async def test_a_gateway_that_is_behind_puts_the_replicas_in_sync_that_others_know_of(
    hive: OperationHive, client: httpx.AsyncClient
) -> None:
    await create(client)
    await hive.join_replica()
    async with late_client(hive.bus) as late:
        report = (await late.post("sync_inference_weights", json={})).json()
    assert report["success"], report["message"]


async def test_a_sync_that_waits_holds_up_no_other_models_and_a_model_that_is_away_is_refused(
    hive: OperationHive, client: httpx.AsyncClient, server: ScriptedServer
) -> None:
    await create(client, "m1")
    await create(client, "m2")
    await add(hive, server.port)
    hive.held.add("m1")
    waits = asyncio.create_task(post(hive, "/sync_inference_weights", model_id="m1"))
    await hive.follower.wait_for(lambda _: hive.engine.clients.waiting == 1, PATIENCE_S)
    assert (await post(hive, "/sync_inference_weights", model_id="m2"))["success"]
    assert not waits.done()
    await hive.say_away("m1", "its recovery checkpoint cannot be read")
    refused = await post(hive, "/sync_inference_weights", model_id="m1")
    assert refused["message"] == "m1 cannot be saved now: its recovery checkpoint cannot be read"
    await hive.say_away("m1", "")
    hive.held.clear()
    assert (await post(hive, "/sync_inference_weights", model_id="m2"))["success"]
    assert (await waits)["success"]


async def test_without_endpoints_the_hives_own_replicas_get_the_adapter_and_sample_from_it(
    hive: OperationHive, client: httpx.AsyncClient
) -> None:
    await create(client)
    early = await post(hive, "/sync_inference_weights")
    assert not early["success"]
    assert "no replica of the hive has loaded the base" in early["message"]
    await hive.join_replica()
    generate = {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 4, "temperature": 1.0}}
    await post(hive, "/generate", **generate)
    assert hive.replica.requests[-1].adapter == ""
    for number in range(3):
        report = await post(hive, "/sync_inference_weights")
        assert report["success"], report
        assert "the hive's own replicas" in report["message"]
        save = saves(hive)[-1]
        assert (save.checkpoint, save.merged) == (CheckpointKind.SAMPLER, False)
        assert hive.replica.adapters[address_of(save.name)] == f"/w/{save.name}"
        (told,) = report["endpoints_synced"]
        assert told["port"] == int(hive.replica.url.rpartition(":")[2])
        await post(hive, "/generate", **generate)
        assert hive.replica.requests[-1].adapter == address_of(save.name)
        assert len(hive.engine.clients.kept) == min(number + 1, 2)


async def test_a_replica_of_the_hive_that_is_registered_is_known_by_its_address_on_the_log_and_gets_the_adapter(
    hive: OperationHive, client: httpx.AsyncClient
) -> None:
    await create(client)
    await hive.join_replica()
    port = int(hive.replica.url.rpartition(":")[2])
    assert (await add(hive, port))["endpoint"]["server_info"]["version"] == "bombus"
    assert (await add(hive, port, host="localhost"))["endpoint"]["server_info"]["version"] == "bombus"
    report = await post(hive, "/sync_inference_weights")
    assert report["success"], report
    save = saves(hive)[-1]
    assert hive.replica.adapters == {address_of(save.name): f"/w/{save.name}"}
    hive.replica.key = "of another hive"
    told = (await post(hive, "/sync_inference_weights"))["endpoints_synced"]
    assert [(each["success"], each["message"]) for each in told] == [(False, "This replica answers its gateways.")] * 2


async def test_which_model_is_meant_is_asked_where_it_is_not_clear(
    hive: OperationHive, client: httpx.AsyncClient, server: ScriptedServer
) -> None:
    tinkers = await open_model(client)
    await add(hive, server.port)
    assert not (await post(hive, "/sync_inference_weights"))["success"]
    assert not (await post(hive, "/sync_inference_weights", model_id=tinkers))["success"], "it is none of xorl's"
    await create(client, "policy")
    assert (await post(hive, "/sync_inference_weights"))["success"], "there is one"
    await create(client, "reference")
    report = await post(hive, "/sync_inference_weights")
    assert "Set model_id to the model to sync" in report["message"]
    assert "policy, reference" in report["message"]
    assert (await post(hive, "/sync_inference_weights", model_id="reference"))["success"]
    assert server.loaded[-1]["weight_version"].startswith("reference/")
    for asked_for in ({"quantization": {"method": "fp8"}}, {"pools": ["other"]}, {"weight_version": "x" * 300}):
        assert not (await post(hive, "/sync_inference_weights", model_id="policy", **asked_for))["success"]


async def test_a_model_of_all_weights_goes_to_servers_elsewhere_only(
    hive: OperationHive, client: httpx.AsyncClient, server: ScriptedServer
) -> None:
    await create(client, rank=0)
    await hive.join_replica()
    refused = await post(hive, "/sync_inference_weights")
    assert "the hive's replicas take only adapters" in refused["message"]
    await add(hive, server.port)
    assert (await post(hive, "/sync_inference_weights"))["success"]


# ---- sleep --------------------------------------------------------------------------------------------------------


async def test_operations_wait_while_the_trainer_sleeps_and_the_client_is_told_why(
    hive: OperationHive, client: httpx.AsyncClient, server: ScriptedServer
) -> None:
    await create(client)
    assert (await post(hive, "/sleep"))["success"]
    await hive.follower.wait_for(lambda _: hive.engine.asleep, PATIENCE_S)
    assert (await post(hive, "/sleep"))["success"], "a repeat"
    await add(hive, server.port)
    assert "The trainer is asleep" in (await post(hive, "/sync_inference_weights"))["message"]
    stepped = await ask(client, "optim_step", model_id="default", seq_id=1, adam_params={"learning_rate": 1e-4})
    waiting = asyncio.create_task(xorl_result(client, stepped))
    await hive.follower.wait_for(lambda _: hive.engine.clients.waiting == 1, 30)
    assert (await post(hive, "/wake_up"))["success"]
    assert "metrics" in await waiting
    assert (await post(hive, "/wake_up"))["success"], "a repeat"


@pytest.mark.parametrize("asleep", [True, False])
async def test_a_rest_that_is_asked_for_on_the_way_to_the_opposite_is_over_when_the_trainer_is_there(
    hive: OperationHive, client: httpx.AsyncClient, asleep: bool
) -> None:
    await create(client)
    asked_for, opposite = ("/sleep", "/wake_up") if asleep else ("/wake_up", "/sleep")
    if asleep:
        assert (await post(hive, "/sleep"))["success"]
    hive.may_rest.clear()
    first = asyncio.create_task(post(hive, opposite))
    await hive.follower.wait_for(lambda _: hive.engine.rest_wanted != asleep, PATIENCE_S)
    second = asyncio.create_task(post(hive, asked_for))
    assert "another client asked for the opposite" in (await first)["result"]
    await hive.follower.wait_for(lambda _: hive.engine.rest_wanted == asleep, PATIENCE_S)
    await listed(hive.url)
    assert not second.done()
    hive.may_rest.set()
    assert (await second)["success"]
    await hive.follower.wait_for(lambda _: hive.engine.asleep == asleep, PATIENCE_S)


async def test_the_model_that_is_there_by_itself_is_put_in_sync_before_its_first_operation(
    hive: OperationHive, server: ScriptedServer
) -> None:
    await configure(hive, trainer={"enable_lora": False})
    await add(hive, server.port)
    assert (await post(hive, "/sync_inference_weights"))["success"]
    assert len(server.loaded) == 1
    assert [type(each) for _, each in hive.executed] == [CreateModel, SaveWeights]


async def test_a_trainer_that_does_not_fall_asleep_in_time_is_to_go_on(
    hive: OperationHive, client: httpx.AsyncClient
) -> None:
    await create(client)
    hive.may_rest.clear()
    assert hive.gateway is not None
    operations = OperationLog(hive.gateway, ENGINE)
    registered = RegisteredModel(operations, Sessions(hive.gateway, operations, Bases(())))
    routes = EndpointRoutes(hive.gateway, operations, registered, rest_s=0.2)
    answer = await routes.sleep(Request({"type": "http", "headers": []}))
    assert json.loads(bytes(answer.body)) == {
        "success": False,
        "result": "The trainer has not freed its memory within 0.2 s, so it stays awake. Is it running?",
    }
    await hive.follower.wait_for(lambda _: not hive.engine.rest_wanted, PATIENCE_S)


async def test_nothing_sleeps_where_nothing_runs(hive: OperationHive) -> None:
    refused = await post(hive, "/sleep")
    assert not refused["success"]
    assert "create a model" in refused["result"]
