"""`bombus overwatch`: watch a hive in the terminal."""

import argparse
import asyncio
import sys

from bombus.cli import add_hive_arguments, hint_at_bus
from bombus.errors import BombusError
from bombus_overwatch import service


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_hive_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    try:
        asyncio.run(service.run(arguments.nats, arguments.hive))
    except (BombusError, ValueError) as error:
        print(f"bombus overwatch: {error}{hint_at_bus(arguments)}", file=sys.stderr)
        return 1
    return 0
