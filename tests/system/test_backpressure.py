"""The bus away, a stream or the disk full: work waits or is refused, and nothing acknowledged is lost."""

import asyncio
import json
import resource
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from itertools import count, islice
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from bombus.bus import Blobs, Bus, EmbeddedServer, PubAck
from bombus.bus.streams import blob_stream
from bombus.config.streams import StreamLimits
from bombus.errors import BusUnavailable
from bombus.hive import inbox
from bombus.hive.events import AbortReason, NotedCall
from bombus.hive.records import CallRef, digest
from bombus.hive.state import Hive
from bombus.machine.hive_keys import HiveKeys, NamedKey
from bombus_coordinator import storage
from bombus_coordinator.retention import Purge, floors_of, floors_of_holders
from bombus_gateway.keys import Keys
from tests.conftest import MB, SMALL_STREAMS, freeze, kill, thaw
from tests.gateway.openai_hive import ENGINE, MODEL, SECRET, GatewayHive, gateway_hive, new_id
from tests.patience import PATIENCE_S, until
from tests.small_disk import fill, small_disk

USER: Any = [{"role": "user", "content": "how are you?"}]
SOON_S = 15.0


async def ask(hive: GatewayHive, key: str) -> str:
    answer = await hive.client(key).chat.completions.create(model=MODEL, messages=USER)
    return answer.id.removeprefix("chatcmpl-")


def claim_body(client: str = "c1") -> dict[str, object]:
    return {"client_uuid": client, "episode_type": "train", "discard_episode_timeout": 60.0}


def check_try_again(answer: httpx.Response, code: str) -> None:
    assert answer.status_code == 503, answer.text
    assert int(answer.headers["retry-after"]) >= 1
    assert answer.json()["code"] == code


# ---- the bus is away ----


@pytest.mark.parametrize("how", ["killed", "frozen"])
async def test_calls_and_commands_wait_for_a_bus_that_is_away_and_continue_when_it_is_back(
    crashing: tuple[EmbeddedServer, Bus], how: str
) -> None:
    server, bus = crashing
    async with gateway_hive(bus) as hive, httpx.AsyncClient(base_url=hive.base_url, timeout=30) as http:
        episode, key = await hive.claim()
        before = await ask(hive, key)
        await (freeze(server) if how == "frozen" else asyncio.to_thread(kill, server))
        call = asyncio.create_task(ask(hive, key))
        claim = asyncio.create_task(http.post("/claim_episode", json=claim_body()))
        await asyncio.wait({call, claim}, timeout=3)
        assert not call.done()
        assert not claim.done()
        if how == "frozen":
            thaw(server)
        else:
            await asyncio.to_thread(server.start)
        assert (await claim).json()["success"]
        records = await hive.records(episode, 2)
        assert [record.id for record in records] == [before, await call]
        await hive.end(episode)


async def test_a_bus_that_stays_away_is_a_503_with_retry_after_on_every_route(
    crashing: tuple[EmbeddedServer, Bus],
) -> None:
    server, bus = crashing
    async with gateway_hive(bus, bus_timeout_s=1.0) as hive:
        episode, key = await hive.claim()
        await ask(hive, key)
        await asyncio.to_thread(kill, server)
        async with httpx.AsyncClient(base_url=hive.base_url, timeout=40) as http:
            with pytest.raises(openai.InternalServerError) as refused:
                await ask(hive, key)
            assert refused.value.response.headers["retry-after"]
            claimed_id = Keys(SECRET).claimed_id(episode)
            ending = {
                "client_uuid": "c1",
                "episode_uuid": claimed_id,
                "task_id": "t",
                "workflow_output": {"reward": 1.0},
            }
            posts = [
                http.post("/claim_episode", json=claim_body()),
                http.post("/end_episode", json=ending),
                http.post("/start_engine"),
                http.post("/stop_engine"),
                http.post("/agree_sync_weight", json={"client_uuid": "c1"}),
            ]
            for answer in await asyncio.gather(*posts):
                check_try_again(answer, "bus_down")
        await asyncio.to_thread(server.start)
        await hive.end(episode)


