"""The backend of a replica: how it is chosen, what happens when it is not available, and the command line."""

import argparse
import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Literal

import pytest
from pydantic import BaseModel, ValidationError

from bombus.errors import EngineFault, Refused
from bombus.hive.inbox import LoadBroke, ReplicaAlive, WeightsLoadedFact
from bombus.weights.models import build_tiny
from bombus_inference import cli, service
from bombus_inference.backends.protocol import Policy, with_precision
from bombus_inference.backends.torch.backend import TorchBackend
from bombus_inference.settings import ComputeSettings, InferenceSettings, OpenAISettings
from tests.inference.backends.foreign_servers import KEY, ExternalCompletions, serving
from tests.inference.backends.http_backends import BackendClient, ignore_stage
from tests.inference.backends.small_engines import llama, request
from tests.inference.test_service import COMPUTE, FakeCoordinator, ask, coordinator, ready, started, weights

__all__ = ["coordinator"]

OVERCOMMIT = Path("/proc/sys/vm/overcommit_memory")


@asynccontextmanager
async def replica(**settings: object) -> AsyncIterator[None]:
    chosen = InferenceSettings(
        replica="r1",
        alive_every_s=0.05,
        load_retry_s=0.01,
        compute=COMPUTE,
        **settings,  # type: ignore[arg-type]
    )
    running = asyncio.create_task(service.run(chosen))
    try:
        yield
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running


async def test_a_replica_without_its_environment_reports_the_command_that_makes_it(
    coordinator: FakeCoordinator, nats_url: str, hive: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BOMBUS_ENVIRONMENTS", str(tmp_path / "none"))
    await coordinator.write(started(1), ready(1, 0, weights(tmp_path / "v0", llama())))
    async with replica(hive=hive, bus_url=nats_url, backend="vllm"):
        broke = await coordinator.receive(LoadBroke)
        assert (broke.run, broke.version, broke.replica) == (1, 0, "r1")
        assert "run `bombus install vllm` first" in broke.reason


async def test_a_replica_whose_server_lacks_token_ids_reports_that_sentence(
    coordinator: FakeCoordinator, nats_url: str, hive: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERVER_KEY", KEY)
    model = tmp_path / "v0"
    build_tiny(model)
    await coordinator.write(started(1), ready(1, 0, weights(model)))
    async with serving(ExternalCompletions(model, lacks=frozenset({"ids"}))) as url:
        elsewhere = OpenAISettings(url=url, api_key_env="SERVER_KEY")
        async with replica(hive=hive, bus_url=nats_url, backend="openai", openai=elsewhere):
            broke = await coordinator.receive(LoadBroke)
            assert f"{url} lacks what training needs: it returns no token ids" in broke.reason
            assert (await coordinator.receive(ReplicaAlive)).version == -1


async def test_an_external_server_serves_the_versions_of_the_log(
    coordinator: FakeCoordinator, nats_url: str, hive: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERVER_KEY", KEY)
    for version in (0, 1):
        build_tiny(tmp_path / f"v{version}", version)
    await coordinator.write(started(1), ready(1, 0, weights(tmp_path / "v0")))
    async with serving(ExternalCompletions(tmp_path / "v0")) as url:
        elsewhere = OpenAISettings(url=url, api_key_env="SERVER_KEY")
        async with replica(hive=hive, bus_url=nats_url, backend="openai", openai=elsewhere):
            assert (await coordinator.receive(WeightsLoadedFact)).version == 0
            alive = await coordinator.receive(ReplicaAlive, lambda message: message.version == 0)
            assert (await ask(coordinator.bus, alive.url, 1, [5, 6])).only.versions == [0] * 12
            await coordinator.write(ready(1, 1, weights(tmp_path / "v1")))
            assert (await coordinator.receive(WeightsLoadedFact)).version == 1
            assert (await ask(coordinator.bus, alive.url, 1, [5, 6])).only.versions == [1] * 12


@pytest.mark.parametrize(
    ("own", "device", "job", "chosen"),
    [
        (None, "cpu", "auto", "float32"),
        (None, "cpu", "bfloat16", "bfloat16"),
        (None, "cuda", "float32", "float32"),
        (None, "cuda:1", "auto", "bfloat16"),
        ("float16", "cuda", "bfloat16", "float16"),
    ],
)
def test_without_a_dtype_the_precision_is_the_jobs(
    tmp_path: Path, own: Literal["float16"] | None, device: str, job: str, chosen: str
) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 9, "max_position_embeddings": 9, "dtype": "bfloat16"}')
    policy = Policy(tmp_path, run=1, version=0, max_model_len=9, dtype=job)
    assert with_precision(ComputeSettings(dtype=own, device=device), policy).dtype == chosen


async def test_the_torch_engine_computes_in_the_precision_of_its_job(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path)
    client = BackendClient()
    made: list[float] = []
    for run, dtype in ((1, "float32"), (2, "bfloat16")):
        backend = TorchBackend(ComputeSettings(kv_cache_bytes=4 << 20), client.deliver)
        try:
            await backend.load(Policy(tmp_path, run, 0, 64, dtype=dtype), ignore_stage)
            answer = await client.ask(backend, request([1, 2, 3], run=run, max_tokens=1, temperature=0.0))
            made.append(answer.only.logprobs[0])
        finally:
            await backend.stop()
    assert 0 < abs(made[0] - made[1]) < 0.1


@pytest.mark.skipif(OVERCOMMIT.read_text().strip() == "1", reason="this system grants any memory that is asked for")
async def test_want_of_memory_is_a_fault_of_the_load_and_not_the_end_of_the_process(tmp_path: Path) -> None:
    """It ended the process, which was started again and ended again until the boot took too long."""
    llama().save_pretrained(tmp_path)
    four_tebibytes = ComputeSettings(kv_cache_bytes=4 << 40)
    client = BackendClient()
    backend = TorchBackend(four_tebibytes, client.deliver)
    try:
        with pytest.raises(EngineFault, match=r"version 0 cannot be loaded: .*can't allocate memory"):
            await backend.load(Policy(tmp_path, 1, 0, 64), ignore_stage)
        assert backend.version == -1
        assert not backend.failed.done()
    finally:
        await backend.stop()


def test_the_openai_backend_needs_a_url() -> None:
    with pytest.raises(ValidationError, match="needs the url of a server"):
        InferenceSettings(backend="openai")
    with pytest.raises(ValidationError):
        OpenAISettings(url="here")


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--backend", "openai"], "needs the url of a server"),
        (["--backend", "vllm", "--tensor-parallel", "0"], "--tensor-parallel 0 is refused: it must be a whole number"),
        (["--max-model-len", "1"], "--max-model-len 1 is refused: it must be a whole number, at least 2"),
        (["--gpu-memory-utilization", "2"], "--gpu-memory-utilization 2.0 is refused: it must be a number, more"),
    ],
)
def test_the_command_reports_what_is_wrong(words: list[str], why: str) -> None:
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    with pytest.raises(Refused, match=why):
        cli.settings_of(parser.parse_args(words))


