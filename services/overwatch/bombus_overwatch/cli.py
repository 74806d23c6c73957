"""`bombus overwatch`: watch a hive in the terminal."""

import argparse
import asyncio
import sys
from urllib.parse import urlsplit

from bombus.cli import add_hive_arguments, hint_at_bus
from bombus.errors import BombusError
from bombus.terminal import complain
from bombus_overwatch import service


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_hive_arguments(parser)
    parser.add_argument(
        "--swarm-url",
        metavar="URL",
        help="reach the hive through this gateway, such as http://gateway:10086, instead of the bus. If the hive has "
        "keys, set $BOMBUS_ADMIN_KEY",
    )


def run(arguments: argparse.Namespace) -> int:
    if not (sys.stdin.isatty() and sys.stderr.isatty()):  # keys are read from stdin, and the screen is drawn on stderr
        complain("bombus overwatch: there is no terminal to draw in: use `bombus status`")
        return 1
    try:
        asyncio.run(_show(arguments))
    except (BombusError, ValueError) as error:
        hints = () if arguments.swarm_url else hint_at_bus(arguments)
        complain(f"bombus overwatch: {error}", *hints)
        return 1
    return 0


async def _show(arguments: argparse.Namespace) -> None:
    if arguments.swarm_url:
        link = service.GatewayLink(arguments.swarm_url)
        await service.run(link, urlsplit(arguments.swarm_url).netloc.rpartition("@")[2])
    else:
        await service.run(service.BusLink(arguments.nats, arguments.hive), arguments.hive)
