"""The screen on a real bus."""

import asyncio
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from bombus.bus import Bus, EmbeddedServer
from bombus.hive.events import Event, encode_event, kind_of
from bombus.machine.process import free_port
from bombus_gateway.swarm.event_stream import encoded
from bombus_overwatch.app import Overwatch
from bombus_overwatch.screen import Link
from bombus_overwatch.service import GatewayLink, _feed, follow, read_sent
from tests.conftest import SMALL_STREAMS
from tests.gateway.event_streams import served_log
from tests.overwatch.story import Story, rolling

WAIT_S = 20.0


async def publish(bus: Bus, events: list[Event], start: int = 1) -> None:
    acks = [
        bus.publisher.publish(
            bus.subjects.event(event.engine, kind_of(event)), encode_event(event), msg_id=f"e{number}"
        )
        for number, event in enumerate(events, start)
    ]
    await asyncio.gather(*acks)


class Watched(Overwatch):
    """A screen whose position and link can be waited for."""

    def __init__(self, story: Story) -> None:
        super().__init__("demo", clock=lambda: story.now_ns)
        self.changed = asyncio.Event()

    def take(self, position: int, event: Event) -> None:
        super().take(position, event)
        self.changed.set()

    def report(self, link: Link, why: str = "", target: int = 0) -> None:
        super().report(link, why, target)
        self.changed.set()

    async def reached(self, position: int, link: Link) -> None:
        async with asyncio.timeout(WAIT_S):
            while self.timeline.newest < position or self.viewer.link != link:
                await self.changed.wait()
                self.changed.clear()


async def test_the_screen_catches_up_with_a_log_and_follows_it(bus: Bus) -> None:
    story = rolling(2)
    await publish(bus, story.events[:-5])
    app = Watched(story)
    async with app.run_test(size=(120, 36)):
        feed = asyncio.create_task(follow(app, bus))
        await app.reached(len(story.events) - 5, Link.LIVE)
        await publish(bus, story.events[-5:], len(story.events) - 4)
        await app.reached(len(story.events), Link.LIVE)
        assert app.timeline.live.moment.hive.engines["main"].version == 2
        feed.cancel()
        await asyncio.gather(feed, return_exceptions=True)


async def test_a_server_that_dies_is_waited_for(tmp_path: Path) -> None:
    server = EmbeddedServer(tmp_path)
    server.start()
    story = Story()
    story.boot()
    async with await Bus.connect(server.url, "demo") as bus:
        await bus.ensure_streams(SMALL_STREAMS)
        await publish(bus, story.events[:-1])
        app = Watched(story)
        async with app.run_test(size=(120, 36)):
            feed = asyncio.create_task(follow(app, bus))
            await app.reached(len(story.events) - 1, Link.LIVE)
            await asyncio.to_thread(server.stop)
            await app.reached(len(story.events) - 1, Link.AWAY)
            await asyncio.to_thread(server.start)
            await app.reached(len(story.events) - 1, Link.LIVE)
            await publish(bus, story.events[-1:], len(story.events))
            await app.reached(len(story.events), Link.LIVE)
            feed.cancel()
            await asyncio.gather(feed, return_exceptions=True)
    await asyncio.to_thread(server.stop)


async def test_over_a_gateway_the_screen_catches_up_with_a_log_and_follows_it(bus: Bus) -> None:
    story = rolling(2)
    await publish(bus, story.events[:-5])
    app = Watched(story)
    async with served_log(bus) as (url, follower), app.run_test(size=(120, 36)):
        feed = asyncio.create_task(_feed(app, GatewayLink(url)))
        await app.reached(len(story.events) - 5, Link.LIVE)
        await publish(bus, story.events[-5:], len(story.events) - 4)
        await app.reached(len(story.events), Link.LIVE)
        assert app.timeline.live.moment.hive == follower.hive
        assert len(app.timeline.steps("main", 1, len(story.events))) == 2
        feed.cancel()
        await asyncio.gather(feed, return_exceptions=True)


async def test_a_gateway_that_goes_away_is_waited_for_and_no_event_is_folded_twice(bus: Bus) -> None:
    story = rolling(2)
    half = len(story.events) // 2
    await publish(bus, story.events[:half])
    app, port = Watched(story), free_port()
    link = GatewayLink(f"http://127.0.0.1:{port}")
    async with app.run_test(size=(120, 36)):
        feed = asyncio.create_task(_feed(app, link))
        async with served_log(bus, port):
            await app.reached(half, Link.LIVE)
        await app.reached(half, Link.CONNECTING)
        assert "the gateway at" in app.viewer.why
        await publish(bus, story.events[half:], half + 1)
        async with served_log(bus, port) as (_, follower):
            await app.reached(len(story.events), Link.LIVE)
            assert app.timeline.live.moment.hive == follower.hive
        feed.cancel()
        await asyncio.gather(feed, return_exceptions=True)


def test_an_event_that_only_a_newer_release_understands_is_skipped() -> None:
    app, link = Overwatch("demo"), GatewayLink("http://127.0.0.1:1")
    for block, expected in (
        (encoded(1, rolling(0).events[0]).removesuffix(b"\n\n"), Link.LIVE),
        (b'id: 2\ndata: {"kind": "of.the.future"}', Link.LIVE),
        (b": a proxy keeps the connection open", Link.LIVE),
        (b'event: position\ndata: {"position": 3, "bus": true}', Link.CATCHING_UP),
        (b'event: position\ndata: {"position": 2, "bus": false}', Link.AWAY),
    ):
        assert link._take(app, *read_sent(block)) == expected
    assert app.timeline.newest == 1


@pytest.mark.parametrize("wrong", [b"data: <html>", b"id: x\ndata: {}", b'event: begin\ndata: {"position": 1}'])
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
