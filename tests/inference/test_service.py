"""A replica on a real bus: it loads what the log names, reports that, and serves nothing else."""

import argparse
import asyncio
import hashlib
import inspect
import os
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

import httpx
import msgspec
import pytest
from transformers import PreTrainedModel

from bombus.bus import Bus, Reader
from bombus.config.job import RunConfig
from bombus.errors import Refused
from bombus.hive import events as ev
from bombus.hive.generation import FrameReader, encode_request
from bombus.hive.inbox import AnyMessage, LoadBroke, ReplicaAlive, ReplicaLeaves, WeightsLoadedFact, decode_message
from bombus.weights.canary import SCORED, SEQUENCES
from bombus_inference import cli, service
from bombus_inference.server import App
from bombus_inference.settings import ComputeSettings, InferenceSettings, ServerSettings
from bombus_trainer.publish.directories import remove_others
from tests.foreign_keys import foreign_keys
from tests.inference.backends.small_engines import Answer, another, llama, request, worst_difference
from tests.patience import PATIENCE_S
from tests.replica_access import replica_headers

M = TypeVar("M", bound=AnyMessage)
ROUTES = (
    ("POST", "/generate"),
    ("GET", "/adapters"),
    ("POST", "/adapters"),
    ("DELETE", "/adapters/"),
    ("GET", "/metrics"),
)
OPEN = (("GET", "/health"),)  # no key is needed
COMPUTE = ComputeSettings(kv_cache_bytes=4 << 20, max_model_len=256)


def weights(folder: Path, model: PreTrainedModel | None = None) -> ev.Weights:
    """Return the weights of the model in `folder`, after saving `model` there if it is given."""
    if model is not None:
        model.save_pretrained(folder)
    body = (folder / "model.safetensors").read_bytes()
    return ev.Weights(where=str(folder), bytes=len(body), sha256=hashlib.sha256(body).hexdigest())


