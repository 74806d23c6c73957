"""`bombus track`: writes the figures of runs to experiment trackers, each step once."""

import argparse
import os
from contextlib import aclosing
from pathlib import Path

from bombus import logs
from bombus.cli import URL_FILE, add_log_argument, default_nats
from bombus.config.job import Tracker
from bombus.errors import BombusError, in_one_line
from bombus.insight.runs import add_run_argument
from bombus.insight.trackers.adapters import ADAPTERS
from bombus.insight.trackers.filling import fill, follow, write_row
from bombus.insight.trackers.ledger import Ledger
from bombus.insight.trackers.rows import Noted, TrackedRows, tracked
from bombus.machine.process import run_service
from bombus.replay.opening import add_source_arguments
from bombus.replay.running import BadUsage, reported, run_on_source
from bombus.replay.source import Source
from bombus.terminal import say

DESCRIPTION = """Writes a run to an experiment tracker: the figures of each completed step, the job, and sampled
answers. The hive may be running or stopped. A run can be written again and again: a step that the tracker has is not
written twice. With --follow, writes the runs of a running hive whose jobs name trackers, as they train; `bombus up`
does that by itself."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = DESCRIPTION
    add_run_argument(parser)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--to", type=Tracker, choices=list(Tracker), metavar="TRACKER", help=f"one of {', '.join(Tracker)}"
    )
    what.add_argument("--follow", action="store_true", help="write the runs of a hive as their jobs say, until stopped")
    parser.add_argument("--project", metavar="P", default="", help="with --to, another project than the job's")
    parser.add_argument("--name", dest="title", metavar="N", default="", help="with --to, another name for the run")
    parser.add_argument(
        "--folder",
        type=Path,
        metavar="DIR",
        help="where files are written (default: `trackers` in the hive's data folder, or here)",
    )
    add_source_arguments(parser)
    add_log_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    folder = arguments.folder or _default_folder(arguments)
    if arguments.follow:
        return reported("bombus track", lambda: _check_follows(arguments)) or _follow(arguments, folder)

    async def write(source: Source, arguments: argparse.Namespace) -> None:
        state, position = await source.base()
        rows = TrackedRows(state, every=True)
        found: list[Noted] = []
        async with aclosing(source.events(position)) as entries:
            async for entry in entries:
                found += rows.note(entry.seq, entry.event)
        series, end = rows.runs.newest(arguments.name, source.title), await source.end()
        last = [] if source.running else [*rows.evaluations(series, end.time_ns)]
        until = end.seq if last else 0
        ledger = Ledger(folder, tracked(source.hive, series, arguments.project, arguments.title, until))
        try:
            for noted in [each for each in (*found, *last) if each.series is series]:
                await write_row(ledger, source, noted)
            ledger.end()
            say(f"{series.name}: {_fill(ledger, arguments.to)}")
        finally:
            ledger.close()

    return run_on_source("bombus track", write, arguments)


def _fill(ledger: Ledger, tracker: Tracker) -> str:
    if tracker not in ADAPTERS:
        return f"{ledger.folder} has its steps up to {ledger.last}"
    try:
        written = fill(ledger, tracker, ask=True)
    except (BombusError, OSError):
        raise
    except Exception as error:
        raise BombusError(f"{tracker} failed: {in_one_line(error)}") from error
    run = ledger.run
    return f"{written} steps were written to {tracker}, project {run.project}, as {run.name}; files: {ledger.folder}"


def _check_follows(arguments: argparse.Namespace) -> None:
    if arguments.name or arguments.project or arguments.title or arguments.log:
        raise BadUsage("--follow writes all runs of a running hive, as their jobs say: give it --nats and --hive alone")


def _follow(arguments: argparse.Namespace, folder: Path) -> int:
    hive = arguments.hive or os.environ.get("BOMBUS_HIVE", "main")
    logs.configure("track", arguments.log_level, hive=hive)
    running = (arguments.data or URL_FILE.parent) / URL_FILE.name
    url = arguments.nats or (running.read_text().strip() if running.is_file() else default_nats())
    return run_service(follow(url, hive, folder))


def _default_folder(arguments: argparse.Namespace) -> Path:
    is_elsewhere = arguments.log or arguments.nats or os.environ.get("BOMBUS_NATS")
    data: Path = arguments.data or URL_FILE.parent
    return data / "trackers" if data.is_dir() and not is_elsewhere else Path("trackers")
