"""`bombus replay episode`: an episode in readable form, token by token."""

import argparse
import sys
from pathlib import Path

from bombus.hive.episodes import without_secret
from bombus.replay.episode.html import page
from bombus.replay.episode.story import read_story
from bombus.replay.episode.text import text
from bombus.replay.episode.tree import read_transcript
from bombus.replay.opening import add_source_arguments
from bombus.replay.running import BadUsage, run_on_source
from bombus.replay.source import Source
from bombus.terminal import say

TOKENS_LISTED = 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_source_arguments(parser)
    parser.add_argument("episode", metavar="ID", help="such as main-1-17; `bombus replay timeline` names them")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write one self-contained HTML page instead")
    parser.add_argument(
        "--prompt",
        action="store_true",
        help="show the whole prompt of each call as the model saw it, with special tokens in ⟦⟧",
    )
    parser.add_argument(
        "--tokens",
        type=int,
        default=TOKENS_LISTED,
        metavar="N",
        help="list at most N tokens of each reply (default: %(default)s)",
    )


def run(arguments: argparse.Namespace) -> int:
    return run_on_source("bombus replay episode", _show, arguments)


async def _show(source: Source, arguments: argparse.Namespace) -> None:
    if arguments.tokens < 0:
        raise BadUsage("--tokens must be at least 0")
    if arguments.prompt and arguments.html is not None:
        raise BadUsage("--prompt is for the terminal: the page has the text of each prompt's tokens already")
    transcript = await read_transcript(
        source, await read_story(source, without_secret(arguments.episode)), arguments.prompt
    )
    if arguments.html is not None:
        arguments.html.write_text(page(transcript, source.title), encoding="utf-8")
        say(f"{arguments.html}: {len(transcript.turns)} calls")
        return
    colour = sys.stdout.isatty()
    for line in text(transcript, arguments.tokens, colour):
        say(line, styled=colour)
