"""`bombus overwatch`: watch a hive in the terminal."""

import argparse
import asyncio

from bombus.cli import add_hive_arguments, hint_at_bus
from bombus.errors import BombusError
from bombus.terminal import complain
from bombus_overwatch import service


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_hive_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    try:
        asyncio.run(service.run(arguments.nats, arguments.hive))
    except (BombusError, ValueError) as error:
        complain(f"bombus overwatch: {error}", *hint_at_bus(arguments))
        return 1
    return 0
