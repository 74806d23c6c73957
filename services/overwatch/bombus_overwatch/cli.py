"""`bombus overwatch`: watch a hive in the terminal."""

import argparse
import asyncio
import sys

from bombus.cli import add_hive_arguments, hint_at_bus
from bombus.errors import BombusError
from bombus.terminal import complain
from bombus_overwatch import service


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_hive_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    if not (sys.stdin.isatty() and sys.stderr.isatty()):  # keys are read from stdin, and the screen is drawn on stderr
        complain("bombus overwatch: there is no terminal to draw in: use `bombus status`")
        return 1
    try:
        asyncio.run(service.run(arguments.nats, arguments.hive))
    except (BombusError, ValueError) as error:
        complain(f"bombus overwatch: {error}", *hint_at_bus(arguments))
        return 1
    return 0
