"""Two clients with keys of their own on one engine: neither uses, changes or learns of what is the other's."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import httpx
import msgspec
import pytest

from bombus.hive.operations.owners import seen_by
from bombus.machine.hive_keys import HiveKeys, NamedKey
from bombus.operations import CheckpointSaved, LoadWeights, Operation, Result, SaveWeights
from tests.gateway.openai_hive import ENGINE, says
from tests.gateway.operations.scripted_trainer import Answering, OperationHive, plain_results
from tests.gateway.operations.test_endpoints import scripted
from tests.gateway.operations.test_routes import BASE, ask, open_model, result, step, xorl_result
from tests.gateway.operations.test_sampling import sample
from tests.gateway.operations_wire.protobuf_bodies import TARGETS, chunk, datum, request

KEYS = {name: f"the-key-of-{name}-0123456789" for name in ("ann", "eve", "all")}
ADAM = {"learning_rate": 1e-4}
LORA = {"rank": 8}
WRONG = "wrong"
DATA = {"data": [{"model_input": {"input_ids": [1, 2]}, "loss_fn_inputs": {"labels": [1, 2]}}]}
INPUT = {"forward_backward_input": DATA | {"loss_fn": "causallm_loss"}}


class Names(NamedTuple):
    """What a client has, or says that it has, by the names that requests have for it."""

    session: str
    model: str
    xorl: str
    future: str
    failure: str
    sample: str
    secret: str  # the name of checkpoints
    address: str


UNKNOWN = Names(
    session="s-0000000000000000",
    model="s-0000000000000000:train:0",
    xorl="nobodys",
    future="s-0000000000000000:train:0:1",
    failure="nobodys:3:00000000",
    sample="s-0000000000000000:sample:0:base:0:0000000000000000",
    secret="nothing",
    address="0" * 24,
)


@pytest.fixture
def gateway_settings() -> dict[str, Any]:
    named = {name: NamedKey(key=KEYS[name]) for name in ("ann", "eve")}
    return {"keys": HiveKeys(client=KEYS["all"], clients=named), "inference_hosts": ("127.0.0.1",)}


@pytest.fixture
def answering() -> Answering:
    return Addresses()


@asynccontextmanager
async def client_of(hive: OperationHive, name: str) -> AsyncIterator[httpx.AsyncClient]:
    """Yield the client with the key of this name; that of `all` has none on the log."""
    headers = {"x-api-key": f"tml-{KEYS[name]}"}
    async with httpx.AsyncClient(base_url=f"{hive.url}/api/v1", timeout=60.0, headers=headers) as client:
        yield client


@pytest.fixture
async def ann(hive: OperationHive) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(hive, "ann") as client:
        yield client


@pytest.fixture
async def eve(hive: OperationHive) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(hive, "eve") as client:
        yield client


class Addresses:
    """Answers as if everything succeeded, and gives each checkpoint an address of its own: 1, 2 and so on."""

    def __init__(self) -> None:
        self.saved = 0

    def __call__(self, operation: Operation) -> Result:
        if not isinstance(operation, SaveWeights):
            return plain_results(operation)
        self.saved += 1
        folder = f"/w/{self.saved}"
        return CheckpointSaved(
            checkpoint=operation.checkpoint,
            name=operation.name,
            folder=folder,
            address=f"{self.saved:064x}"[::-1],
            size_bytes=3,
        )


async def create(client: httpx.AsyncClient, model: str) -> dict[str, Any]:
    made = await ask(client, "create_model", model_id=model, base_model=BASE, lora_config=LORA)
    return await xorl_result(client, made)


async def save(client: httpx.AsyncClient, model: str, name: str, seq: int = 1) -> dict[str, Any]:
    kept = await ask(client, "save_weights_for_sampler", model_id=model, seq_id=seq, name=name)
    return await xorl_result(client, kept)


async def furnished(client: httpx.AsyncClient) -> Names:
    """Give a client a model of Tinker's with two checkpoints, and one of xorl's with another two."""
    model = await open_model(client)
    session = model.partition(":")[0]
    saved = await ask(client, "save_weights", model_id=model, path="secret", seq_id=1)
    await result(client, saved)
    await result(client, await ask(client, "save_weights_for_sampler", model_id=model, path="secret", seq_id=2))
    await create(client, "anns")
    await save(client, "anns", "secret")
    await xorl_result(client, await ask(client, "save_weights", model_id="anns", path="secret", seq_id=2))
    failed = await ask(client, "optim_step", model_id="gone", seq_id=3, adam_params=ADAM)
    sampler = {"session_id": session, "sampling_session_seq_id": 0, "base_model": BASE}
    begun = await ask(client, "create_sampling_session", **sampler)
    drawn = await ask(client, "asample", **sample(begun["sampling_session_id"]))
    return Names(
        session, model, "anns", saved["request_id"], failed["request_id"], drawn["request_id"], "secret", "2" + "0" * 23
    )


# Each request is one to something of another client, and its owner may make all of them, in this order: its method, its
# path and its body, with the names of `Names` in them. `<own>` is a session of the client that asks, and `<mine>` a
# model of its, of xorl's.
_OF_RUN = "training_runs/<model>/checkpoints/sampler_weights/<secret>"
_TRAINING = "tinker://<model>/weights/<secret>"
_SAMPLER = "tinker://<model>/sampler_weights/<secret>"
_CREATE = {"base_model": BASE, "lora_config": LORA}
_GENERATE: dict[str, Any] = {"input_ids": [5], "sampling_params": {"max_new_tokens": 8}}
_EPISODES: dict[str, Any] = {"client_uuid": "c", "claim_id": "1", "wait_s": 0}
REQUESTS: list[tuple[str, str, Any]] = [
    ("POST", "session_heartbeat", {"session_id": "<session>"}),
    ("POST", "session_heartbeat", {"model_id": "<xorl>"}),
    ("GET", "sessions/<session>", None),
    ("POST", "create_model", {"session_id": "<session>", "model_seq_id": 0, **_CREATE}),
    ("POST", "create_model", {"session_id": "<session>", "model_seq_id": 7, **_CREATE}),
    ("POST", "create_model", {"session_id": "<session>", "model_seq_id": 0, "base_model": BASE, "lora_config": WRONG}),
    ("POST", "load_weights", {"session_id": "<own>", "model_seq_id": 7, "path": _TRAINING, "optimizer": True}),
    ("POST", "load_weights", {"session_id": "<own>", "model_seq_id": 7, "path": _TRAINING, "base_model": BASE}),
    ("POST", "load_weights", {"session_id": "<session>", "model_seq_id": 7, "path": _TRAINING}),
    ("POST", "load_weights", {"model_id": "<mine>", "seq_id": 1, "path": _TRAINING, "optimizer": True}),
    ("POST", "load_weights", {"model_id": "<mine>", "seq_id": 1, "path": "xorl://<xorl>/weights/<secret>"}),
    ("POST", "load_weights", {"model_id": "<model>", "seq_id": 3, "path": _TRAINING}),
    ("POST", "load_weights", {"model_id": "<xorl>", "seq_id": 3, "path": "<secret>"}),
    ("POST", "forward_backward", None),
    ("POST", "forward_backward", {"model_id": "<xorl>", "seq_id": 1, **INPUT}),
    ("POST", "forward", {"model_id": "<xorl>", "seq_id": 1, "forward_input": INPUT["forward_backward_input"]}),
    ("POST", "optim_step", {"model_id": "<model>", "seq_id": 3, "adam_params": ADAM}),
    ("POST", "optim_step", {"model_id": "<xorl>", "seq_id": 3, "adam_params": ADAM}),
    ("POST", "optim_step", {"model_id": "<xorl>", "seq_id": 3, "adam_params": {"learning_rate": WRONG}}),
    ("POST", "abort_gradient_epoch", {"model_id": "<xorl>", "seq_id": 3}),
    ("POST", "save_weights", {"model_id": "<model>", "seq_id": 3, "path": "mine"}),
    ("POST", "save_weights", {"model_id": "<xorl>", "seq_id": 3, "path": "<secret>"}),
    ("POST", "save_weights_for_sampler", {"model_id": "<model>", "seq_id": 3, "path": "mine"}),
    ("POST", "save_weights_for_sampler", {"model_id": "<model>", "seq_id": 3, "sampling_session_seq_id": 1}),
    ("POST", "save_weights_external", {"model_id": "<model>", "seq_id": 3, "path": "mine"}),
    ("POST", "retrieve_future", {"request_id": "<future>", "allow_metadata_only": False}),
    ("POST", "retrieve_future", {"request_id": "<failure>"}),
    ("POST", "retrieve_future", {"request_id": "<sample>", "allow_metadata_only": False}),
    ("POST", "get_info", {"model_id": "<model>"}),
    ("POST", "weights_info", {"model_id": "<xorl>"}),
    ("POST", "weights_info", {"tinker_path": _TRAINING}),
    ("POST", "weights_info", {"xorl_path": "xorl://<xorl>/weights/<secret>"}),
    ("GET", "training_runs/<model>", None),
    ("GET", "training_runs/<model>/checkpoints", None),
    ("POST", "list_checkpoints", {"model_id": "<xorl>"}),
    ("PUT", f"{_OF_RUN}/ttl", {"ttl_seconds": 3600}),
    ("POST", f"{_OF_RUN}/publish", None),
    ("DELETE", f"{_OF_RUN}/publish", None),
    ("GET", f"{_OF_RUN}/external_weights_urls", None),
    ("GET", f"{_OF_RUN}/archive", None),
    ("POST", "create_sampling_session", {"session_id": "<session>", "sampling_session_seq_id": 0, "base_model": BASE}),
    ("POST", "create_sampling_session", {"session_id": "<own>", "sampling_session_seq_id": 0, "model_path": _SAMPLER}),
    ("POST", "create_sampling_session", {"model_path": "xorl://<xorl>/sampler_weights/<secret>"}),
    ("GET", "samplers/<own>:sample:0:<address>", None),
    ("POST", "asample", sample("<own>:sample:0:<address>")),
    ("POST", "/generate", {"lora_path": "<secret>", **_GENERATE}),
    ("POST", "/generate", {"lora_path": "xorl://<xorl>/sampler_weights/<secret>", **_GENERATE}),
    ("POST", "/sync_inference_weights", {"model_id": "<xorl>"}),
    ("POST", f"/e/{ENGINE}/claim_episodes", {**_EPISODES, "sampler": _SAMPLER}),
    ("POST", "delete_checkpoint", {"model_id": "<xorl>", "checkpoint_id": "<secret>"}),
    ("DELETE", "training_runs/<model>/checkpoints/weights/<secret>", None),
    ("POST", "kill_session", {"model_id": "<xorl>"}),
    ("POST", "unload_model", {"model_id": "<xorl>"}),
    ("POST", "unload_model", {"model_id": "<model>"}),
    ("POST", "sessions/<session>/finish", {"reason": {"type": "success"}}),
]


async def test_what_is_anothers_is_answered_as_what_is_not_there_and_nothing_changes(
    hive: OperationHive, ann: httpx.AsyncClient, eve: httpx.AsyncClient
) -> None:
    names = await furnished(ann)
    hive.replica.otherwise = says("hello there")
    await hive.join_replica()
    session = (await open_model(eve)).partition(":")[0]
    await create(eve, "eves")
    own = {"own": session, "mine": "eves"}
    before, executed = of_ann(hive), len(hive.executed)
    told: list[str] = []
    for method, path, body in REQUESTS:
        foreign = await answer(eve, method, path, body, names._asdict() | own)
        unknown = await answer(eve, method, path, body, UNKNOWN._asdict() | own)
        for there, made_up in sorted(zip(names, UNKNOWN, strict=True), key=lambda each: -len(each[0])):
            foreign = foreign.replace(there, made_up)
        assert (path, body, foreign) == (path, body, unknown)
        assert of_ann(hive) == before, path
        told.append(foreign)
    assert {model for model, _ in hive.executed[executed:]} <= {"eves"}
    assert not [each for _, each in hive.executed if isinstance(each, LoadWeights)]
    own = {"own": names.session, "mine": names.xorl}
    for (method, path, body), refused in zip(REQUESTS, told, strict=True):
        await hive.say_replica_alive()
        allowed = await answer(ann, method, path, body, names._asdict() | own)
        assert allowed != refused or WRONG in json.dumps(body), f"{path} says no more to the owner: {allowed}"
    assert of_ann(hive) != before


async def answer(client: httpx.AsyncClient, method: str, path: str, body: Any, names: dict[str, str]) -> str:
    """Return the status of an answer with its text, and of a future its result."""
    if path == "forward_backward" and body is None:
        content = request(datum(chunk(5, 6), target_tokens=TARGETS), model=names["model"], seq=3)
        headers = {"content-type": "application/x-protobuf"}
        response = await client.post(path, content=content, headers=headers)
    else:
        url = with_names(path, names)
        url = str(client.base_url).replace("/api/v1/", url) if url.startswith("/") else url
        given = None if body is None else json.loads(with_names(json.dumps(body), names))
        response = await client.request(method, url, json=given)
    is_json = response.headers.get("content-type", "") == "application/json"
    if is_json and response.status_code == 200 and path != "retrieve_future" and "request_id" in response.json():
        response = await result(client, response.json())
    return f"{response.status_code} {response.text if is_json else response.content!r}"


def with_names(text: str, names: dict[str, str]) -> str:
    for name, value in names.items():
        text = text.replace(f"<{name}>", value)
    return text


def of_ann(hive: OperationHive) -> bytes:
    """Return all that is of ann's on the log."""
    seen = seen_by(hive.engine.clients, "ann")
    return msgspec.msgpack.encode([seen.sessions, seen.models, seen.kept])