async def test_records_that_wait_in_memory_are_bounded_and_beyond_the_bound_calls_are_refused(
    crashing: tuple[EmbeddedServer, Bus],
) -> None:
    server, bus = crashing
    async with gateway_hive(bus) as hive:
        episode, key = await hive.claim()
        before = await ask(hive, key)
        await asyncio.to_thread(kill, server)
        waiting: list[asyncio.Future[PubAck]] = []
        numbers = count()

        async def put_more() -> None:
            for number in islice(numbers, 5000):
                subject = bus.subjects.call(ENGINE, "other")
                waiting.append(await bus.publisher.submit(subject, b"x", msg_id=f"f{number}", timeout_s=60))

        with pytest.raises(BusUnavailable, match="in flight"):
            await put_more()
        others = [asyncio.create_task(put_more()) for _ in range(64)]  # ahead of the call, should room become free
        with pytest.raises(openai.InternalServerError, match="in flight") as refused:
            await ask(hive, key)
        assert {type(each) for each in await asyncio.gather(*others, return_exceptions=True)} == {BusUnavailable}
        assert len(waiting) <= 4096
        assert refused.value.response.headers["retry-after"]
        await asyncio.to_thread(server.start)
        seqs = [(await ack).seq for ack in waiting]
        assert len(set(seqs)) == len(waiting), "what was accepted is stored once"
        call = await ask(hive, key)
        assert [record.id for record in await hive.records(episode, 2)] == [before, call]


# ---- streams at their limits ----


async def _resize(bus: Bus, stream: str, size: int) -> None:
    found = json.loads((await bus.requests.request(f"$JS.API.STREAM.INFO.{stream}")).data)
    body = json.dumps(found["config"] | {"max_bytes": size}).encode()
    answer = await bus.requests.request(f"$JS.API.STREAM.UPDATE.{stream}", body)
    assert "error" not in json.loads(answer.data), answer.data


async def _grow(hive: GatewayHive, bus: Bus, what: str) -> None:
    """Fill a stream until a tenth of its size is more than the rest of a test needs."""
    for number in range(100):
        if what == "events":
            episode, _ = await hive.claim()
            await bus.inbox.request(inbox.Abort(id=new_id(), engine=ENGINE, client="c1", episodes=(episode,)))
        elif what == "inbox":
            await bus.publisher.publish(bus.subjects.inbox("touch"), b"x" * 1000, msg_id=f"f{number}")
        elif what == "calls":
            await bus.publisher.publish(bus.subjects.call(ENGINE, "other"), b"x" * 1000, msg_id=f"f{number}")
    if what == "blobs":
        await Blobs(bus).put("other", b"x" * 100_000)


@asynccontextmanager
async def watched(hive: GatewayHive, bus: Bus, disk: Path | None = None, reserve: int = 0) -> AsyncIterator[None]:
    """Run the leader's watch of the storage."""
    watching = asyncio.create_task(storage.watch(bus, lambda: hive.follower.hive, disk, reserve, period_s=0.05))
    try:
        yield
        assert not watching.done()
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


async def wait_until(hive: GatewayHive, holds: Callable[[Hive], bool]) -> None:
    """Return once this holds, and the gateway knows."""
    assert hive.gateway is not None
    await hive.follower.wait_for(holds, SOON_S)
    await hive.gateway.follower.wait_for(holds, SOON_S)


async def check_no_new_work(hive: GatewayHive, key: str, what: str) -> None:
    async with httpx.AsyncClient(base_url=hive.base_url, timeout=30) as http:
        check_try_again(await http.post("/claim_episode", json=claim_body()), "storage_full")
        status = (await http.get("/get_engine_status")).json()
        assert status["engine_status"] == "ENGINE.ROLLING"
        assert what in status["engine_status_detail"]
    with pytest.raises(openai.InternalServerError, match=what) as refused:
        await ask(hive, key)
    assert refused.value.response.headers["retry-after"]
    assert refused.value.code == "storage_full"


@pytest.mark.parametrize("what", ["inbox", "events", "calls", "blobs"])
async def test_r20_a_nearly_full_stream_takes_no_new_work_but_what_is_under_way_ends(bus: Bus, what: str) -> None:
    names = bus.subjects
    streams = {"inbox": names.inbox_stream, "events": names.events_stream, "calls": names.calls_stream}
    stream = {**streams, "blobs": blob_stream(names)}[what]
    async with gateway_hive(bus) as hive, watched(hive, bus):
        await _grow(hive, bus, what)
        episode, key = await hive.claim()
        await ask(hive, key)
        size = (await bus.state(stream)).max_bytes
        await _resize(bus, stream, int((await bus.state(stream)).bytes / 0.93))
        await wait_until(hive, lambda state: what in state.full)
        await check_no_new_work(hive, key, what)
        await hive.end(episode)
        await _resize(bus, stream, size)
        await wait_until(hive, lambda state: not state.full)
        _, key = await hive.claim()
        assert await ask(hive, key)


