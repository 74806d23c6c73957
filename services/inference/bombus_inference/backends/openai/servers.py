"""The two kinds of external servers behind one protocol: how they generate, and how they load new weights."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Protocol

import httpx

from bombus.endpoints.servers import FoundServer, ServerKind, find_server, load_folder
from bombus.hive.generation import Generate
from bombus_inference.backends.http_calls import JSON, check_answer, server_sent
from bombus_inference.backends.openai.wire import (
    ServerChoice,
    completions_body,
    completions_scoring_body,
    parse_completions,
    parse_completions_scores,
    parse_sglang,
    parse_sglang_scores,
    sglang_body,
    sglang_scoring_body,
)

ServerChoices = AsyncIterator[list[ServerChoice]]


class Server(Protocol):
    """An external server.

    `can_load` says whether the server has a route for loading weights. `context` is the server's token limit, or 0 if
    unknown.
    """

    can_load: bool
    context: int

    def generate(self, request: Generate, prompt: list[int], tokens_max: int) -> ServerChoices:
        """Yield parts of the answer as they arrive. Raises `BackendFailed`, `Refused` or `httpx.HTTPError`."""

    async def score(self, tokens: list[int]) -> list[float] | None:
        """Return the logprobs of all tokens except the first, or None if the server gives none.

        Raises `BackendFailed`, `httpx.HTTPError` or `msgspec.MsgspecError`.
        """

    async def load(self, folder: Path, label: str, timeout_s: float) -> None:
        """Load weights from a folder that the server can also read. Raises `LoadFailed` or `httpx.HTTPError`."""


class CompletionsServer:
    """A vLLM server, or one that completes token ids as vLLM does. Weights are loaded through vLLM's development
    routes."""

    def __init__(self, client: httpx.AsyncClient, found: FoundServer) -> None:
        self.can_load = found.can_load
        self.context = found.context
        self._client = client
        self._model = found.model

    async def generate(self, request: Generate, prompt: list[int], tokens_max: int) -> ServerChoices:
        body = completions_body(self._model, request, prompt, tokens_max)
        async with self._client.stream("POST", "/v1/completions", content=body, headers=JSON) as response:
            await check_answer(response)
            if not request.stream:
                yield parse_completions(await response.aread())
                return
            async for event in server_sent(response):
                yield parse_completions(event)

    async def score(self, tokens: list[int]) -> list[float] | None:
        body = completions_scoring_body(self._model, tokens)
        response = await self._client.post("/v1/completions", content=body, headers=JSON)
        await check_answer(response)
        return parse_completions_scores(response.content, tokens)

    async def load(self, folder: Path, label: str, timeout_s: float) -> None:
        await load_folder(self._client, ServerKind.VLLM, folder, label, timeout_s)


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

    async def score(self, tokens: list[int]) -> list[float] | None:
        response = await self._client.post("/generate", content=sglang_scoring_body(tokens), headers=JSON)
        await check_answer(response)
        return parse_sglang_scores(response.content, tokens)

    async def load(self, folder: Path, label: str, timeout_s: float) -> None:
        await load_folder(self._client, ServerKind.SGLANG, folder, label, timeout_s)


async def detect_server(client: httpx.AsyncClient, model: str) -> Server:
    """Find out which kind of server answers. Raises `EngineFault` if none answers, or if its kind is unknown."""
    found = await find_server(client, model)
    return SglangServer(client) if found.kind is ServerKind.SGLANG else CompletionsServer(client, found)