async def test_lists_have_what_is_the_clients_own_and_a_key_without_a_name_lists_all(
    hive: OperationHive, ann: httpx.AsyncClient, eve: httpx.AsyncClient
) -> None:
    names = await furnished(ann)
    mine = await open_model(eve)
    own = mine.partition(":")[0]
    async with client_of(hive, "all") as everything:
        for client, models, sessions, checkpoints in (
            (ann, {names.model, "anns"}, 2, 4),
            (eve, {mine}, 1, 0),
            (everything, {names.model, "anns", mine}, 3, 4),
        ):
            runs = (await client.get("training_runs")).json()
            assert {run["training_run_id"] for run in runs["training_runs"]} == models
            assert runs["cursor"]["total_count"] == len(models)
            assert len((await client.get("sessions")).json()["sessions"]) == sessions
            assert (await client.get("checkpoints")).json()["cursor"]["total_count"] == checkpoints
            assert set((await client.get("session_info")).json()["active_sessions"]) == models
            found = await ask(client, "sessions/search", owner={"type": "accessible"})
            assert len(found["sessions"]) == sessions
        of_others = await ask(eve, "sessions/search", owner={"type": "user", "owner_urns": ["ann", "eve"]})
        assert [each["session_id"] for each in of_others["sessions"]] == [own]
        assert (await step_result(everything, names.model, 3))["type"] == "optim_step"