class FakeCoordinator:
    """Acts as the coordinator: writes events, and reads a replica's messages."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.inbox = Reader(bus, bus.subjects.inbox_stream)
        self._count = 0

    async def write(self, *events: ev.Event) -> None:
        for event in events:
            self._count += 1
            subject = self.bus.subjects.event("main", ev.kind_of(event))
            await self.bus.publisher.publish(subject, ev.encode_event(event), msg_id=f"event-{self._count}")

    async def receive(self, kind: type[M], holds: Callable[[M], bool] = lambda _: True) -> M:
        """Return the next message of this kind for which `holds` is true, skipping others."""
        message = await self._receive(lambda message: isinstance(message, kind) and holds(message))
        assert isinstance(message, kind)
        return message

    async def receive_outcome(self) -> int:
        """Return the version that is loaded next. Fails if the replica reports that it cannot load one before that."""
        message = await self._receive(lambda message: isinstance(message, WeightsLoadedFact | LoadBroke))
        assert isinstance(message, WeightsLoadedFact)
        return message.version

    async def _receive(self, holds: Callable[[AnyMessage], bool]) -> AnyMessage:
        async with asyncio.timeout(PATIENCE_S):
            while True:
                for stored in await self.inbox.read():
                    message = decode_message(stored.data)
                    if holds(message):
                        return message


def is_of(run: int, version: int, fact: WeightsLoadedFact) -> bool:
    return (fact.run, fact.version) == (run, version)


def started(run: int) -> ev.EngineStarted:
    return ev.EngineStarted(engine="main", run=run, config_digest="d")


def ready(run: int, version: int, what: ev.Weights) -> ev.WeightsReady:
    return ev.WeightsReady(engine="main", run=run, version=version, weights=what)


@pytest.fixture
async def coordinator(bus: Bus) -> AsyncIterator[FakeCoordinator]:
    hive = FakeCoordinator(bus)
    yield hive
    await hive.inbox.close()


@asynccontextmanager
async def replica(nats_url: str, hive: str, cache: Path | None = None) -> AsyncIterator[None]:
    settings = InferenceSettings(
        hive=hive, bus_url=nats_url, replica="r1", alive_every_s=0.05, load_retry_s=0.2, cache=cache, compute=COMPUTE
    )
    running = asyncio.create_task(service.run(settings))
    try:
        yield
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running


async def ask(bus: Bus, url: str, run: int, prompt: list[int]) -> Answer:
    answer = Answer()
    async with httpx.AsyncClient(timeout=20, headers=await replica_headers(bus)) as client:
        response = await client.post(f"{url}/generate", content=encode_request(request(prompt, run=run)))
    for frame in FrameReader().feed(response.content):
        answer.take(frame)
    return answer


async def test_a_replica_at_every_address_says_by_which_it_is_reached(
    coordinator: FakeCoordinator, nats_url: str, hive: str
) -> None:
    everywhere = InferenceSettings(
        hive=hive,
        bus_url=nats_url,
        replica="r1",
        alive_every_s=0.05,
        compute=COMPUTE,
        http=ServerSettings(host="0.0.0.0"),
    )
    refused = r"0\.0\.0\.0:\d+ stands for every address.*pass --advertise-url http://HOST:\d+, or"
    with pytest.raises(Refused, match=refused):
        await service.run(everywhere)
    running = asyncio.create_task(service.run(everywhere.model_copy(update={"advertise_url": "http://worker-3:8000"})))
    assert (await coordinator.receive(ReplicaAlive)).url == "http://worker-3:8000"
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running


async def test_a_replica_catches_up_loads_what_is_new_and_leaves_in_order(
    coordinator: FakeCoordinator, nats_url: str, hive: str, tmp_path: Path
) -> None:
    old, new = llama(), another(llama())
    await coordinator.write(started(1), ready(1, 0, weights(tmp_path / "v0", old)))
    async with replica(nats_url, hive):
        loaded = await coordinator.receive(WeightsLoadedFact)
        assert (loaded.run, loaded.version, loaded.replica) == (1, 0, "r1")
        alive = await coordinator.receive(ReplicaAlive, lambda message: message.version == 0)
        assert loaded.sequence_tokens == alive.sequence_tokens == 256
        assert not loaded.constrains
        made = (await ask(coordinator.bus, alive.url, 1, [1, 2, 3])).only
        assert worst_difference(old, [1, 2, 3], made) < 1e-4

        await coordinator.write(ready(1, 1, weights(tmp_path / "v1", new)))
        assert (await coordinator.receive(WeightsLoadedFact)).version == 1
        made = (await ask(coordinator.bus, alive.url, 1, [1, 2, 3])).only
        assert made.versions == [1] * 12
        assert worst_difference(new, [1, 2, 3], made) < 1e-4
    assert (await coordinator.receive(ReplicaLeaves)).replica == "r1"


async def test_a_replica_lets_in_the_gateways_of_its_hive_and_tells_others_at_most_whether_it_serves(
    coordinator: FakeCoordinator, nats_url: str, hive: str
) -> None:
    key = await replica_headers(coordinator.bus)
    wrong = {"authorization": key["authorization"][:-1] + "x"}
    async with replica(nats_url, hive), httpx.AsyncClient() as client:
        client.base_url = url = (await coordinator.receive(ReplicaAlive)).url
        for method, path in ROUTES:
            for headers, why in ((None, "no key was sent"), (wrong, "another key was sent")):
                refused = await client.request(method, path, headers=headers)
                assert (refused.status_code, refused.json()["code"]) == (401, "bad_key"), (method, path)
                assert why in refused.json()["why"]
            page = await client.request(method, path, headers={**key, "origin": "http://evil.example"})
            assert (page.status_code, page.json()["why"]) == (401, "A web page may not use a replica.")
            admitted = await client.request(method, path, headers=key)
            assert admitted.status_code != 401
            assert "POST /generate, GET /adapters" not in admitted.text, "there is such a route"
        for host, status in (("evil.example", 421), ("localhost", 503), (url.removeprefix("http://"), 503)):
            health = await client.get("/health", headers={"host": host})
            assert health.status_code == status, host  # 503: nothing is loaded
        assert health.json() == {"status": "no weights"}
        assert (await client.get("/health", headers={"origin": "http://evil.example"})).status_code == 401
        assert (await client.get("/docs", headers=key)).status_code == 404


def test_every_route_of_a_replica_is_one_that_these_tests_try() -> None:
    """A new route has to be added to one of the lists above."""
    source = inspect.getsource(App.__call__)
    form = r'case "([A-Z]+)", (?:"([^"]+)"|path if path\.startswith\(f"{ADAPTERS}/"\))'
    cases = re.findall(form, source)
    assert sorted((method, path or "/adapters/") for method, path in cases) == sorted(ROUTES + OPEN)
    assert source.count("case ") == len(cases) + 1, "all but the last, for unknown paths"


async def test_no_key_of_anybody_else_opens_a_route_of_a_replica(
    coordinator: FakeCoordinator, nats_url: str, hive: str
) -> None:
    right = (await replica_headers(coordinator.bus))["authorization"].removeprefix("Bearer ")
    async with replica(nats_url, hive), httpx.AsyncClient() as client:
        client.base_url = (await coordinator.receive(ReplicaAlive)).url
        for what, key in (await foreign_keys(coordinator.bus, right)).items():
            for method, path in ROUTES:
                for headers in ({"authorization": f"Bearer {key}".strip()}, {"authorization": key}, {"x-api-key": key}):
                    refused = await client.request(method, path, headers=headers)
                    assert refused.status_code == 401, (what, method, path)
                assert (await client.request(method, f"/k/{key}{path}")).status_code == 401


async def test_an_operator_is_shown_the_key_of_the_replicas(
    bus: Bus, nats_url: str, hive: str, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    for name, code in ((hive, 0), (f"{hive}-x", 1)):
        wanted = parser.parse_args(["--show-key", "--nats", nats_url, "--hive", name])
        assert await asyncio.to_thread(cli.run, wanted) == code
    shown = capsys.readouterr()
    assert await replica_headers(bus) == {"authorization": f"Bearer {shown.out.strip()}"}
    assert "has no streams" in shown.err


async def test_a_replica_that_is_started_again_under_its_name_is_heard_again(
    coordinator: FakeCoordinator, nats_url: str, hive: str, tmp_path: Path
) -> None:
    """Its messages have other ids than those of its previous start, so they do not count as repeats."""
    await coordinator.write(started(1), ready(1, 0, weights(tmp_path / "v0", llama())))
    for _ in range(2):
        async with replica(nats_url, hive):
            assert (await coordinator.receive(WeightsLoadedFact)).version == 0
            assert (await coordinator.receive(ReplicaAlive, lambda message: message.version == 0)).replica == "r1"
        assert (await coordinator.receive(ReplicaLeaves)).replica == "r1"


async def test_a_stopped_engine_is_unloaded_and_the_next_run_begins_anew(
    coordinator: FakeCoordinator, nats_url: str, hive: str, tmp_path: Path
) -> None:
    first = weights(tmp_path / "v0", llama())
    await coordinator.write(started(1), ready(1, 0, first))
    async with replica(nats_url, hive):
        await coordinator.receive(WeightsLoadedFact)
        await coordinator.write(ev.EngineStopped(engine="main", run=1))
        alive = await coordinator.receive(ReplicaAlive, lambda message: message.version == -1)
        refused = (await ask(coordinator.bus, alive.url, 1, [1])).fault
        assert refused is not None
        assert refused.retry
        await coordinator.write(started(2), ready(2, 0, first))
        loaded = await coordinator.receive(WeightsLoadedFact)
        assert (loaded.run, loaded.version) == (2, 0)
        assert len((await ask(coordinator.bus, alive.url, 2, [1])).only.tokens) == 12


async def test_a_limit_below_the_jobs_is_warned_about_once_for_each_run(
    coordinator: FakeCoordinator, nats_url: str, hive: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job = RunConfig()
    configured = ev.EngineConfigured(
        engine="main", config=job.to_json(), config_digest=job.digest, collection=job.to_collection(), model="m"
    )
    versions = [weights(tmp_path / f"v{version}", llama(version)) for version in range(2)]
    async with replica(nats_url, hive):
        for run in (1, 2):
            await coordinator.write(configured, started(run))
            for version, what in enumerate(versions):
                await coordinator.write(ready(run, version, what))
                await coordinator.receive(WeightsLoadedFact, partial(is_of, run, version))
            await coordinator.write(ev.EngineStopped(engine="main", run=run))
    warning = f"sequences end at 256 tokens, not at the job's {job.rollout.max_model_len}"
    assert [message.partition(":")[0] for message in caplog.messages if "sequences end" in message] == [warning] * 2


async def test_r15_weights_that_are_not_what_the_log_says_are_not_loaded(
    coordinator: FakeCoordinator, nats_url: str, hive: str, tmp_path: Path
) -> None:
    good = weights(tmp_path / "v0", llama())
    bad = ev.Weights(where=good.where, sha256="0" * 64)
    await coordinator.write(started(1), ready(1, 0, good), ready(1, 1, bad))
    async with replica(nats_url, hive):
        broke = await coordinator.receive(LoadBroke)
        assert "sha256" in broke.reason
        assert (broke.run, broke.version, broke.replica) == (1, 1, "r1")
        await coordinator.write(ready(1, 2, good))  # the replica itself still works
        assert (await coordinator.receive(WeightsLoadedFact)).version == 2


async def test_a_replica_that_cannot_load_goes_on_trying_until_it_can(
    coordinator: FakeCoordinator, nats_url: str, hive: str, tmp_path: Path
) -> None:
    good = weights(tmp_path / "v0", llama())
    (tmp_path / "v0").rename(tmp_path / "away")
    await coordinator.write(started(1), ready(1, 0, good))
    async with replica(nats_url, hive):
        broke = await coordinator.receive(LoadBroke)
        assert broke.reason.startswith(f"no weights at {tmp_path / 'v0'}: ")
        assert (await coordinator.receive(ReplicaAlive)).version == -1, "it stays in the hive"
        (tmp_path / "away").rename(tmp_path / "v0")
        assert await coordinator.receive_outcome() == 0


async def test_a_replica_reports_once_and_again_after_its_quarantine_was_lifted(
    coordinator: FakeCoordinator, nats_url: str, hive: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An operator who resumes the run gets the attempts of a new replica, without the long pauses of the old one."""
    lacking = ev.Weights(where=str(tmp_path / "none"), sha256="0" * 64)
    joined = ev.ReplicaJoined(engine="main", replica="r1", url="http://r1")
    await coordinator.write(started(1), joined, ready(1, 0, lacking))
    async with replica(nats_url, hive):
        broke = await coordinator.receive(LoadBroke)
        quarantined = ev.ReplicaQuarantined(engine="main", run=1, version=0, replica="r1", reason=broke.reason)
        await coordinator.write(quarantined)
        await coordinator.receive(ReplicaAlive, lambda _: "version 0, attempt 5: " in caplog.text)
        await coordinator.write(ev.EngineResumed(engine="main", run=1, command="r"))
        again = await coordinator.receive(LoadBroke)
        assert again.reason == broke.reason
    assert caplog.text.count("version 0, attempt 1: ") == 2


