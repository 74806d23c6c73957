"""What one key's open requests leave of a gateway, places and memory for those of others."""

import asyncio
import resource
import time
from functools import partial

import httpx
import pytest
from starlette.types import Message

from bombus.bus import Bus
from bombus.errors import Refused
from bombus.machine.hive_keys import HiveKeys, NamedKey
from bombus.machine.host_names import RawHeaders
from bombus_gateway.keys import Keys
from bombus_gateway.open_requests import OpenRequest, OpenRequests, places_of, share_by_key
from bombus_gateway.settings import GatewaySettings
from tests.gateway.openai_hive import ENGINE, JOB, SECRET, gateway_hive
from tests.patience import PATIENCE_S

ADMIN = "an-admin-key-for-tests"
ALICE, BOB = "alices-key-for-tests", "bobs-key-for-tests"
KEYS = HiveKeys(admin=ADMIN, clients={"alice": NamedKey(key=ALICE), "bob": NamedKey(key=BOB)})


CLAIM = b'{"client_uuid": "c", "episode_type": "train", "discard_episode_timeout": 60.0}'
FULL = (503, "overloaded")
SIGNS_OF_LIFE = {"/touch_client": b'{"client_uuid": "c"}', "/api/v1/session_heartbeat": b'{"session_id": "s"}'}


async def answer(url: str, key: str, path: str, content: bytes) -> tuple[int, str]:
    """Send a request on a connection of its own; return its status and code."""
    async with httpx.AsyncClient(timeout=60) as client:
        found = await client.post(url + path, content=content, headers={"x-api-key": key})
        return found.status_code, found.json().get("code", "")


async def test_open_requests_of_one_key_leave_places_for_those_of_others(bus: Bus) -> None:
    rollout = {**JOB["bombus"]["rollout"], "max_env_worker": 1}
    job = {"bombus": {**JOB["bombus"], "rollout": rollout}}
    async with (
        gateway_hive(bus, job, keys=KEYS, open_calls_max=8, claim_wait_s=25) as hive,
        asyncio.timeout(PATIENCE_S),
        asyncio.TaskGroup() as tasks,
    ):
        send = partial(answer, hive.base_url)
        assert (await send(ALICE, "/claim_episode", CLAIM))[0] == 200
        waiting: list[asyncio.Task[tuple[int, str]]] = []
        while await send(ALICE, "/end_episode", b"{") != FULL:
            waiting.append(tasks.create_task(send(ALICE, "/claim_episode", CLAIM)))
        assert len(waiting) >= 11
        for key in (BOB, ADMIN):
            assert (await send(key, "/end_episode", b"{"))[0] == 400
        for path, sign in SIGNS_OF_LIFE.items():
            assert await send(ALICE, path, sign) != FULL, "who is busy is not taken for dead"
        assert (await send("", "/health", b""))[0] == 405, "it answers"
        for each in waiting:
            each.cancel()
        while await send(ALICE, "/end_episode", b"{") == FULL:
            await asyncio.sleep(0.02)
        (episode,) = hive.engine.open
        key = Keys(SECRET).sign(ENGINE, hive.engine.run, episode, time.time_ns() + 10**12)
        assert hive.gateway is not None
        share_of = share_by_key(hive.gateway)
        assert share_of([(b"authorization", f"Bearer {key}".encode())]) == "alice"
        assert [share_of([(b"x-api-key", each.encode())]) for each in (BOB, ADMIN, key[:-9])] == ["bob", "/admin", ""]


async def test_nobody_has_to_know_whose_requests_are_open_while_there_is_room() -> None:
    asked: list[str] = []

    def share_of(headers: RawHeaders) -> str:
        asked.append(share := dict(headers)[b"x-api-key"].decode())
        return share

    async def part() -> Message:
        return {"type": "http.request", "body": b" " * 10}

    requests = OpenRequests(places=4, bytes_max=80, share_of=share_of)

    def enter(key: str) -> OpenRequest:
        return requests.enter([(b"x-api-key", key.encode())])

    of_alice = [enter("alice") for _ in range(4)]
    for _ in range(2):
        for each in of_alice:
            await requests.received(each, part)
    assert asked == []
    with pytest.raises(Refused, match="4 requests are open here, but the limit is 4"):
        enter("alice")
    of_bob = [enter("bob"), enter("bob")]
    for each in of_bob * 2:
        await requests.received(each, part)
    for each in (of_alice[0], of_bob[0]):
        with pytest.raises(Refused, match="fill the limit of 0 MiB"):
            await requests.received(each, part)
    with pytest.raises(Refused):
        enter("bob")
    for each in [*of_alice, *of_bob]:
        requests.leave(each)
    assert len(asked) == 4 + 4, "once for each that came, and for each that was refused"
    again = [enter("alice") for _ in range(4)]
    for each in again * 2:
        await requests.received(each, part)


@pytest.mark.parametrize("last", [{"type": "http.disconnect"}, {"type": "http.request", "body": b""}])
async def test_what_takes_no_memory_is_received_however_full_that_is(last: Message) -> None:
    async def part(size: int) -> Message:
        return {"type": "http.request", "body": b" " * size}

    async def end() -> Message:
        return last

    requests = OpenRequests(places=4, bytes_max=10, share_of=lambda headers: dict(headers)[b"x-api-key"].decode())
    alice, bob = (requests.enter([(b"x-api-key", key)]) for key in (b"alice", b"bob"))
    await requests.received(alice, partial(part, 10))
    await requests.received(bob, partial(part, 5))
    assert await requests.received(alice, end) == last


@pytest.mark.parametrize(("calls", "files", "places"), [(1, 4096, 2), (4096, 9000, 6144), (4096, 1024, 576)])
def test_places_are_fewer_than_connections_also_where_few_files_may_be_open(
    calls: int, files: int, places: int
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
    try:
        assert places_of(GatewaySettings(open_calls_max=calls)) == places
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
