"""`bombus log`: export, import, check and compact a log."""

import argparse
import asyncio
import time
from pathlib import Path

from bombus.bus import Bus
from bombus.config.flags import add_settings_arguments, settings_from
from bombus.config.streams import StreamLimits
from bombus.figures import byte_size
from bombus.hive.levels import LEVEL
from bombus.replay import upkeep
from bombus.replay.archive import FileSource
from bombus.replay.export import export
from bombus.replay.importing import import_log
from bombus.replay.opening import add_source_arguments
from bombus.replay.running import BadUsage, reported, run_on_source
from bombus.replay.source import BusSource, Source
from bombus.terminal import complain, say

PROGRESS_S = 2.0
LOST_SHOWN = 8  # the most lost rollout groups that are listed
IMPORT_EPILOG = """example:
  bombus log export monday.bombuslog --data /srv/hive     # while the hive runs, or after it was stopped
  cp -a /srv/hive/engines monday-engines                  # checkpoints and weights, which are not in the log

  bombus log import monday.bombuslog --data /srv/hive     # on another machine, or after the folder was lost
  cp -a monday-engines /srv/hive/engines
  bombus up --data-dir /srv/hive                          # its run continues"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    subcommands = parser.add_subparsers(dest="subcommand", required=True, metavar="subcommand")
    exporting = subcommands.add_parser("export", help="write the log to one file, for `bombus replay --log`")
    exporting.add_argument("file", type=Path, help="the file to write; it appears once it is complete")
    exporting.add_argument(
        "--no-calls", action="store_true", help="write the events only: no prompts, tokens or replies"
    )
    add_source_arguments(exporting)
    importing = subcommands.add_parser(
        "import",
        help="create a hive from an exported log, in a data folder that has none",
        epilog=IMPORT_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    importing.add_argument("file", type=Path, help="a file that `bombus log export` has written")
    importing.add_argument(
        "--data",
        type=Path,
        required=True,
        metavar="DIR",
        help="the data folder of the new hive; it is created if missing",
    )
    add_settings_arguments(importing, StreamLimits)
    checking = subcommands.add_parser(
        "check", help="say whether this release can read and continue a log: check every event, snapshot and reference"
    )
    add_source_arguments(checking)
    compacting = subcommands.add_parser(
        "compact", help="check the two newest snapshots, and remove the events before the older one"
    )
    add_source_arguments(compacting)


def run(arguments: argparse.Namespace) -> int:
    if arguments.subcommand == "import":
        limits = settings_from(StreamLimits, arguments)
        return reported("bombus log import", lambda: asyncio.run(_import(arguments.file, arguments.data, limits)))
    command = {"export": _export, "check": _check, "compact": _compact}[arguments.subcommand]
    return run_on_source(f"bombus log {arguments.subcommand}", command, arguments)


# ---- check and compact --------------------------------------------------------------------------------------------


async def _check(source: Source, arguments: argparse.Namespace) -> None:
    checked = await upkeep.check(source, _Progress())
    events = checked.last - checked.first + 1
    epochs = f"{checked.epochs} epoch{'s' * (checked.epochs != 1)}"
    say(f"{source.title}: {events:,} events from {checked.first:,} to {checked.last:,}, {epochs}")
    if checked.level == LEVEL:
        say(f"  feature level {LEVEL}, which is this release's: releases of an older level refuse it")
    else:
        say(
            f"  feature level {checked.level}: this release can continue it, and be rolled back, until "
            f"`bombus up --raise-level` raises it to {LEVEL}"
        )
    for position in checked.agreed:
        say(f"  the snapshot at event {position:,} is the fold of the events before it")
    for position in checked.other_fold:
        say(f"  the snapshot at event {position:,} was made by another version and was not compared")
    say(f"  {checked.calls:,} calls of open episodes, the pool and the outstanding batch match their references")
    if checked.bodies:
        say(f"  {checked.bodies:,} bodies and results of training operations match their references")
    if checked.groups:
        say(f"  {checked.groups - len(checked.lost):,} rollout groups are present, {len(checked.lost):,} are lost")
    for lost in checked.lost[:LOST_SHOWN]:
        say(f"    {lost}; it is dropped when a batch would use it")


async def _compact(source: Source, arguments: argparse.Namespace) -> None:
    removed = await upkeep.compact(_bus_of(source))
    say(f"{source.title}: removed {removed:,} events, which can no longer be replayed")


def _bus_of(source: Source) -> Bus:
    if not isinstance(source, BusSource):
        raise BadUsage("an archive has no snapshots: name a hive with --nats or --data")
    return source.bus


# ---- export -------------------------------------------------------------------------------------------------------


async def _export(source: Source, arguments: argparse.Namespace) -> None:
    path: Path = arguments.file
    if path.exists() or not path.absolute().parent.is_dir():
        raise BadUsage(f"{path} exists" if path.exists() else f"there is no folder {path.parent}")
    kept = await export(source, path, with_calls=not arguments.no_calls, progress=_Progress())
    say(f"{path}: {kept.events:,} events, {kept.calls:,} calls, {byte_size(path.stat().st_size)}")
    if kept.calls_gone:
        say(f"{kept.calls_gone:,} calls are no longer kept by the hive: the file does not have their tokens")
    if kept.groups:
        say(
            f"{kept.groups:,} rollout groups were pushed: the file records which batches took them, but has tokens "
            "only for groups that may still be trained on"
        )


# ---- import -------------------------------------------------------------------------------------------------------


async def _import(path: Path, data: Path, limits: StreamLimits) -> None:
    progress = _Progress()
    with FileSource.open(path) as source:
        found = await import_log(source, data, limits, progress.note)
        named = "" if source.hive == "main" else f" --hive {source.hive}"
    say(f"{data}: imported {found.last - found.first + 1:,} events and {found.calls:,} calls that are still needed")
    if not (data / "engines").exists():
        say(
            f"checkpoints and weights are not in a log: copy them from the old data folder to {data / 'engines'}. "
            "The log names weights by their paths, so the new data folder must be where the old one was"
        )
    say(f"continue with `bombus up --data-dir {data}{named}`")


class _Progress:
    """Reports progress every few seconds while processing a log takes that long."""

    def __init__(self) -> None:
        self._next = time.monotonic() + PROGRESS_S

    def __call__(self, position: int, end: int) -> None:
        self.note("event", position, end)

    def note(self, what: str, position: int, end: int) -> None:
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + PROGRESS_S
            complain(f"{what} {position:,} of {end:,}")