async def step_result(client: httpx.AsyncClient, model: str, seq: int) -> Any:
    answered = await result(client, await step(client, model, seq))
    return answered.json() | {"type": "optim_step"} if "metrics" in answered.json() else answered.json()


async def test_a_checkpoint_that_is_published_is_loaded_and_sampled_by_everybody_and_changed_by_its_owner(
    hive: OperationHive, ann: httpx.AsyncClient, eve: httpx.AsyncClient
) -> None:
    names = await furnished(ann)
    mine = await open_model(eve)
    session = mine.partition(":")[0]
    for kind in ("weights", "sampler_weights"):
        path = f"training_runs/{names.model}/checkpoints/{kind}/secret/publish"
        assert (await ann.post(path)).status_code == 204
    training, sampler = f"tinker://{names.model}/weights/secret", f"tinker://{names.model}/sampler_weights/secret"
    assert (await ask(eve, "weights_info", tinker_path=training))["lora_rank"] == 8
    made = await ask(eve, "load_weights", session_id=session, model_seq_id=1, path=training, optimizer=True)
    assert (await result(eve, made)).json()["model_id"] == f"{session}:train:1"
    loaded = await ask(eve, "load_weights", model_id=mine, seq_id=1, path=training, optimizer=False)
    assert "error" not in (await result(eve, loaded)).json()
    begun = {"session_id": session, "sampling_session_seq_id": 0, "model_path": sampler}
    name = (await ask(eve, "create_sampling_session", **begun))["sampling_session_id"]
    assert (await eve.get(f"samplers/{name}")).json()["model_path"] == sampler
    of_run = f"training_runs/{names.model}/checkpoints/sampler_weights/secret"
    for method, path in (("DELETE", of_run), ("DELETE", f"{of_run}/publish"), ("PUT", f"{of_run}/ttl")):
        refused = await eve.request(method, path, json={"ttl_seconds": 3600})
        assert (refused.status_code, "There is no checkpoint" in refused.text) == (404, True)
    assert (await eve.get("checkpoints")).json()["checkpoints"] == [], "but it is in no list of others"


