"""`bombus replay state`: what the hive was doing at a position of its log."""

import argparse

from bombus.hive.status.data import status_dict
from bombus.hive.status.text import render_status
from bombus.replay.moments import clock, date
from bombus.replay.opening import add_source_arguments
from bombus.replay.running import run_on_source
from bombus.replay.source import Source, state_at
from bombus.terminal import say, say_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_source_arguments(parser)
    parser.add_argument("--at", type=int, metavar="SEQ", help="the state after this event (default: the last)")
    parser.add_argument("--engine", default="", metavar="NAME", help="only this engine (default: all)")
    parser.add_argument("--json", action="store_true", help="print it as JSON, for programs")


def run(arguments: argparse.Namespace) -> int:
    return run_on_source("bombus replay state", _show, arguments)


async def _show(source: Source, arguments: argparse.Namespace) -> None:
    seq = (await source.end()).seq if arguments.at is None else arguments.at
    hive = await state_at(source, seq)
    if arguments.json:
        say_json({"seq": seq, **status_dict(hive)})
        return
    when = f", {date(hive.now_ns)} {clock(hive.now_ns)}" if hive.now_ns else ""
    say(f"after event {seq}{when}, epoch {hive.epoch}", "", *render_status(hive, arguments.engine).splitlines())
