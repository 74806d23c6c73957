"""`bombus coordinator`: run one coordinator."""

import argparse
from pathlib import Path

from bombus import logs
from bombus.cli import add_hive_arguments
from bombus.config.flags import add_settings_arguments, settings_from
from bombus.config.parts import LogOptions, MetricsOptions
from bombus.config.streams import StreamLimits
from bombus.errors import Code, Refused
from bombus.machine.process import run_service
from bombus_coordinator import shell
from bombus_coordinator.compaction import Compaction
from bombus_coordinator.shell import Housekeeping


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_hive_arguments(parser)
    parser.add_argument(
        "--name",
        default="",
        metavar="NAME",
        help="this coordinator's name; restarted under the same name, it leads again at once (default: a new name)",
    )
    parser.add_argument(
        "--watch-disk",
        type=Path,
        metavar="DIR",
        help="the bus's data folder: new work is refused while its disk is nearly full (default: none)",
    )
    add_settings_arguments(parser, LogOptions)
    add_settings_arguments(parser, StreamLimits)
    add_settings_arguments(parser, MetricsOptions)


def run(arguments: argparse.Namespace) -> int:
    disk: Path | None = arguments.watch_disk
    if disk is not None and not disk.is_dir():
        raise Refused(Code.BAD_CONFIG, f"--watch-disk {disk}: there is no such folder")
    limits = settings_from(StreamLimits, arguments)
    logs.configure("coordinator", arguments.log_level, hive=arguments.hive)
    options = settings_from(LogOptions, arguments)
    archive = Path(options.archive).absolute() if options.archive else None
    compaction = Compaction(url=arguments.nats, archive=archive) if options.compact else None
    metrics = settings_from(MetricsOptions, arguments)
    upkeep = Housekeeping(disk=disk, compaction=compaction, metrics=metrics, raise_level=options.raise_level)
    return run_service(shell.run(arguments.nats, arguments.hive, arguments.name, upkeep, limits))
