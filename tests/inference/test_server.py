"""The replica's HTTP side, on a real socket with a real, small engine."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, NoReturn

import httpx
import msgspec
import pytest

from bombus.errors import EngineFault
from bombus.hive.generation import CONTENT_TYPE, Fault, FrameReader, Generate, encode_request
from bombus.machine.advertising import url_of
from bombus.machine.http_server import http_server
from bombus.machine.process import listen
from bombus_inference.backends.protocol import UNLOADED
from bombus_inference.backends.torch.backend import TorchBackend
from bombus_inference.backends.torch.engine import Engine
from bombus_inference.backends.torch.thread import EngineThread
from bombus_inference.server import BODY_BYTES_MAX, App
from bombus_inference.settings import ComputeSettings, ServerSettings
from tests.inference.backends.small_engines import Answer, another, engine_for, finish, llama, request
from tests.patience import until


def backend(app: App) -> TorchBackend:
    assert isinstance(app.backend, TorchBackend)
    return app.backend


def engine_thread(app: App) -> EngineThread:
    return backend(app).thread


def tokens_decoded(app: App) -> int:
    stats = engine_thread(app).stats
    return 0 if stats is None else stats.decode_tokens


@asynccontextmanager
async def serving(**settings: Any) -> AsyncIterator[tuple[App, Engine, httpx.AsyncClient]]:
    bound = listen("127.0.0.1", 0)
    app = App(ServerSettings(**settings), "main", "r1", lambda deliver: TorchBackend(ComputeSettings(), deliver))
    engine = engine_for(llama())
    try:
        async with (
            http_server(app, bound, app.settings.drain_s),
            httpx.AsyncClient(base_url=url_of(bound), timeout=20) as client,
        ):
            await engine_thread(app).install(engine, UNLOADED)
            backend(app).run, backend(app).version = 1, 0
            yield app, engine, client
    finally:
        await app.close()


def read(body: bytes) -> Answer:
    answer = Answer()
    for frame in FrameReader().feed(body):
        answer.take(frame)
    return answer


async def post(client: httpx.AsyncClient, generate: Generate) -> httpx.Response:
    return await client.post("/generate", content=encode_request(generate))


@asynccontextmanager
async def held(app: App) -> AsyncIterator[Callable[[], None]]:
    """Stop the engine's thread between two steps until the block ends, or until the yielded function is called."""
    free = threading.Event()
    turn = asyncio.ensure_future(engine_thread(app).call(lambda _: free.wait(20)))
    try:
        yield free.set
    finally:
        free.set()
        await turn


async def test_an_answer_is_what_the_engine_makes_alone() -> None:
    generate = request([1, 2, 3], n=3)
    alone = engine_for(llama())
    alone.add(1, generate)
    async with serving() as (_, _, client):
        response = await post(client, generate)
    assert response.status_code == 200
    assert response.headers["content-type"] == CONTENT_TYPE
    made = read(response.content)
    assert {number: choice.tokens for number, choice in made.choices.items()} == {
        number: choice.tokens for number, choice in finish(alone)[1].choices.items()
    }


async def test_a_stream_begins_before_its_completion_ends() -> None:
    async with serving() as (app, engine, client):
        content = encode_request(request([1, 2, 3], stream=True, max_tokens=200))
        async with client.stream("POST", "/generate", content=content) as response:
            reader, answer = FrameReader(), Answer()
            chunks = response.aiter_raw()
            for frame in reader.feed(await anext(chunks)):
                answer.take(frame)
            begun = len(answer.only.tokens)
            async for chunk in chunks:
                for frame in reader.feed(chunk):
                    answer.take(frame)
        assert 0 < begun < 200
        assert (len(answer.only.tokens), answer.only.frames) == (200, 200)
        assert engine.stats.blocks_held == 0
        await until(lambda: app.open_requests == 0)


async def test_hundreds_of_requests_at_once_are_batched() -> None:
    async with serving() as (_, engine, client):
        responses = await asyncio.gather(*(post(client, request([seed % 50], seed=seed)) for seed in range(200)))
        assert all(len(read(response.content).only.tokens) == 12 for response in responses)
        assert engine.stats.steps < 200 * 12 / 4


async def test_a_client_that_disconnects_frees_its_place() -> None:
    async with serving() as (app, engine, client):
        content = encode_request(request([1, 2, 3], stream=True, max_tokens=240))
        async with client.stream("POST", "/generate", content=content) as response:
            await anext(response.aiter_raw())
        await until(lambda: app.open_requests == 0)
        await engine_thread(app).call(lambda _: None)  # after the abort
        assert not engine.has_work
        assert engine.stats.blocks_held == 0


async def test_a_client_that_disconnects_before_its_first_token_frees_its_place() -> None:
    async with serving() as (app, engine, client):
        async with held(app):
            waiting = asyncio.ensure_future(post(client, request([1, 2, 3], max_tokens=240)))
            await until(lambda: app.open_requests == 1)
            waiting.cancel()
            await until(lambda: app.open_requests == 0)
        await engine_thread(app).call(lambda _: None)
        assert not engine.has_work


