"""`bombus replay episode`: an episode as a person reads it, token by token."""

import argparse
import sys
from pathlib import Path

from bombus.replay.episode.html import page
from bombus.replay.episode.story import tell
from bombus.replay.episode.text import text
from bombus.replay.episode.tree import read_turns
from bombus.replay.running import BadUsage, run_on_source
from bombus.replay.source import Source, add_source_arguments

TOKENS_LISTED = 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_source_arguments(parser)
    parser.add_argument("episode", metavar="ID", help="such as main-1-17; `bombus replay timeline` names them")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write one page that needs nothing else, instead")
    parser.add_argument(
        "--tokens",
        type=int,
        default=TOKENS_LISTED,
        metavar="N",
        help="list so many of each reply (default: %(default)s)",
    )


def run(arguments: argparse.Namespace) -> int:
    return run_on_source("bombus replay episode", _show, arguments)


async def _show(source: Source, arguments: argparse.Namespace) -> None:
    if arguments.tokens < 0:
        raise BadUsage("--tokens is at least 0")
    told = await read_turns(source, await tell(source, arguments.episode))
    if arguments.html is not None:
        arguments.html.write_text(page(told, source.title), encoding="utf-8")
        print(f"{arguments.html}: {len(told.turns)} calls")
        return
    for line in text(told, arguments.tokens, sys.stdout.isatty()):
        print(line)
