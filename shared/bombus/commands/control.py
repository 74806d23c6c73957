"""The common part of `bombus stop` and `bombus resume`, which send one command to an engine and print the result."""

import argparse
import asyncio
from collections.abc import Awaitable, Callable

from bombus.bus import Bus
from bombus.bus.follow import fold
from bombus.cli import add_engine_argument, add_hive_arguments, hint_at_bus
from bombus.errors import BombusError, Code, Refused
from bombus.hive.state import EngineState
from bombus.terminal import complain, say

Act = Callable[[Bus, EngineState], Awaitable[str]]
"""Sends the command to an engine, if its state requires it, and returns the text to print."""


def add_arguments(parser: argparse.ArgumentParser, what: str) -> None:
    add_engine_argument(parser, f"the engine to {what}")
    add_hive_arguments(parser)


def run(what: str, arguments: argparse.Namespace, act: Act) -> int:
    """Run a command and return its exit code. Raises `Refused` if the hive has no such engine or declines the
    command."""
    try:
        say(asyncio.run(_run(what, arguments, act)))
    except Refused:
        raise
    except (BombusError, ValueError, TimeoutError) as error:
        complain(f"bombus {what}: {error or 'the hive did not reply in time'}", *hint_at_bus(arguments))
        return 1
    return 0


async def _run(what: str, arguments: argparse.Namespace, act: Act) -> str:
    async with await Bus.connect(arguments.nats, arguments.hive, name=what, patient=False) as bus:
        hive = await fold(bus)
        state = hive.engines.get(arguments.engine)
        if state is None:
            names = ", ".join(hive.engines) or "none"
            raise Refused(
                Code.UNKNOWN_ENGINE,
                f"hive {arguments.hive} has no engine {arguments.engine}; its engines are: {names}",
            )
        return await act(bus, state)
