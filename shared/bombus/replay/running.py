"""How the subcommands of `bombus replay` run: they open a log, work on it, and report an error in one sentence."""

import argparse
import asyncio
from collections.abc import Awaitable, Callable

from bombus.errors import BombusError
from bombus.replay.opening import open_source
from bombus.replay.source import Source
from bombus.terminal import complain

SourceCommand = Callable[[Source, argparse.Namespace], Awaitable[None]]


class BadUsage(ValueError):
    """Raised for a command line that makes no sense; the message says how to correct it."""


def run_on_source(prog: str, command: SourceCommand, arguments: argparse.Namespace) -> int:
    """Run a command on the log that its arguments name, and return the exit code (see `reported`)."""

    async def on_source() -> None:
        async with open_source(arguments) as source:
            await command(source, arguments)

    return reported(prog, lambda: asyncio.run(on_source()))


def reported(prog: str, work: Callable[[], None]) -> int:
    """Do a command's work, report an error in one sentence that begins with `prog`, and return the exit code.

    The code is 0 for success, 1 if something does not exist or cannot be read, or 2 for bad usage.
    """
    try:
        work()
    except BrokenPipeError:  # the reader of our output is gone: all commands handle this in the same way
        raise
    except BadUsage as error:
        complain(f"{prog}: {error}")
        return 2
    except (BombusError, OSError, ValueError) as error:
        complain(f"{prog}: {error}")
        return 1
    return 0
