"""The screen on a real bus."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from bombus.bus import Bus, EmbeddedServer
from bombus.errors import BusUnavailable
from bombus.hive.events import Event, encode_event, kind_of
from bombus.insight.watch import LogWatch
from bombus.machine.hive_keys import HiveKeys, NamedKey
from bombus.machine.process import free_port
from bombus_gateway.swarm.event_stream import encoded
from bombus_overwatch.app import Overwatch
from bombus_overwatch.model import HiveView
from bombus_overwatch.screen import Link, screen_data
from bombus_overwatch.service import BusLink, GatewayLink, read_sent
from tests.conftest import SMALL_STREAMS
from tests.gateway.event_streams import served_log
from tests.gateway.swarm_hive import played_hive
from tests.overwatch.story import Folded, Story, ToldWatch, rolling
from tests.patience import until

WAIT_S = 20.0


async def publish(bus: Bus, events: list[Event], start: int = 1) -> None:
    acks = [
        bus.publisher.publish(
            bus.subjects.event(event.engine, kind_of(event)), encode_event(event), msg_id=f"e{number}"
        )
        for number, event in enumerate(events, start)
    ]
    await asyncio.gather(*acks)


@asynccontextmanager
async def shown(link: BusLink | GatewayLink) -> AsyncIterator[Overwatch]:
    watch = LogWatch(link.open, moment=HiveView)
    app = Overwatch("demo", watch)
    with watch.viewing():
        async with app.run_test(size=(120, 36)):
            yield app
    await watch.close()


async def reached(app: Overwatch, position: int, link: Link) -> None:
    await until(lambda: app.live.position >= position and app.link[0] == link)


def on_bus(bus: Bus) -> BusLink:
    return BusLink(bus.client.connected_url.geturl(), bus.subjects.hive)


async def test_the_screen_catches_up_with_a_log_and_follows_it(bus: Bus) -> None:
    story = rolling(2)
    await publish(bus, story.events[:-5])
    async with shown(on_bus(bus)) as app:
        await reached(app, len(story.events) - 5, Link.LIVE)
        await publish(bus, story.events[-5:], len(story.events) - 4)
        await reached(app, len(story.events), Link.LIVE)
        assert app.live.hive.engines["main"].version == 2


async def test_a_server_that_dies_is_waited_for(tmp_path: Path) -> None:
    server = EmbeddedServer(tmp_path)
    server.start()
    story = Story()
    story.boot()
    async with await Bus.connect(server.url, "demo") as bus:
        await bus.ensure_streams(SMALL_STREAMS)
        await publish(bus, story.events[:-1])
        async with shown(BusLink(server.url, "demo")) as app:
            await reached(app, len(story.events) - 1, Link.LIVE)
            await asyncio.to_thread(server.stop)
            await reached(app, len(story.events) - 1, Link.AWAY)
            assert "last known state" in app.link[1]
            await asyncio.to_thread(server.start)
            await reached(app, len(story.events) - 1, Link.LIVE)
            await publish(bus, story.events[-1:], len(story.events))
            await reached(app, len(story.events), Link.LIVE)
    await asyncio.to_thread(server.stop)


async def test_over_a_gateway_the_screen_catches_up_with_a_log_and_follows_it(bus: Bus) -> None:
    story = rolling(2)
    await publish(bus, story.events[:-5])
    async with served_log(bus) as (url, follower), shown(GatewayLink(url)) as app:
        await reached(app, len(story.events) - 5, Link.LIVE)
        await publish(bus, story.events[-5:], len(story.events) - 4)
        unknown = encode_event(story.events[0]).replace(b"epoch", b"xxxxx")
        await bus.publisher.publish(bus.subjects.event("main", "x"), unknown, msg_id="x")
        await publish(bus, story.events[-1:], len(story.events) + 2)
        await reached(app, len(story.events) + 2, Link.LIVE)
        assert app.live.hive == follower.hive
        assert (await app.log_watch.at(len(story.events) + 1)).hive == Folded(story.events).live.hive
        assert screen_data(app.record, app.live, 0).training.last_step == 2


@pytest.mark.parametrize("over_gateway", [False, True])
async def test_every_position_of_the_log_can_be_shown(bus: Bus, over_gateway: bool) -> None:
    events = rolling(2).events
    await publish(bus, events)
    async with served_log(bus) as (url, _), shown(GatewayLink(url) if over_gateway else on_bus(bus)) as app:
        await reached(app, len(events), Link.LIVE)
        for position in (0, 1, 40, len(events) - 1):
            moment = await app.log_watch.at(position)
            assert moment.hive == Folded(events[:position]).live.hive
            assert moment.position == position


async def test_a_gateway_of_a_hive_without_an_admin_key_shows_an_episode_without_its_calls(bus: Bus) -> None:
    events = rolling(1).events
    await publish(bus, events)
    async with served_log(bus) as (url, _), shown(GatewayLink(url)) as app:
        await reached(app, len(events), Link.LIVE)
        transcript = await app.log_watch.transcript("main-1-1", len(events))
        assert transcript.story.outcome is not None
        assert transcript.turns == ()
        assert all("Only an admin key can read prompts" in lost for lost in transcript.lost)
        assert transcript.lost


async def test_a_gateway_that_goes_away_is_waited_for_and_no_event_is_folded_twice(bus: Bus) -> None:
    story = rolling(2)
    half = len(story.events) // 2
    await publish(bus, story.events[:half])
    port = free_port()
    async with shown(GatewayLink(f"http://127.0.0.1:{port}")) as app:
        await until(lambda: "the gateway at" in app.link[1])
        async with served_log(bus, port):
            await reached(app, half, Link.LIVE)
            record = app.record
        await reached(app, half, Link.AWAY)
        assert "the gateway at" in app.link[1]
        await publish(bus, story.events[half:], half + 1)
        async with served_log(bus, port) as (_, follower):
            await reached(app, len(story.events), Link.LIVE)
            assert app.live.hive == follower.hive
            assert app.record is record, "it was not read again"


async def test_a_longer_log_that_has_taken_the_place_of_another_is_read_from_its_beginning(
    bus: Bus, tmp_path: Path
) -> None:
    """As when a hive's folder was removed, and a new hive was started."""
    first = rolling(1).events
    second = [msgspec.structs.replace(event, at_ns=event.at_ns + 1) for event in rolling(3).events]
    await publish(bus, first)
    server, port = EmbeddedServer(tmp_path), free_port()
    server.start()
    async with await Bus.connect(server.url, bus.subjects.hive) as other:
        await other.ensure_streams(SMALL_STREAMS)
        await publish(other, second)
        async with shown(GatewayLink(f"http://127.0.0.1:{port}")) as app:
            async with served_log(bus, port):
                await reached(app, len(first), Link.LIVE)
            async with served_log(other, port) as (_, follower):
                await reached(app, len(second), Link.LIVE)
                assert app.live.hive == follower.hive
    await asyncio.to_thread(server.stop)


