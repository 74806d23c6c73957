"""`bombus status`: prints what a hive is doing, as text or JSON, from its log, and how full its streams are."""

import argparse
import asyncio

import msgspec

from bombus.bus import Bus, StreamState
from bombus.bus.follow import Follower
from bombus.bus.streams import stream_text
from bombus.cli import add_hive_arguments, hint_at_bus
from bombus.errors import BombusError
from bombus.hive.state import Hive
from bombus.hive.status import render_status, status_dict
from bombus.terminal import complain, say, say_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_hive_arguments(parser)
    parser.add_argument("--engine", default="", metavar="NAME", help="only this engine (default: all)")
    parser.add_argument("--json", action="store_true", help="print it as JSON, for programs")


def run(arguments: argparse.Namespace) -> int:
    try:
        hive, streams = asyncio.run(_look(arguments.nats, arguments.hive))
    except (BombusError, ValueError, TimeoutError) as error:
        why = error or "the log could not be read in time"
        complain(f"bombus status: {why}", *hint_at_bus(arguments))
        return 1
    if arguments.json:
        say_json({**status_dict(hive), "streams": msgspec.to_builtins(streams)})
    else:
        say(*render_status(hive, arguments.engine).splitlines())
        if not arguments.engine:
            say("", "streams:", *(f"  {name:<6} {stream_text(state)}" for name, state in streams.items()))
    return 0


async def _look(url: str, name: str) -> tuple[Hive, dict[str, StreamState]]:
    async with await Bus.connect(url, name, name="status") as bus:
        return await fold(bus), await bus.limited_states()


async def fold(bus: Bus) -> Hive:
    """Return the present state of a hive. Raises `TimeoutError`."""
    follower = Follower(bus)
    following = asyncio.create_task(follower.run())
    try:
        await follower.caught_up()
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
    return follower.hive
