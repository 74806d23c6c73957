"""What the subcommands of `bombus replay` share: a log is opened, work is done on it, trouble is told in a sentence."""

import argparse
import asyncio
import os
import sys
from collections.abc import Awaitable, Callable

from bombus.errors import BombusError
from bombus.replay.source import Source, open_source

Work = Callable[[Source, argparse.Namespace], Awaitable[None]]


class BadUsage(ValueError):
    """The command line makes no sense; the sentence says what would."""


def run_on_source(command: str, work: Work, arguments: argparse.Namespace) -> int:
    """The exit code: 0, 1 when something is not there or cannot be read, 2 for bad usage."""

    async def on_source() -> None:
        async with open_source(arguments) as source:
            await work(source, arguments)

    try:
        asyncio.run(on_source())
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of our output (`head`) has enough; nothing more is to be said to it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except BadUsage as error:
        print(f"{command}: {error}", file=sys.stderr)
        return 2
    except (BombusError, OSError, ValueError) as error:
        print(f"{command}: {error}", file=sys.stderr)
        return 1
    return 0