def test_every_setting_can_be_given_on_the_command_line() -> None:
    words = (
        "--hive h --engine e --nats n --backend vllm --host 0.0.0.0 --port 1 --max-requests 2 --drain-timeout 3 "
        "--advertise-url u --host-name x --replica r --alive-every 3 --load-retry 5 --cache c "
        "--dtype bfloat16 --device cuda:1 --kv-cache-mb 6 --block-tokens 7 --max-model-len 8 --max-running 9 "
        "--max-waiting 10 --max-prefill-tokens 11 --threads 12 --adapters-mb 19 "
        "--vllm-python p --tensor-parallel 13 --vllm-eager --gpu-memory-utilization 0.5 --vllm-start-timeout 14 "
        "--vllm-update-timeout 15 --vllm-health-timeout 16 --vllm-max-loras 20 --vllm-max-lora-rank 21 "
        "--url http://s --api-key-env K --model m --openai-drain-timeout 17 --openai-update-timeout 18"
    )
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    given = cli.settings_of(parser.parse_args(words.split()))
    assert given.compute.kv_cache_bytes == 6 << 20
    assert given.compute.adapters_bytes == 19 << 20
    default = InferenceSettings()
    for name in InferenceSettings.model_fields:
        one, other = getattr(given, name), getattr(default, name)
        parts = type(one).model_fields if isinstance(one, BaseModel) else ()
        assert one != other, name
        assert all(getattr(one, part) != getattr(other, part) for part in parts), name


def test_0_on_the_command_line_leaves_memory_and_length_open() -> None:
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    compute = cli.settings_of(parser.parse_args(["--kv-cache-mb", "0", "--max-model-len", "0"])).compute
    assert (compute.kv_cache_bytes, compute.max_model_len) == (None, None)
