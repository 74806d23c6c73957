"""`bombus stop`: stops the job of an engine. The hive goes on, and another job can be started."""

import argparse
import asyncio
import uuid

from bombus.bus import Bus
from bombus.cli import add_hive_arguments, hint_at_bus
from bombus.commands.status import fold
from bombus.config.flags import name_of
from bombus.errors import BombusError, Code, Refused
from bombus.hive import inbox
from bombus.hive.state import Phase
from bombus.terminal import complain, say


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--engine",
        type=name_of("engine"),
        default="main",
        metavar="NAME",
        help="the engine to stop (default: %(default)s)",
    )
    add_hive_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    try:
        say(asyncio.run(_stop(arguments.nats, arguments.hive, arguments.engine)))
    except Refused:
        raise
    except (BombusError, ValueError, TimeoutError) as error:
        complain(f"bombus stop: {error or 'the hive did not reply in time'}", *hint_at_bus(arguments))
        return 1
    return 0


async def _stop(url: str, name: str, engine: str) -> str:
    async with await Bus.connect(url, name, name="stop") as bus:
        hive = await fold(bus)
        state = hive.engines.get(engine)
        if state is None:
            names = ", ".join(hive.engines) or "none"
            raise Refused(Code.UNKNOWN_ENGINE, f"hive {name} has no engine {engine}; its engines are: {names}")
        if state.phase == Phase.OFFLINE:
            return f"engine {engine} runs no job"
        await bus.inbox.request(inbox.Stop(id=uuid.uuid4().hex, engine=engine))
        return f"engine {engine} is stopped at step {state.global_step}; its log, weights and checkpoints are kept"
