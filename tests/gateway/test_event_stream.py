"""The hive's events as a stream over HTTP: whole, resumable, the same as the log, and nothing while nobody reads it."""

import asyncio
from base64 import b64decode
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from math import inf, nan
from typing import Any

import httpx
import msgspec
import pytest

from bombus.bus import Bus, snapshots
from bombus.hive import events as ev
from bombus.hive.episodes import KEY_PREFIX
from bombus.hive.events import AnyEvent
from bombus.hive.fold.evolve import evolve
from bombus.hive.records import decode_record
from bombus.hive.state import FOLD, Hive
from bombus.machine.hive_keys import HiveKeys, NamedKey
from bombus_gateway.swarm import event_stream
from bombus_gateway.swarm.event_stream import encoded
from tests.gateway.event_streams import served_log
from tests.gateway.swarm_hive import PlayedHive, played_hive
from tests.overwatch.story import chaos, rolling
from tests.overwatch.test_service import publish
from tests.patience import PATIENCE_S

DECODER = msgspec.json.Decoder(AnyEvent, strict=False)
Sent = tuple[str, int | None, Any]  # name, id and data


def parts_of(block: str) -> Sent:
    fields = dict(line.split(": ", 1) for line in block.split("\n"))
    return fields.get("event", ""), int(fields["id"]) if "id" in fields else None, fields["data"]


class Viewer:
    """What a viewer has read of a stream."""

    def __init__(self, reply: httpx.Response) -> None:
        self._chunks = reply.aiter_text()
        self._rest = ""
        self.sent: list[Sent] = []

    @property
    def positions(self) -> list[int]:
        return [position for name, position, _ in self.sent if not name and position is not None]

    def hive(self) -> Hive:
        hive = Hive()
        for name, _, data in self.sent:
            if not name:
                evolve(hive, DECODER.decode(data))
        return hive

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not holds():
                *blocks, self._rest = (self._rest + await anext(self._chunks)).split("\n\n")
                self.sent += map(parts_of, blocks)


@asynccontextmanager
async def viewing(url: str, query: str = "", last: str = "") -> AsyncIterator[Viewer]:
    headers = {"last-event-id": last} if last else {}
    async with (
        httpx.AsyncClient(timeout=PATIENCE_S) as http,
        http.stream("GET", f"{url}/events{query}", headers=headers) as reply,
    ):
        assert reply.status_code == 200, await reply.aread()
        assert reply.headers["content-type"].startswith("text/event-stream")
        yield Viewer(reply)


@pytest.fixture
async def played(bus: Bus) -> AsyncIterator[PlayedHive]:
    async with played_hive(bus) as played:
        yield played


async def test_a_viewer_gets_the_log_from_its_first_event_and_what_comes_after(played: PlayedHive) -> None:
    await played.start()
    follower = played.gateway.follower
    async with played.served() as url, viewing(url) as viewer:
        await viewer.until(lambda: follower.position in viewer.positions)
        assert viewer.sent[0] == ("begin", 0, '{"position":0,"state":""}')
        claimed = await played.claim()
        await played.end(claimed["episode_uuid"], 0.5)
        await viewer.until(lambda: follower.position in viewer.positions)
        assert viewer.positions == list(range(1, follower.position + 1)), "each event once, in order"
        assert viewer.hive() == follower.hive
        text = "".join(data for _, _, data in viewer.sent)
        secrets = [claimed["openai_api_key"], claimed["episode_uuid"], claimed["episode_uuid"].partition(".")[2]]
        assert not any(secret in text for secret in [*secrets, KEY_PREFIX])


async def test_a_viewer_resumes_after_the_event_that_it_has(played: PlayedHive) -> None:
    await played.start()
    follower = played.gateway.follower
    newest = follower.position
    async with played.served() as url:
        for ask in (partial(viewing, url, f"?after={newest - 2}"), partial(viewing, url, last=f"{newest - 2}")):
            async with ask() as viewer:
                await viewer.until(lambda: newest in viewer.positions)
                assert viewer.positions == [newest - 1, newest]
                assert viewer.sent[0][0] == "position", "no new beginning"
        async with viewing(url, f"?after={newest + 1000}") as other:
            await other.until(lambda: newest in other.positions)
            assert other.sent[0][0] == "begin", "the log was replaced by a shorter one"


async def test_while_nothing_happens_a_viewer_is_told_the_position(
    played: PlayedHive, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_stream, "QUIET_S", 0.05)
    async with played.served() as url, viewing(url) as viewer:
        await viewer.until(lambda: [name for name, *_ in viewer.sent].count("position") >= 3)
        assert msgspec.json.decode(viewer.sent[-1][2]) == {"position": played.gateway.follower.position, "bus": True}


def has(viewer: Viewer, position: int) -> bool:
    return position in viewer.positions


async def test_a_viewer_that_stops_reading_holds_up_nobody_and_gets_everything_later(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_stream, "RECENT_BYTES_MAX", 4096)
    events = rolling(40).events
    async with served_log(bus) as (url, follower), viewing(url) as slow, viewing(url) as fast:
        await slow.until(lambda: bool(slow.sent))
        for start in range(0, len(events), 50):
            await publish(bus, events[start : start + 50], start + 1)
            newest = min(start + 50, len(events))
            await fast.until(partial(has, fast, newest))
        await slow.until(lambda: len(events) in slow.positions)
        for viewer in (slow, fast):
            assert viewer.positions == list(range(1, len(events) + 1))
            assert viewer.hive() == follower.hive