async def test_a_hive_that_refuses_ends_the_screen_and_is_said(bus: Bus) -> None:
    keys = HiveKeys(clients={"alice": NamedKey(key="a-key-of-alice-for-tests")})
    async with played_hive(bus, keys=keys) as played, played.served() as url:
        watch = LogWatch(GatewayLink(f"{url}/k/a-key-of-alice-for-tests").open, moment=HiveView)
        watch.touch()
        await until(lambda: watch.failure is not None)
        assert "admin key" in str(watch.failure)
        app = Overwatch("demo", watch)
        async with app.run_test(size=(120, 36)):
            await until(lambda: not app.is_running)
        await watch.close()


def test_an_event_that_only_a_newer_release_understands_is_skipped() -> None:
    watch, link = ToldWatch(), GatewayLink("http://127.0.0.1:1")
    for block, expected in (
        (encoded(1, rolling(0).events[0]).removesuffix(b"\n\n"), 1),
        (b'id: 2\ndata: {"kind": "of.the.future"}', 2),
        (b": a proxy keeps the connection open", 2),
        (encoded(3, rolling(0).events[1]).removesuffix(b"\n\n"), 3),
    ):
        if (stored := link._take(block, 0)) is not None:
            watch.take(stored)
        assert watch.position == expected
    with pytest.raises(BusUnavailable, match="the bus of the gateway"):
        link._take(b'event: position\ndata: {"position": 2, "bus": false}', 0)
    assert watch.record is not None
    assert watch.record.live.hive == Folded(rolling(0).events[:2]).live.hive


@pytest.mark.parametrize(
    "wrong", [b"data: <html>", b'data: {"position": 7}', b"id: x\ndata: {}", b'event: begin\ndata: {"state": ""}']
)
def test_what_is_no_event_of_a_hive_is_an_error(wrong: bytes) -> None:
    with pytest.raises(msgspec.MsgspecError):
        read_sent(wrong)


def test_an_address_that_is_none_is_refused_in_a_sentence() -> None:
    with pytest.raises(ValueError, match="must begin with http"):
        GatewayLink("gateway:10086")


def test_without_a_terminal_overwatch_names_the_command_that_prints() -> None:
    words = [sys.executable, "-m", "bombus", "overwatch", "--nats", "nats://127.0.0.1:1"]
    done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=WAIT_S)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("bombus overwatch: there is no terminal to draw in: use `bombus status`")
