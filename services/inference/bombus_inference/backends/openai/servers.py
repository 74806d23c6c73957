"""The two kinds of external servers behind one protocol: how they generate, and how they load new weights."""

import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Protocol

import httpx
import msgspec
from msgspec import Struct

from bombus.errors import EngineFault
from bombus.hive.generation import Generate
from bombus_inference.backends.http_calls import JSON, BackendFailed, check_answer, server_sent
from bombus_inference.backends.openai.wire import (
    ServerChoice,
    completions_body,
    parse_completions,
    parse_sglang,
    sglang_body,
)

log = logging.getLogger(__name__)

DETECT_TIMEOUT_S = 10.0

ServerChoices = AsyncIterator[list[ServerChoice]]


class Server(Protocol):
    """`can_load` says whether it has a route to change its weights; `context` is its limit in tokens, 0 if unknown."""

    can_load: bool
    context: int

    def generate(self, request: Generate, prompt: list[int], tokens_max: int) -> ServerChoices:
        """Yield parts of the answer as they arrive. Raises `BackendFailed`, `Refused` or `httpx.HTTPError`."""

    async def load(self, folder: Path, label: str, timeout_s: float) -> None:
        """Load weights from a folder that the server sees too. Raises `BackendFailed` or `httpx.HTTPError`."""


class ListedModel(Struct):
    id: str
    max_model_len: int | None = None


class ModelList(Struct):
    data: list[ListedModel]


class SglangUpdate(Struct):
    success: bool = False
    message: str = ""


class CompletionsServer:
    """vLLM, or another server with vLLM's completions of token ids. Weights change by vLLM's development routes."""

    def __init__(self, client: httpx.AsyncClient, model: ListedModel, can_load: bool) -> None:
        self.can_load = can_load
        self.context = model.max_model_len or 0
        self._client = client
        self._model = model.id

    async def generate(self, request: Generate, prompt: list[int], tokens_max: int) -> ServerChoices:
        body = completions_body(self._model, request, prompt, tokens_max)
        async with self._client.stream("POST", "/v1/completions", content=body, headers=JSON) as response:
            await check_answer(response)
            if not request.stream:
                yield parse_completions(await response.aread())
                return
            async for event in server_sent(response):
                yield parse_completions(event)

    async def load(self, folder: Path, label: str, timeout_s: float) -> None:
        reload = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        for path, json in (
            ("/collective_rpc", reload),
            ("/update_weight_version", {"new_version": label}),
            ("/reset_prefix_cache?reset_running_requests=true", None),
        ):
            response = await self._client.post(path, json=json, timeout=timeout_s)
            if response.status_code != 200 or b'"success":false' in response.content:
                raise BackendFailed(f"{path} answered {response.status_code}: {response.text[:400]}")


class SglangServer:
    can_load = True
    context = 0

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client

    async def generate(self, request: Generate, prompt: list[int], tokens_max: int) -> ServerChoices:
        body = sglang_body(request, prompt, tokens_max)
        response = await self._client.post("/generate", content=body, headers=JSON)
        await check_answer(response)
        yield parse_sglang(response.content)

    async def load(self, folder: Path, label: str, timeout_s: float) -> None:
        wanted = {"model_path": str(folder), "weight_version": label, "flush_cache": True}
        response = await self._client.post("/update_weights_from_disk", json=wanted, timeout=timeout_s)
        if response.status_code not in (200, 400):
            raise BackendFailed(f"/update_weights_from_disk answered {response.status_code}: {response.text[:400]}")
        loaded = msgspec.json.decode(response.content, type=SglangUpdate)
        if not loaded.success:
            raise BackendFailed(f"it did not load the weights: {loaded.message}")


async def detect_server(client: httpx.AsyncClient, model: str) -> Server:
    """Find out which kind of server answers. Raises `EngineFault` if none does, or an unknown one."""
    where = str(client.base_url).rstrip("/")
    try:
        for path in ("/model_info", "/get_model_info"):
            if (await client.get(path, timeout=DETECT_TIMEOUT_S)).status_code == 200:
                return SglangServer(client)
        response = await client.get("/v1/models", timeout=DETECT_TIMEOUT_S)
        if response.status_code != 200:
            raise EngineFault(
                f"{where} answers {response.status_code} at /v1/models: it is not a vLLM or SGLang server, "
                "or it wants a key"
            )
        models = msgspec.json.decode(response.content, type=ModelList).data
        can_load = (await client.get("/weight_info", timeout=DETECT_TIMEOUT_S)).status_code == 200
    except (httpx.HTTPError, msgspec.MsgspecError) as error:
        raise EngineFault(f"no server can be used at {where}: {str(error) or type(error).__name__}") from error
    found = next((one for one in models if not model or one.id == model), None)
    if found is None:
        raise EngineFault(f"{where} serves {', '.join(one.id for one in models) or 'no model'}, not {model!r}")
    return CompletionsServer(client, found, can_load)