async def test_a_name_of_xorls_client_is_its_own_while_anything_of_it_is_there(
    hive: OperationHive, ann: httpx.AsyncClient, eve: httpx.AsyncClient
) -> None:
    assert "model_id" in await create(ann, "default")
    taken = "The name default is in use by another client: give another model_id."
    assert (await create(eve, "default"))["error"] == taken
    refused = await eve.post("create_session", json={"session_id": "default", "base_model": BASE, "lora_config": LORA})
    assert (refused.status_code, refused.json()["detail"]) == (400, taken)
    await save(ann, "default", "step-1")
    assert (await ask(ann, "kill_session", model_id="default", save_checkpoint=False))["success"]
    assert (await create(eve, "default"))["error"] == taken
    assert "model_id" in await create(eve, "eves")
    assert "model_id" in await create(ann, "default")
    owners = {each.for_model: each.owner for each in hive.engine.clients.sessions.values()}
    assert len(hive.engine.clients.sessions) == 3, "what is refused opens no session"
    assert owners == {True: "ann"}


async def test_generate_samples_from_the_clients_own_checkpoint_of_a_name_and_refuses_where_there_are_several(
    hive: OperationHive, ann: httpx.AsyncClient, eve: httpx.AsyncClient
) -> None:
    for client, model in ((ann, "anns"), (eve, "eves")):
        assert "model_id" in await create(client, model)
        await save(client, model, "step-1")
    await hive.join_replica()
    hive.replica.otherwise = says("hello there")
    url, body = f"{hive.url}/generate", {"lora_path": "step-1", **_GENERATE}
    for client, address in ((ann, "1"), (eve, "2")):
        assert (await client.post(url, json=body)).status_code == 200
        assert hive.replica.requests[-1].adapter == address.ljust(64, "0")
    await create(ann, "anns-too")
    await save(ann, "anns-too", "step-1")
    refused = await ann.post(url, json=body)
    assert refused.status_code == 400
    assert refused.json()["detail"].startswith("Several models have a checkpoint step-1: anns, anns-too. Give its path")
    path = "xorl://anns/sampler_weights/step-1"
    assert (await ann.post(url, json=body | {"lora_path": path})).status_code == 200
    assert hive.replica.requests[-1].adapter == "1".ljust(64, "0")
    assert (await ask(ann, "kill_session", model_id="anns", save_checkpoint=False))["success"]
    assert (await ann.post(url, json=body)).status_code == 200, "one of them has not ended"
    assert hive.replica.requests[-1].adapter == "3".ljust(64, "0")


