"""`bombus deploy start`: starts the jobs of a cluster file on a hive whose services run elsewhere, as in containers."""

import argparse
import asyncio
import logging
from pathlib import Path

from bombus import logs
from bombus.bus import Bus
from bombus.cli import add_log_argument, default_nats
from bombus.commands.deployment import bus_address, cluster_in
from bombus.config.cluster import Jobs
from bombus.errors import BombusError, Refused
from bombus.host.supervisor import start_job
from bombus.terminal import complain

log = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, metavar="FILE.yaml", required=True, help="a cluster file")
    add_log_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    cluster, jobs = cluster_in(arguments.config)
    nats = bus_address(cluster.nats) or default_nats()
    logs.configure("start", arguments.log_level, hive=cluster.hive)
    try:
        asyncio.run(_start(nats, cluster.hive, jobs))
    except BombusError as error:
        complain(f"bombus deploy start: {error}")
        return 1
    return 0


async def _start(nats: str, hive: str, jobs: Jobs) -> None:
    async with await Bus.connect(nats, hive, name="start") as bus:
        await bus.until_streams_exist()
        for engine, job in jobs.items():
            try:
                await start_job(bus, engine, job)
            except Refused as refusal:  # such as an engine that runs already
                log.warning("the job was not started: %s", refusal.why, extra={"engine": engine})