@pytest.mark.parametrize("what", ["inbox", "events"])
async def test_clients_are_told_at_once_that_a_stream_is_full_and_decisions_are_stored_when_it_is_not(
    bus: Bus, what: str
) -> None:
    stream = {"inbox": bus.subjects.inbox_stream, "events": bus.subjects.events_stream}[what]
    async with gateway_hive(bus) as hive, httpx.AsyncClient(base_url=hive.base_url, timeout=30) as http:
        episode, _ = await hive.claim()
        state = await bus.state(stream)
        await _resize(bus, stream, max(4096, state.bytes + 1))
        ending = {
            "client_uuid": "c1",
            "episode_uuid": Keys(SECRET).claimed_id(episode),
            "task_id": "t",
            "workflow_output": {"reward": 1.0, "metadata": {"note": "x" * 4096}},
        }
        posts = [("/end_episode", ending), ("/claim_episode", claim_body()), ("/start_engine", None)]
        for path, body in posts:
            began = time.monotonic()
            refused = await http.post(path, json=body)
            assert time.monotonic() - began < 2.0, path
            check_try_again(refused, "bus_down")
            assert (
                f"the stream is full (maximum bytes exceeded); raise its limit with --{what}-bytes-max" in refused.text
            )
        await _resize(bus, stream, state.max_bytes)
        assert (await http.post("/end_episode", json=ending)).json()["success"]
        await hive.until(lambda engine: list(engine.pool) == [episode])


ALICE, BOB, ADMIN = "the-key-of-alice-for-tests", "the-key-of-bob-for-tests", "an-admin-key-for-tests"
NAMED = HiveKeys(admin=ADMIN, clients={"alice": NamedKey(key=ALICE), "bob": NamedKey(key=BOB)})
RECORD_BYTES = 64 << 10


async def claim_with(http: httpx.AsyncClient, key: str) -> dict[str, Any]:
    body = {"client_uuid": "c1", "claim_id": new_id(), "wait_s": 0.0}
    claimed: dict[str, Any] = (await http.post("/claim_episodes", json=body, headers={"x-api-key": key})).json()
    return claimed


async def claimed_with(hive: GatewayHive, http: httpx.AsyncClient, key: str) -> tuple[str, str]:
    """Claim an episode with a client's key; return it and its own key."""
    assert hive.gateway is not None
    (found,) = (await claim_with(http, key))["episodes"]
    return hive.gateway.keys.episode_of(found["episode_uuid"]), found["openai_api_key"]


async def record(hive: GatewayHive, holder: str, episode: str, count: int) -> list[int]:
    """Store calls of an episode as a gateway does, which are large. Return where they are."""
    before = len(hive.engine.open[episode].calls)
    for _ in range(count):
        name, body = new_id(), b"x" * RECORD_BYTES
        ack = await hive.bus.publisher.publish(hive.bus.subjects.call(ENGINE, holder), body, msg_id=name)
        ref = CallRef(ack.seq, name, digest(body))
        noted = NotedCall(episode, ref, 5, 3, 0, 0, bytes=len(body))
        await hive.bus.inbox.send(inbox.CallRecorded(id=name, engine=ENGINE, run=1, call=noted))
    await wait_until(hive, lambda state: len(state.engine(ENGINE).open[episode].calls) >= before + count)
    return [call.ref.seq for call in hive.engine.open[episode].calls]


async def test_a_key_that_fills_the_stream_of_calls_loses_its_oldest_episode_and_all_others_go_on(bus: Bus) -> None:
    await bus.ensure_streams(StreamLimits(calls_bytes_max=MB))
    async with (
        gateway_hive(bus, keys=NAMED) as hive,
        watched(hive, bus),
        httpx.AsyncClient(base_url=hive.base_url, timeout=30) as http,
    ):
        of_alice, alices_key = await claimed_with(hive, http, ALICE)
        await record(hive, "alice", of_alice, 13)
        with pytest.raises(openai.InternalServerError, match="more than its share") as refused:
            await ask(hive, alices_key)
        assert refused.value.code == "overloaded"
        why = (await claim_with(http, ALICE))["fail_cause"]
        assert why.startswith("No available episodes to claim. The episodes of this key keep 85")
        of_admin, admins_key = await claimed_with(hive, http, ADMIN)
        of_bob, bobs_key = await claimed_with(hive, http, BOB)
        await asyncio.gather(ask(hive, admins_key), ask(hive, bobs_key))
        kept = await record(hive, "bob", of_bob, 2)
        await wait_until(hive, lambda state: of_alice not in state.engine(ENGINE).open)
        assert hive.engine.closed[of_alice].aborted == AbortReason.CROWDED
        await Purge(bus).below(floors_of(hive.follower.hive), floors_of_holders(hive.follower.hive))
        await wait_until(hive, lambda state: not state.full)
        await asyncio.gather(ask(hive, admins_key), ask(hive, bobs_key))
        assert {of_admin, of_bob} == hive.engine.open.keys()
        assert len(await bus.get_many(bus.subjects.calls_stream, kept)) == 3, "what others need is there"
        assert (await claim_with(http, ALICE))["success"]


