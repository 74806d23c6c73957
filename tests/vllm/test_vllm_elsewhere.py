"""The openai backend with a real vLLM as the external server."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import httpx
import pytest

from bombus.errors import EngineFault
from bombus.machine.environments import environment_python
from bombus.machine.process import free_port
from bombus.weights.models import build_tiny, load_model
from bombus_inference.backends.openai.backend import OpenAIBackend
from bombus_inference.backends.protocol import Policy
from bombus_inference.backends.vllm import keeper
from bombus_inference.backends.vllm.server import vllm_environment
from bombus_inference.settings import ComputeSettings, OpenAISettings, VllmSettings
from tests.inference.backends.http_backends import BackendClient, ignore_stage
from tests.inference.backends.small_engines import request, worst_difference

CONTEXT = 256
START_S = 600.0
ENGINE = ComputeSettings(max_model_len=CONTEXT, max_running=8)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    made = [tmp_path_factory.mktemp(f"v{seed}") for seed in (0, 1)]
    for seed, folder in enumerate(made):
        build_tiny(folder, seed)
    return made


@asynccontextmanager
async def vllm_server(folder: Path, *options: str) -> AsyncIterator[str]:
    """Yield the address of a vLLM that listens on a port, started as in its own documentation."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [str(environment_python("vllm")), "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(folder), "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"]
    command += ["--max-model-len", str(CONTEXT), "--kv-cache-memory-bytes", str(64 << 20), "--enforce-eager", *options]
    with (folder / "vllm.log").open("wb") as log:
        server = await asyncio.create_subprocess_exec(
            sys.executable, keeper.__file__, str(os.getpid()), *command,
            env=vllm_environment(ComputeSettings(threads=1), VllmSettings()),
            stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
    try:
        async with asyncio.timeout(START_S):
            await until_ready(f"{url}/health", server, folder / "vllm.log")
        yield url
    finally:
        server.send_signal(signal.SIGTERM)
        await server.wait()


@asynccontextmanager
async def external_vllm(folder: Path, *options: str) -> AsyncIterator[tuple[OpenAIBackend, BackendClient]]:
    """Yield a backend for such a vLLM."""
    async with vllm_server(folder, *options) as url:
        client = BackendClient()
        backend = OpenAIBackend(ENGINE, OpenAISettings(url=url), client.deliver)
        try:
            yield backend, client
        finally:
            await backend.stop()


async def until_ready(url: str, server: asyncio.subprocess.Process, log: Path) -> None:
    async with httpx.AsyncClient() as client:
        while True:
            with suppress(httpx.HTTPError):
                if (await client.get(url, timeout=5)).status_code == 200:
                    return
            with suppress(TimeoutError):
                async with asyncio.timeout(0.2):
                    await server.wait()
                    pytest.fail(log.read_text()[-3000:])


async def test_tokens_streams_alternatives_and_new_weights(folders: list[Path]) -> None:
    async with external_vllm(folders[0], "--logprobs-mode", "processed_logprobs") as (backend, client):
        for version in (0, 1):
            await backend.load(Policy(folders[version], 1, version, CONTEXT), ignore_stage)
            for stream in (False, True):
                body = request([5, 6, 7], n=2, top_logprobs=3, stream=stream, max_tokens=20)
                answer = await client.ask(backend, body)
                for made in answer.choices.values():
                    assert made.versions == [version] * 20
                    assert worst_difference(load_model(folders[version]), [5, 6, 7], made) < 1e-4
                    assert all(len(row) == 3 for row in made.top)
        whole = (await client.ask(backend, request([5], seed=3))).only
        made = (await client.ask(backend, request([5], seed=3, stop=(whole.tokens[4],)))).only
        assert made.finish == "stop"
        assert made.tokens == whole.tokens[: whole.tokens.index(whole.tokens[4]) + 1]


async def test_a_vllm_with_default_options_is_refused_for_its_logprobs(folders: list[Path]) -> None:
    async with external_vllm(folders[0]) as (backend, _):
        with pytest.raises(EngineFault, match="--logprobs-mode processed_logprobs"):
            await backend.load(Policy(folders[0], 1, 0, CONTEXT), ignore_stage)
