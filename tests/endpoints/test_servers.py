"""Which server answers at an address, and what its refusals to load become. The doubles that load are tested with the
backend that uses them (tests/inference/backends/test_openai_backend.py)."""

import asyncio
import gzip
import json
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from bombus.endpoints.servers import (
    ANSWER_BYTES_MAX,
    FoundServer,
    LoadFailed,
    ServerKind,
    find_server,
    load_adapter,
    load_folder,
)
from bombus.errors import EngineFault

Answers = Mapping[str, tuple[int, Any]]
VLLM: Answers = {"/v1/models": (200, {"data": [{"id": "m", "max_model_len": 64}]}), "/weight_info": (200, {})}
UPDATE, NOT = "/update_weights_from_disk", {"success": False}
SGLANG: Answers = {"/get_model_info": (200, {"model_path": "/models/m"})}


def client(answers: Answers, asked: list[tuple[str, Any]] | None = None) -> httpx.AsyncClient:
    """Return a client of a server with these answers, which notes what it is asked."""

    def handle(request: httpx.Request) -> httpx.Response:
        if asked is not None and request.content:
            asked.append((request.url.path, json.loads(request.content)))
        status, body = answers.get(request.url.path, (404, {}))
        return httpx.Response(status, content=body) if isinstance(body, bytes) else httpx.Response(status, json=body)

    return httpx.AsyncClient(transport=httpx.MockTransport(handle), base_url="http://gpu-1:30000")


@pytest.mark.parametrize(
    ("answers", "found"),
    [
        (SGLANG, FoundServer(kind=ServerKind.SGLANG, model="/models/m")),
        (VLLM, FoundServer(kind=ServerKind.VLLM, model="m", context=64)),
        ({"/v1/models": VLLM["/v1/models"]}, FoundServer(kind=ServerKind.VLLM, model="m", context=64, can_load=False)),
    ],
)
async def test_a_server_is_known_by_its_routes(answers: Answers, found: FoundServer) -> None:
    async with client(answers) as http:
        assert await find_server(http) == found


async def test_what_is_no_server_is_told_with_its_address() -> None:
    async with client({}) as http:
        with pytest.raises(EngineFault, match="http://gpu-1:30000 answered 404 at /v1/models"):
            await find_server(http)
    async with httpx.AsyncClient(base_url="http://127.0.0.1:1") as http:
        with pytest.raises(EngineFault, match=r"no server can be used at http://127\.0\.0\.1:1"):
            await find_server(http)


UNREADABLE = {
    "no utf-8": b'{"model_path":"\xff\xfe"}',
    "deep": b'{"model_path":"x","y":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "a flood": b" " * (ANSWER_BYTES_MAX + 1),
}


@pytest.mark.parametrize("body", UNREADABLE.values(), ids=list(UNREADABLE))
async def test_an_answer_that_cannot_be_read_is_a_fault_of_the_server(body: bytes) -> None:
    async with client({"/model_info": (200, body), UPDATE: (200, body)}) as http:
        why = "more than 1048576 bytes" if len(body) > ANSWER_BYTES_MAX else ""
        with pytest.raises(EngineFault, match=f"no server can be used at http://gpu-1:30000: .*{why}"):
            await find_server(http)
        with pytest.raises((LoadFailed, httpx.HTTPError)):
            await load_folder(http, ServerKind.SGLANG, Path("/w/m"), "m/3", 5.0)


async def test_an_answer_that_is_encoded_is_not_unpacked() -> None:
    def handle(_: httpx.Request) -> httpx.Response:
        return httpx.Response(200, headers={"content-encoding": "gzip"}, content=gzip.compress(b'{"success":true}'))

    async with httpx.AsyncClient(transport=httpx.MockTransport(handle), base_url="http://gpu-1:30000") as http:
        with pytest.raises(httpx.DecodingError, match="is encoded"):
            await load_folder(http, ServerKind.SGLANG, Path("/w/m"), "m/3", 5.0)


async def test_a_server_that_never_ends_its_answer_is_left() -> None:
    async def for_ever() -> AsyncIterator[bytes]:
        while True:
            await asyncio.sleep(0)
            yield b""

    async def handle(_: httpx.Request) -> httpx.Response:
        return httpx.Response(200, content=for_ever())

    async with httpx.AsyncClient(transport=httpx.MockTransport(handle), base_url="http://gpu-1:30000") as http:
        with pytest.raises(httpx.ReadTimeout, match=r"was not complete within 0\.1 s"):
            await load_folder(http, ServerKind.SGLANG, Path("/w/m"), "m/3", 0.1)


async def test_sglang_is_asked_to_read_a_folder_and_to_forget_its_cache() -> None:
    asked: list[tuple[str, Any]] = []
    async with client({"/update_weights_from_disk": (200, {"success": True})}, asked) as http:
        await load_folder(http, ServerKind.SGLANG, Path("/w/m"), "m/3", 5.0)
    wanted = {"model_path": "/w/m", "weight_version": "m/3", "flush_cache": True}
    assert asked == [("/update_weights_from_disk", wanted)]


@pytest.mark.parametrize(
    ("kind", "answers", "why"),
    [
        (ServerKind.SGLANG, {UPDATE: (400, {"success": False, "message": "no such folder"})}, "no such folder"),
        (ServerKind.SGLANG, {UPDATE: (200, [])}, "its answer cannot be read"),
        (ServerKind.SGLANG, {UPDATE: (500, {})}, "answered 500"),
        (ServerKind.VLLM, {"/collective_rpc": (404, {})}, "/collective_rpc answered 404"),
        (
            ServerKind.VLLM,
            {"/collective_rpc": (200, {}), "/update_weight_version": (200, NOT)},
            "_version answered 200",
        ),
        (ServerKind.REPLICA, {}, "loads only adapters"),
    ],
)
async def test_a_load_that_fails_says_why(kind: ServerKind, answers: Answers, why: str) -> None:
    async with client(answers) as http:
        with pytest.raises(LoadFailed, match=why):
            await load_folder(http, kind, Path("/w/m"), "m/3", 5.0)


async def test_a_replica_loads_an_adapter_or_says_why_not() -> None:
    asked: list[tuple[str, Any]] = []
    async with client({"/adapters": (200, {"address": "a", "new": True})}, asked) as http:
        await load_adapter(http, Path("/w/a"), "a", 5.0)
    assert asked == [("/adapters", {"address": "a", "folder": "/w/a"})]
    async with client({"/adapters": (400, {"code": "bad_config", "why": "it is on another base"})}) as http:
        with pytest.raises(LoadFailed, match="it is on another base"):
            await load_adapter(http, Path("/w/a"), "a", 5.0)