# ---- the disk is full ----


INODES = 300  # of the small disk


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", f"size=96m,nr_inodes={INODES}") as folder:
        yield folder


async def keep_running(server: EmbeddedServer) -> None:
    """Restart the server when it needs it, as the supervisor does."""
    while True:
        if await asyncio.to_thread(server.needs_restart):
            await asyncio.to_thread(server.stop)
            await asyncio.to_thread(server.start)
        await asyncio.sleep(0.1)


async def test_a_full_disk_refuses_new_work_and_loses_nothing_and_work_continues_with_room(disk: Path) -> None:
    server = EmbeddedServer(disk / "nats", store_bytes_max=100 << 30)
    await asyncio.to_thread(server.start)
    ballast = disk / "ballast"
    acknowledged: list[str] = []
    try:
        async with await Bus.connect(server.url, "h") as bus:
            await bus.ensure_streams(SMALL_STREAMS)
            async with gateway_hive(bus, bus_timeout_s=1.0) as hive, watched(hive, bus, disk, 40 * MB):
                episode, key = await hive.claim()
                acknowledged += [await ask(hive, key) for _ in range(3)]
                ballast.write_bytes(b"x" * 60 * MB)
                await wait_until(hive, lambda state: storage.DISK in state.full)
                await check_no_new_work(hive, key, storage.DISK)
                keeping = asyncio.create_task(keep_running(server))
                fill(ballast)
                body, failed = b"x" * MB, 0
                try:
                    await bus.publisher.publish(
                        bus.subjects.call(ENGINE, "other"), body, msg_id="too much", timeout_s=2
                    )
                except BusUnavailable:
                    failed += 1
                assert failed, "the disk is not full"
                ballast.unlink()
                began = time.monotonic()
                await wait_until(hive, lambda state: not state.full)
                acknowledged.append(await ask(hive, key))
                assert time.monotonic() - began < SOON_S
                assert [record.id for record in await hive.records(episode, 4)] == acknowledged
                await hive.end(episode)
                keeping.cancel()
    finally:
        await asyncio.to_thread(server.stop, 2)


async def test_a_server_without_inodes_says_so_and_is_restarted_once_it_can_write_again(disk: Path) -> None:
    server = EmbeddedServer(disk / "nats", store_bytes_max=100 << 30)
    await asyncio.to_thread(server.start)
    try:
        async with await Bus.connect(server.url, "h") as bus:
            await bus.ensure_streams(SMALL_STREAMS)
            subject = bus.subjects.call(ENGINE, "e")
            taken = [disk / f"file-{number}" for number in range(INODES)]
            with suppress(OSError):
                for path in taken:
                    path.touch()
            with suppress(BusUnavailable):
                for number in range(20):  # a stream begins a new file every 8 MB
                    await bus.publisher.publish(subject, bytes(MB), msg_id=f"m{number}", timeout_s=2)
            assert "No space" in server.broken or "no space" in server.broken
            assert not server.needs_restart()
            for path in taken:
                path.unlink(missing_ok=True)
            keeping = asyncio.create_task(keep_running(server))
            await bus.publisher.publish(subject, b"again", msg_id="again", timeout_s=PATIENCE_S)
            keeping.cancel()
            assert not server.broken
    finally:
        await asyncio.to_thread(server.stop, 2)


@pytest.mark.parametrize(
    ("limit", "allowed", "why"),
    [(resource.RLIMIT_NOFILE, 3, "too many open files"), (resource.RLIMIT_FSIZE, 1 << 16, "file too large")],
)
async def test_a_server_that_cannot_write_whatever_the_reason_is_restarted_though_the_disk_has_room(
    tmp_path: Path, limit: int, allowed: int, why: str
) -> None:
    server = EmbeddedServer(tmp_path / "nats", store_bytes_max=1 << 30)
    await asyncio.to_thread(server.start)
    try:
        async with await Bus.connect(server.url, "h") as bus:
            await bus.ensure_streams(SMALL_STREAMS)
            subject, pid = bus.subjects.call(ENGINE, "e"), server.pid
            assert pid is not None
            _, most = resource.prlimit(pid, limit)
            resource.prlimit(pid, limit, (allowed, most))
            with suppress(BusUnavailable):
                for number in range(20):
                    await bus.publisher.publish(subject, bytes(MB), msg_id=f"m{number}", timeout_s=0.1)
            await until(lambda: server.broken)
            assert why in server.broken
            keeping = asyncio.create_task(keep_running(server))
            await bus.publisher.publish(subject, b"again", msg_id="again", timeout_s=PATIENCE_S)
            keeping.cancel()
            assert (server.pid != pid, server.broken) == (True, "")
    finally:
        await asyncio.to_thread(server.stop, 2)