async def test_a_replica_that_computes_something_else_reports_it_at_once_and_not_at_each_attempt(
    coordinator: FakeCoordinator, nats_url: str, hive: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    canary = ev.Canary(logprobs=(-1.0,) * (SEQUENCES * SCORED), dtype="float32")
    version = msgspec.structs.replace(ready(1, 0, weights(tmp_path / "v0", llama(0))), canary=canary)
    await coordinator.write(started(1), ev.ReplicaJoined(engine="main", replica="r1", url="http://r1"), version)
    reports: list[LoadBroke] = []
    async with replica(nats_url, hive):
        broke = await coordinator.receive(LoadBroke)
        assert "attempt 2" not in caplog.text
        assert broke.reason.startswith("its weights are not those of version 0 at the trainer")
        quarantined = ev.ReplicaQuarantined(engine="main", run=1, version=0, replica="r1", reason=broke.reason)
        await coordinator.write(quarantined)

        def is_past(message: AnyMessage) -> bool:
            reports.extend([message] if isinstance(message, LoadBroke) else [])
            assert not isinstance(message, ReplicaLeaves | WeightsLoadedFact)
            return "version 0, attempt 5: " in caplog.text

        await coordinator._receive(is_past)
    assert len(reports) <= 1, "the second attempt may be made before it sees that it is quarantined"


async def test_a_cache_that_cannot_be_written_is_a_reason_and_does_not_end_the_process(
    coordinator: FakeCoordinator, nats_url: str, hive: str, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    cache.write_text("a file where a folder should be")
    stored = ev.Weights(where=f"{ev.OBJECTS}version-0", sha256="0" * 64)
    await coordinator.write(started(1), ready(1, 0, stored))
    async with replica(nats_url, hive, cache=cache):
        broke = await coordinator.receive(LoadBroke)
        assert broke.reason.startswith("the weights cannot be fetched: ")
        assert str(cache) in broke.reason


async def test_a_version_that_is_gone_because_a_newer_one_is_here_breaks_nothing(
    coordinator: FakeCoordinator, nats_url: str, hive: str, tmp_path: Path
) -> None:
    good = weights(tmp_path / "v2", llama())
    gone = ev.Weights(where=str(tmp_path / "v1"), sha256="0" * 64)
    await coordinator.write(started(1), ready(1, 1, gone))
    async with replica(nats_url, hive):
        await coordinator.receive(ReplicaAlive)
        await coordinator.write(ready(1, 2, good))
        assert await coordinator.receive_outcome() == 2


async def test_r15_a_version_that_is_removed_while_it_is_read_is_let_be_for_the_newest(
    coordinator: FakeCoordinator, nats_url: str, hive: str, tmp_path: Path
) -> None:
    """The trainer keeps two versions, and an asynchronous run may be further ahead before a slow disk has been read."""
    models = [another(llama(), seed) for seed in range(4)]
    named = [weights(tmp_path / f"version-{number:08d}-epoch-1", model) for number, model in enumerate(models)]
    slow = Path(named[1].where) / "model.safetensors"
    slow.unlink()
    os.mkfifo(slow)
    await coordinator.write(started(1), ready(1, 0, named[0]), ready(1, 1, named[1]))
    async with replica(nats_url, hive):
        writer = await asyncio.to_thread(slow.open, "wb")  # once the replica reads
        await coordinator.write(ready(1, 2, named[2]), ready(1, 3, named[3]))
        remove_others(tmp_path, [named[version].where for version in (2, 3)], trainer_epoch=1)
        writer.close()
        while await coordinator.receive_outcome() != 3:
            pass  # version 2, if the replica has not read of the next one yet
        alive = await coordinator.receive(ReplicaAlive, lambda message: message.version == 3)
        made = (await ask(coordinator.bus, alive.url, 1, [1, 2, 3])).only
        assert worst_difference(models[3], [1, 2, 3], made) < 1e-4
