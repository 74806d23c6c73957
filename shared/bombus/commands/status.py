"""`bombus status`: what a hive is doing, as text or JSON, from its log."""

import argparse
import asyncio
import json
import sys

from bombus.bus import Bus
from bombus.cli import add_hive_arguments
from bombus.errors import BombusError
from bombus.follow import Follower
from bombus.state import Hive
from bombus.status import render_status, status_dict


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_hive_arguments(parser)
    parser.add_argument("--engine", default="", metavar="NAME", help="only this engine (default: all)")
    parser.add_argument("--json", action="store_true", help="print it as JSON, for programs")


def run(arguments: argparse.Namespace) -> int:
    try:
        hive = asyncio.run(_fold(arguments.nats, arguments.hive))
    except (BombusError, ValueError, TimeoutError) as error:
        print(f"bombus status: {error or 'the log could not be read in time'}", file=sys.stderr)
        return 1
    if arguments.json:
        print(json.dumps(status_dict(hive), indent=2))
    else:
        print(render_status(hive, arguments.engine), end="")
    return 0


async def _fold(url: str, name: str) -> Hive:
    async with await Bus.connect(url, name, name="status") as bus:
        follower = Follower(bus)
        following = asyncio.create_task(follower.run())
        try:
            await follower.caught_up()
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
        return follower.hive