async def test_the_stream_of_a_compacted_log_begins_with_a_snapshot(bus: Bus) -> None:
    events = rolling(2).events
    await publish(bus, events)
    hive = Hive()
    for event in events[:50]:
        evolve(hive, event)
    body = snapshots.encode(snapshots.Snapshot(fold=FOLD, position=50, event_id="e50", answered=0, hive=hive))
    await snapshots.store(bus, body, 50)
    await bus.purge_below(bus.subjects.events_stream, 51)
    async with served_log(bus) as (url, follower), viewing(url) as viewer:
        await follower.caught_up()
        await viewer.until(lambda: len(events) in viewer.positions)
        name, position, data = viewer.sent[0]
        assert (name, position, viewer.positions[0]) == ("begin", 50, 51)
        assert snapshots.decode(b64decode(msgspec.json.decode(data)["state"])).hive == hive
        async with viewing(url, "?after=20") as gone:
            await gone.until(lambda: len(events) in gone.positions)
            assert gone.sent[0][:2] == ("begin", 50), "the events after 20 are gone"


async def test_without_viewers_nothing_is_encoded_or_kept(played: PlayedHive) -> None:
    follower = played.gateway.follower
    assert follower.on_event is None
    async with played.served() as url:
        async with viewing(url) as viewer:
            await viewer.until(lambda: bool(viewer.sent))
            assert follower.on_event is not None
        async with asyncio.timeout(PATIENCE_S):
            while follower.on_event is not None:
                await asyncio.sleep(0.01)


async def test_a_gateway_that_stops_ends_its_streams(played: PlayedHive, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_stream, "QUIET_S", 0.05)
    async with played.served() as url, viewing(url) as viewer:
        played.gateway.ready = False
        with pytest.raises(StopAsyncIteration):
            await viewer.until(lambda: False)


async def test_viewers_are_limited_and_what_is_no_position_is_refused(
    played: PlayedHive, monkeypatch: pytest.MonkeyPatch
) -> None:
    for wrong in ("x", "-1", "1" * 30, "1.5"):
        assert (await played.http.get(f"/events?after={wrong}")).json()["code"] == "malformed"
    monkeypatch.setattr(event_stream, "VIEWERS_MAX", 0)
    assert (await played.http.get("/events")).json()["code"] == "overloaded"


async def test_where_clients_have_names_and_there_is_no_admin_none_of_them_reads_the_events_of_all(bus: Bus) -> None:
    keys = HiveKeys(clients={"alice": NamedKey(key="a-key-of-alice-for-tests")})
    async with played_hive(bus, keys=keys) as played:
        reply = await played.http.get("/events", headers={"x-api-key": "a-key-of-alice-for-tests"})
        assert (reply.status_code, reply.json()["code"]) == (401, "bad_key")


async def test_the_record_of_a_call_is_given_to_the_admin_key_alone(bus: Bus) -> None:
    admin, client = "an-admin-key-for-tests", "a-client-key-for-tests"
    async with played_hive(bus, keys=HiveKeys(admin=admin, client=client)) as played:
        played.http.headers["x-api-key"] = admin
        await played.start()
        ref = await played.call((await played.claim())["episode_uuid"], ({"role": "user", "content": "1+1"},), "2")
        reply = await played.http.get(f"/call_record?seq={ref.seq}")
        assert decode_record(reply.content, ref).messages == ({"role": "user", "content": "1+1"},)
        for query, code in ((ref.seq + 1, "no_calls"), ("", "malformed"), ("0", "malformed"), ("x", "malformed")):
            assert (await played.http.get(f"/call_record?seq={query}")).json()["code"] == code
        refused = await played.http.get(f"/call_record?seq={ref.seq}", headers={"x-api-key": client})
        assert (refused.status_code, refused.json()["code"]) == (401, "bad_key")


@pytest.mark.parametrize("keys", [HiveKeys(), HiveKeys(client="a-client-key-for-tests")])
async def test_a_hive_without_an_admin_key_gives_no_record_to_anybody(bus: Bus, keys: HiveKeys) -> None:
    async with played_hive(bus, keys=keys) as played:
        played.http.headers["x-api-key"] = "a-client-key-for-tests"
        assert (await played.http.get("/call_record?seq=1")).json()["code"] == "bad_key"


async def test_an_operator_aborts_an_episode_by_its_name_and_a_client_needs_its_secret(bus: Bus) -> None:
    admin, client = "an-admin-key-for-tests", "a-client-key-for-tests"
    async with played_hive(bus, keys=HiveKeys(admin=admin, client=client)) as played:
        played.http.headers["x-api-key"] = admin
        await played.start()
        claimed = await played.claim()
        name = claimed["episode_uuid"].partition(".")[0]
        refused = await played.post("/stop_episode", {"episode": name}, **{"x-api-key": client})
        assert refused.status_code == 401
        assert name in played.engine.open
        for _ in range(2):  # a repeat changes nothing
            reply = await played.post("/stop_episode", {"episode": name})
            assert reply.json() == {"success": True}
            assert name not in played.engine.open
        assert (await played.post("/stop_episode", {"episode": "main-9-9"})).json() == {"success": True}


def test_every_kind_of_event_is_the_same_after_a_journey_as_json() -> None:
    for seed in range(40):
        for event in chaos(seed):
            *_, data = parts_of(encoded(1, event).decode().removesuffix("\n\n"))
            assert DECODER.decode(data) == event


def test_numbers_that_are_not_finite_survive() -> None:
    done = ev.StepCompleted(
        run=1, step=1, trainer_epoch=1, checkpoint="", checkpoint_digest="", metrics={"a": nan, "b": inf, "c": -inf}
    )
    *_, data = parts_of(encoded(1, done).decode().removesuffix("\n\n"))
    found = DECODER.decode(data)
    assert isinstance(found, ev.StepCompleted)
    assert str(found.metrics) == str(done.metrics)
