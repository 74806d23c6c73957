"""Adapters over a replica's HTTP side: loaded, listed, used by name, and unloaded."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import msgspec
import pytest
from transformers import PreTrainedModel

from bombus.hive.generation import Generate, encode_request
from bombus.machine.advertising import url_of
from bombus.machine.http_server import http_server
from bombus.machine.process import listen
from bombus_inference.backends.openai.backend import OpenAIBackend
from bombus_inference.backends.protocol import Policy
from bombus_inference.backends.torch.backend import TorchBackend
from bombus_inference.backends.vllm.backend import VllmBackend
from bombus_inference.server import App, MakeBackend
from bombus_inference.settings import ComputeSettings, OpenAISettings, ServerSettings, VllmSettings
from tests.inference.backends.small_adapters import address_of, random_adapter, with_merged, write_adapter
from tests.inference.backends.small_engines import CONTEXT, llama, request, save, worst_difference
from tests.inference.test_server import held, read
from tests.patience import until

COMPUTE = ComputeSettings(kv_cache_bytes=4 << 20)
UNKNOWN = address_of(9)


async def no_stage(_: str) -> None:
    pass


@asynccontextmanager
async def serving(make: MakeBackend) -> AsyncIterator[tuple[App, httpx.AsyncClient]]:
    bound = listen("127.0.0.1", 0)
    app = App(ServerSettings(), "main", "r1", make)
    try:
        async with (
            http_server(app, bound, app.settings.drain_s),
            httpx.AsyncClient(base_url=url_of(bound), timeout=20) as client,
        ):
            yield app, client
    finally:
        await app.close()


@asynccontextmanager
async def serving_model(
    folder: Path, compute: ComputeSettings = COMPUTE
) -> AsyncIterator[tuple[App, httpx.AsyncClient, PreTrainedModel]]:
    model = llama()
    async with serving(lambda deliver: TorchBackend(compute, deliver)) as (app, client):
        await app.backend.load(Policy(save(model, folder / "model"), 1, 0, CONTEXT), no_stage)
        yield app, client, model


async def load(client: httpx.AsyncClient, address: str, folder: Path) -> httpx.Response:
    return await client.post("/adapters", json={"address": address, "folder": str(folder)})


async def post(client: httpx.AsyncClient, body: Generate, adapter: str = "") -> httpx.Response:
    return await client.post("/generate", content=encode_request(msgspec.structs.replace(body, adapter=adapter)))


async def test_an_adapter_is_loaded_once_listed_used_and_unloaded(tmp_path: Path) -> None:
    factors = random_adapter(llama(), 1)
    address = write_adapter(tmp_path / "adapter", factors)
    size = sum(4 * side.numel() for sides in factors.values() for side in sides)
    async with serving_model(tmp_path) as (_, client, model):
        first = await load(client, address, tmp_path / "adapter")
        again = await load(client, address, tmp_path / "adapter")
        listed = await client.get("/adapters")
        made = await post(client, request([1, 2, 3]), address)
        metrics = (await client.get("/metrics")).text
        gone = await client.delete(f"/adapters/{address}")
        after = await post(client, request([1, 2, 3]), address)
    assert (first.status_code, first.json()) == (200, {"address": address, "new": True})
    assert (again.status_code, again.json()) == (200, {"address": address, "new": False})
    assert listed.json() == {"adapters": [{"address": address, "bytes": size, "uses": 0}]}
    assert worst_difference(with_merged(model, factors), [1, 2, 3], read(made.content).only) < 1e-4
    assert f'bombus_inference_adapter_bytes{{engine="main"}} {float(size)}\n' in metrics
    assert gone.status_code == 200
    fault = read(after.content).fault
    assert fault is not None
    assert (after.status_code, fault.code) == (404, "unknown_model")
    assert f"does not have adapter {address}: load it first" in fault.why


async def test_an_adapter_is_loaded_while_others_generate(tmp_path: Path) -> None:
    address = write_adapter(tmp_path / "adapter", random_adapter(llama(), 1))
    async with serving_model(tmp_path) as (app, client, _):
        waiting = [asyncio.ensure_future(post(client, request([seed], seed=seed, max_tokens=200))) for seed in range(4)]
        await until(lambda: app.open_requests == 4)
        assert (await load(client, address, tmp_path / "adapter")).status_code == 200
        assert (await post(client, request([1], max_tokens=3), address)).status_code == 200
        answers = [read((await one).content).only for one in waiting]
    assert [len(answer.tokens) for answer in answers] == [200] * 4


async def test_an_adapter_in_use_is_not_unloaded(tmp_path: Path) -> None:
    address = write_adapter(tmp_path / "adapter", random_adapter(llama(), 1))
    async with serving_model(tmp_path) as (app, client, _):
        await load(client, address, tmp_path / "adapter")
        async with held(app) as release:
            waiting = asyncio.ensure_future(post(client, request([1], max_tokens=240), address))
            await until(lambda: app.open_requests == 1)
            refusing = asyncio.ensure_future(client.delete(f"/adapters/{address}"))
            release()
            refused = await refusing
        await waiting
        assert (refused.status_code, refused.json()["code"]) == (503, "overloaded")
        assert (await client.delete(f"/adapters/{address}")).status_code == 200


async def test_wrong_requests_are_refused_with_a_sentence(tmp_path: Path) -> None:
    address = write_adapter(tmp_path / "adapter", random_adapter(llama(), 1))
    wrong = {
        b"nonsense": "the body is not",
        b'{"address": 3}': "the body is not",
        json.dumps({"address": address, "folder": "relative"}).encode(): "the full path of a folder",
        json.dumps({"address": "x", "folder": str(tmp_path)}).encode(): "64 hexadecimal digits",
        json.dumps({"address": UNKNOWN, "folder": str(tmp_path / "adapter")}).encode(): f"not {UNKNOWN}",
        json.dumps({"address": UNKNOWN, "folder": str(tmp_path / "none")}).encode(): "cannot be served",
    }
    async with serving_model(tmp_path) as (_, client, _):
        for body, why in wrong.items():
            response = await client.post("/adapters", content=body)
            assert response.status_code == 400
            assert why in response.json()["why"]
        missing = await client.delete(f"/adapters/{UNKNOWN}")
        odd = await client.delete("/adapters/..")
        assert (missing.status_code, missing.json()["code"]) == (404, "unknown_model")
        assert odd.status_code in (400, 404)
        assert (await post(client, request([1]))).status_code == 200


async def test_a_replica_without_weights_or_without_room_for_adapters_says_so(tmp_path: Path) -> None:
    address = write_adapter(tmp_path / "adapter", random_adapter(llama(), 1))
    async with serving(lambda deliver: TorchBackend(COMPUTE, deliver)) as (_, client):
        early = await load(client, address, tmp_path / "adapter")
        assert (early.status_code, early.json()["code"]) == (503, "no_replica")
    without = ComputeSettings(kv_cache_bytes=4 << 20, adapters_bytes=0)
    async with serving_model(tmp_path, without) as (_, client, _):
        refused = await load(client, address, tmp_path / "adapter")
        assert refused.status_code == 400
        assert "--adapters-mb" in refused.json()["why"]
        fault = read((await post(client, request([1]), address)).content).fault
        assert fault is not None
        assert fault.code == "unsupported"


async def test_adapters_end_with_their_run(tmp_path: Path) -> None:
    address = write_adapter(tmp_path / "adapter", random_adapter(llama(), 1))
    async with serving_model(tmp_path) as (app, client, _):
        await load(client, address, tmp_path / "adapter")
        await app.backend.load(Policy(tmp_path / "model", 2, 0, CONTEXT), no_stage)
        assert (await client.get("/adapters")).json() == {"adapters": []}
        assert (await post(client, request([1], run=2), address)).status_code == 404


def vllm(compute: ComputeSettings) -> MakeBackend:
    return lambda deliver: VllmBackend(compute, VllmSettings(), deliver)


def external(compute: ComputeSettings) -> MakeBackend:
    return lambda deliver: OpenAIBackend(compute, OpenAISettings(url="http://127.0.0.1:9"), deliver)


@pytest.mark.parametrize("make", [vllm, external])
async def test_backends_without_adapters_refuse_them_in_words(make: object) -> None:
    assert callable(make)
    without = ComputeSettings(kv_cache_bytes=4 << 20, adapters_bytes=0)
    async with serving(make(without)) as (_, client):
        refused = await load(client, UNKNOWN, Path("/tmp"))
        assert (refused.status_code, refused.json()["code"]) == (400, "unsupported")
        assert "use the torch backend" in refused.json()["why"]
        assert (await client.get("/adapters")).json() == {"adapters": []}