async def test_weights_in_sync_go_to_endpoints_of_their_owner_and_are_sampled_by_that_alone(
    hive: OperationHive, ann: httpx.AsyncClient, eve: httpx.AsyncClient
) -> None:
    async with scripted() as anns, scripted() as eves:
        for client, model, server in ((ann, "anns", anns), (eve, "eves", eves)):
            await create(client, model)
            added = await at_root(client, "add_inference_endpoint", host="127.0.0.1", port=server.port)
            assert added["success"]
            assert [each["port"] for each in await listed(client)] == [server.port]
        taken = await at_root(eve, "add_inference_endpoint", host="127.0.0.1", port=anns.port)
        assert not taken["success"]
        assert taken["message"].endswith("was registered by another client and gets only that client's weights.")
        removed = await at_root(eve, "remove_inference_endpoint", host="127.0.0.1", port=anns.port)
        assert removed["message"] == f"127.0.0.1:{anns.port} is not registered."
        await synced(ann, "anns")
        assert (len(anns.loaded), len(eves.loaded)) == (1, 0)
        await synced(eve, "")
        assert (len(anns.loaded), len(eves.loaded)) == (1, 1)
        async with client_of(hive, "all") as everything:
            assert len(await listed(everything)) == 2
            await synced(everything, "anns")
        assert (len(anns.loaded), len(eves.loaded)) == (2, 1)


async def test_what_one_client_has_put_in_sync_is_not_what_another_samples(
    hive: OperationHive, ann: httpx.AsyncClient, eve: httpx.AsyncClient
) -> None:
    await create(ann, "anns")
    await create(eve, "eves")
    await hive.join_replica()
    hive.replica.otherwise = says("hello there")
    await synced(ann, "anns")
    for client, address in ((ann, "1".ljust(64, "0")), (eve, "")):
        assert (await client.post(f"{hive.url}/generate", json=_GENERATE)).status_code == 200
        assert hive.replica.requests[-1].adapter == address


async def at_root(client: httpx.AsyncClient, route: str, **body: Any) -> dict[str, Any]:
    return await ask(client, str(client.base_url).replace("/api/v1/", f"/{route}"), **body)


async def listed(client: httpx.AsyncClient) -> list[dict[str, Any]]:
    answered = await client.get(str(client.base_url).replace("/api/v1/", "/list_inference_endpoints"))
    found: list[dict[str, Any]] = answered.json()["endpoints"]
    return found


async def synced(client: httpx.AsyncClient, model: str) -> None:
    report = await at_root(client, "sync_inference_weights", model_id=model)
    assert report["success"], report["message"]
