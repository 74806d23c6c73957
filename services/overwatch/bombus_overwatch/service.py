"""Connects the screen to a hive's log and keeps it connected."""

import asyncio

from bombus.bus import Bus, ServerRefused
from bombus.bus.follow import Follower
from bombus.errors import BusUnavailable
from bombus.hive.subjects import Subjects
from bombus_overwatch.app import Overwatch
from bombus_overwatch.screen import Link

RETRY_S = 1.0
LINK_CHECK_S = 0.1
AWAY = "the bus is away: this is the last known state, and updates resume when the bus is back"


async def run(nats_url: str, hive: str) -> None:
    """Show the hive until the user quits. While the bus is away, the screen waits for it.

    Raises `ValueError` for a bad hive name. If the log is corrupt, closes the screen and raises `LogCorrupted`.
    """
    app = Overwatch(Subjects(hive).hive)
    feed = asyncio.create_task(_feed(app, nats_url, hive))
    feed.add_done_callback(lambda done: None if done.cancelled() else app.exit())
    try:
        await app.run_async()
    finally:
        feed.cancel()
        await asyncio.gather(feed, return_exceptions=True)
    if not feed.cancelled():
        feed.result()


async def _feed(app: Overwatch, nats_url: str, hive: str) -> None:
    """Follow the log until cancelled. Raises errors in the log."""
    await app.up.wait()
    while True:
        try:
            async with await Bus.connect(nats_url, hive, name="overwatch") as bus:
                await follow(app, bus)
        except (BusUnavailable, ServerRefused) as error:
            app.report(Link.CONNECTING, str(error))  # the server or the hive's streams may not exist yet
        await asyncio.sleep(RETRY_S)


async def follow(app: Overwatch, bus: Bus) -> None:
    """Fold the hive's events into the screen, starting with the oldest one kept, until the bus is closed.

    Raises what `Reader.read` raises.
    """
    app.report(Link.CATCHING_UP)
    last = await bus.last(bus.subjects.events_stream)
    target = last.seq if last is not None else 0
    follower = Follower(bus, on_event=app.take, on_start=app.begin)
    watch = asyncio.create_task(_watch(app, bus, follower, target))
    try:
        await follower.run()
    finally:
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)


async def _watch(app: Overwatch, bus: Bus, follower: Follower, target: int) -> None:
    """Keep the link state on the screen up to date, by checking our own socket; nothing is sent to the server."""
    shown: Link | None = None
    while True:
        link = _link(bus.is_connected, follower.position >= target)
        if link != shown:
            app.report(link, AWAY if link == Link.AWAY else "", target)
            shown = link
        await asyncio.sleep(LINK_CHECK_S)


def _link(connected: bool, caught_up: bool) -> Link:
    if not connected:
        return Link.AWAY
    return Link.LIVE if caught_up else Link.CATCHING_UP