async def test_a_full_replica_answers_503_and_says_that_another_may_serve() -> None:
    async with serving(requests_max=2) as (app, _, client), held(app) as release:
        open_ones = [asyncio.ensure_future(post(client, request([seed]))) for seed in range(2)]
        await until(lambda: app.open_requests == 2)
        response = await post(client, request([1]))
        assert response.status_code == 503
        fault = read(response.content).fault
        assert fault is not None
        assert (fault.code, fault.retry) == ("overloaded", True)
        release()
        assert [response.status_code for response in await asyncio.gather(*open_ones)] == [200, 200]


@pytest.mark.parametrize(
    ("generate", "status", "code", "retry"),
    [
        (request([1] * 300), 400, "prompt_too_long", False),
        (request([1], temperature=-1.0), 400, "malformed", False),
        (request([1], run=2), 400, "wrong_phase", True),
        (msgspec.structs.replace(request([1]), engine="other"), 503, "no_replica", True),
    ],
)
async def test_a_refusal_is_a_fault_with_a_status(generate: Generate, status: int, code: str, retry: bool) -> None:
    async with serving() as (app, engine, client):
        response = await post(client, generate)
        assert response.status_code == status
        fault = read(response.content).fault
        assert fault is not None
        assert (fault.code, fault.retry) == (code, retry)
        assert not engine.has_work
        await until(lambda: app.open_requests == 0)


async def test_bodies_that_are_nonsense_or_too_large_are_refused() -> None:
    async with serving() as (_, _, client):
        nonsense = await client.post("/generate", content=b"\xc1")
        large = await client.post("/generate", content=b"x" * (BODY_BYTES_MAX + 1))
    assert (nonsense.status_code, large.status_code) == (400, 413)


async def test_what_msgpack_cannot_hold_is_a_fault_and_never_a_500() -> None:
    good = encode_request(request([1]))
    deep = bytes([good[0] + 1]) + good[1:] + b"\xa1z" + b"\x91" * 5000 + b"\xc0"
    not_unicode = good.replace(b"main", b"ma\xff\xfe")
    assert good not in (deep, not_unicode)
    async with serving() as (_, _, client):
        for body in (deep, not_unicode, b"", b"\x91" * 100_000):
            response = await client.post("/generate", content=body)
            fault = read(response.content).fault
            assert response.status_code == 400
            assert fault is not None
            assert fault.code == "malformed"


async def test_a_swap_under_load_drops_nothing() -> None:
    state = another(llama()).state_dict()
    async with serving() as (app, _, client):
        posts = [asyncio.ensure_future(post(client, request([seed], seed=seed, max_tokens=150))) for seed in range(20)]
        await until(lambda: tokens_decoded(app) > 100)
        await engine_thread(app).change(lambda engine: engine.swap_weights(state, 1, 1))
        answers = [read((await one).content).only for one in posts]
    for answer in answers:
        assert len(answer.tokens) == 150
        assert answer.versions == sorted(answer.versions)
    assert any(set(answer.versions) == {0, 1} for answer in answers)


async def test_weights_that_do_not_fit_are_the_callers_error_and_serving_goes_on() -> None:
    async with serving() as (app, _, client):
        with pytest.raises(EngineFault, match="lack"):
            await engine_thread(app).change(lambda engine: engine.swap_weights({}, 1, 1))
        assert (await post(client, request([1]))).status_code == 200


async def test_stopping_the_engine_ends_its_open_requests() -> None:
    async with serving() as (app, _, client):
        waiting = asyncio.ensure_future(post(client, request([1], max_tokens=240)))
        await until(lambda: tokens_decoded(app) > 0)
        await engine_thread(app).install(None, UNLOADED)
        stopped = read((await waiting).content).fault
        nothing = await post(client, request([1]))
    assert stopped == UNLOADED
    assert nothing.status_code == 503


class _Broken(Engine):
    def step(self) -> NoReturn:
        raise RuntimeError("out of memory")


async def test_an_engine_that_breaks_ends_its_requests_and_tells_the_service() -> None:
    async with serving() as (app, engine, client):
        engine.__class__ = _Broken
        response = await post(client, request([1]))
        fault = read(response.content).fault
        assert isinstance(fault, Fault)
        assert fault.retry
        with pytest.raises(RuntimeError, match="out of memory"):
            await engine_thread(app).failed


async def test_health_and_metrics_report_what_is_served() -> None:
    async with serving() as (app, _, client):
        await post(client, request([1, 2, 3]))
        health = await client.get("/health")
        metrics = (await client.get("/metrics")).text
        assert (health.status_code, health.json()) == (200, {"status": "ok"})
        assert 'bombus_inference_prefill_tokens_total{engine="main"} 3.0\n' in metrics
        await app.backend.unload()
        assert (await client.get("/health")).status_code == 503
        assert (await client.get("/nothing")).status_code == 404
