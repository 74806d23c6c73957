"""`python -m bombus_trainer.launcher`: the head of a trainer whose ranks are on several machines.

It runs everything of a hive but the trainer. In mode auto it also runs torchrun for this machine, which is node 0; in
mode connect it prints what to type on every machine. The parts meet on the bus: rank 0 is the trainer.
"""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

from bombus import logs
from bombus.bus import Bus
from bombus.cli import URL_FILE
from bombus.cluster import (
    PROCESSES_MAX,
    Cluster,
    EnginePart,
    GatewayPart,
    InferencePart,
    Jobs,
    TrainerPart,
    agreed,
    is_cluster,
    read_cluster,
)
from bombus.errors import BusUnavailable, Code, Refused
from bombus.flags import Parser, check_range, made_of_flags, name_of
from bombus.follow import Follower
from bombus.hive_keys import add_key_arguments, keys_for
from bombus.job import parse_job, read_job_file
from bombus.layout import Layout, Meeting, check_can_start
from bombus.process import run_service
from bombus.supervisor import Supervisor

AUTO, CONNECT = "auto", "connect"
NODES_MAX = 4096
TIMEOUT_S_MAX = 86_400
POLL_S = 0.2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--mode",
        choices=(AUTO, CONNECT),
        default=AUTO,
        help="auto runs the ranks of this machine, node 0; connect prints the commands for all (default: %(default)s)",
    )
    parser.add_argument("--config", type=Path, metavar="FILE.yaml", help="a cluster file, or the job to start with")
    parser.add_argument("--nnodes", type=int, default=1, metavar="N", help="machines (default: %(default)s)")
    parser.add_argument(
        "--nproc-per-node", type=int, default=1, metavar="N", help="ranks of each (default: %(default)s)"
    )
    parser.add_argument("--master-addr", default="127.0.0.1", metavar="HOST", help="node 0 (default: %(default)s)")
    parser.add_argument(
        "--master-port",
        type=int,
        default=29500,
        metavar="PORT",
        help="of node 0, where ranks meet (default: %(default)s)",
    )
    parser.add_argument(
        "--operation-timeout",
        type=float,
        default=1800.0,
        metavar="SECONDS",
        help="how long ranks wait for each other (default: %(default)s)",
    )
    parser.add_argument(
        "--log-level",
        type=str.lower,
        choices=("debug", "info", "warning", "error"),
        default="info",
        help="the least that is logged, to stderr (default: %(default)s)",
    )
    parser.add_argument(
        "--api-host", default="127.0.0.1", metavar="HOST", help="where the gateway listens (default: %(default)s)"
    )
    parser.add_argument(
        "--api-port", type=int, default=10086, metavar="PORT", help="of the gateway (default: %(default)s)"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="of the ranks (default: %(default)s)")
    parser.add_argument(
        "--threads",
        type=int,
        default=0,
        metavar="N",
        help="of torch on the CPU; 0: torchrun's choice (default: %(default)s)",
    )
    parser.add_argument(
        "--engine", type=name_of("engine"), default="main", help="the engine that is trained (default: %(default)s)"
    )
    parser.add_argument(
        "--hive", type=name_of("hive"), metavar="NAME", help="the hive's name (default: the cluster file's, or main)"
    )
    parser.add_argument("--nats", metavar="URL", help="an external NATS server (default: our own, for this machine)")
    parser.add_argument("--data-dir", metavar="DIR", help="a folder that all machines share (default: .bombus)")
    add_key_arguments(parser)


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="bombus_trainer.launcher", description=__doc__)
    add_arguments(parser)
    arguments = parser.parse_args(argv)
    arguments.host = arguments.api_host
    try:
        layout = layout_of(arguments)
        if arguments.mode == AUTO:
            check_can_start(layout)
    except Refused as error:
        print(f"bombus_trainer.launcher: {error.why}", file=sys.stderr)
        return 2
    logs.configure("launcher", arguments.log_level, hive=layout.cluster.hive)
    return run_service(run(layout, arguments))


def layout_of(arguments: argparse.Namespace) -> Layout:
    """What this machine runs. Raises `Refused(BAD_CONFIG)`."""
    for name, most in (("nnodes", NODES_MAX), ("nproc_per_node", PROCESSES_MAX), ("master_port", 65_535)):
        check_range(f"--{name.replace('_', '-')}", getattr(arguments, name), 1, most)
    check_range("--operation-timeout", arguments.operation_timeout, 1, TIMEOUT_S_MAX)
    tree = read_job_file(arguments.config) if arguments.config is not None else {}
    jobs: Jobs = {}
    if is_cluster(tree):
        cluster, jobs = read_cluster(tree, arguments.config.parent)
    else:
        cluster = Cluster(engines={arguments.engine: EnginePart(inference=(InferencePart(),))})
        jobs = {arguments.engine: parse_job(tree)} if arguments.config is not None else {}
    if arguments.engine not in cluster.engines:
        names = ", ".join(cluster.engines)
        raise Refused(Code.BAD_CONFIG, f"--engine {arguments.engine} is none of the file's engines: {names}")
    asked = {"backend": "verl", "device": arguments.device, "threads": arguments.threads}
    trainer = made_of_flags(TrainerPart, asked, {})
    cluster, jobs = agreed(_with_trainer(cluster, arguments.engine, trainer), jobs)
    here = trainer.model_copy(update={"processes": arguments.nproc_per_node}) if arguments.mode == AUTO else None
    cluster = _with_trainer(cluster, arguments.engine, here)
    asked = {"host": arguments.api_host, "port": arguments.api_port, "count": cluster.gateway.count}
    door = made_of_flags(GatewayPart, asked, {"host": "--api-host", "port": "--api-port"})
    said = {"hive": arguments.hive, "nats": arguments.nats, "data_dir": arguments.data_dir}
    changes = {"gateway": door, **{name: value for name, value in said.items() if value is not None}}
    return Layout(
        cluster=cluster.model_copy(update=changes),
        jobs=jobs,
        log_level=arguments.log_level,
        keys=keys_for(arguments),
        trusted_network=arguments.trusted_network,
        meeting=Meeting(
            nnodes=arguments.nnodes,
            address=arguments.master_addr,
            port=arguments.master_port,
            operation_timeout_s=arguments.operation_timeout,
        ),
    )


def _with_trainer(cluster: Cluster, engine: str, trainer: TrainerPart | None) -> Cluster:
    changed = cluster.engines[engine].model_copy(update={"trainer": trainer})
    return cluster.model_copy(update={"engines": {**cluster.engines, engine: changed}})


def worker_line(layout: Layout, arguments: argparse.Namespace, nats: str, node: str) -> str:
    """What to type on the machine of that number."""
    assert layout.meeting is not None
    cluster = layout.cluster
    words = ["torchrun", *layout.meeting.torchrun(node, arguments.nproc_per_node), "-m", "bombus_trainer.worker"]
    words += ["--nats", nats, "--hive", cluster.hive, "--engine", arguments.engine]
    words += ["--folder", str((layout.data_dir / "engines").absolute()), "--device", arguments.device]
    words += ["--threads", str(arguments.threads)] if arguments.threads else []
    return " ".join([*words, "--operation-timeout", f"{layout.meeting.operation_timeout_s:g}"])


async def run(layout: Layout, arguments: argparse.Namespace) -> None:
    (layout.data_dir / URL_FILE.name).unlink(missing_ok=True)  # of one that was killed
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(Supervisor(layout).run())
        tasks.create_task(_introduce(layout, arguments))


async def _introduce(layout: Layout, arguments: argparse.Namespace) -> None:
    """Say what to type elsewhere, and when the trainer has come."""
    nats = layout.cluster.nats or await _own_bus(layout.data_dir / URL_FILE.name)
    elsewhere = range(1, arguments.nnodes) if arguments.mode == AUTO else range(arguments.nnodes)
    if elsewhere:
        print("in verl's environment (`bombus install verl`) of each machine, type:", flush=True)
    for node in elsewhere:
        print(worker_line(layout, arguments, nats, str(node)), flush=True)
    if arguments.mode == CONNECT and not layout.cluster.nats:
        print("node 0 talks to the bus, which listens on this machine alone: run it here, or give --nats", flush=True)
    async with await _connected(nats, layout.cluster.hive) as bus:
        await bus.ensure_streams()
        follower = Follower(bus)
        following = asyncio.create_task(follower.run())
        try:
            ranks = arguments.nnodes * arguments.nproc_per_node
            waited = f"{ranks} ranks on {arguments.nnodes} machines" if arguments.nnodes > 1 else f"{ranks} ranks"
            told = "" if layout.jobs else ", once a job is started"
            print(f"waiting for the trainer of engine {arguments.engine}: {waited}{told}", flush=True)
            await follower.caught_up(None)
            known = follower.hive.engine(arguments.engine).trainer_epoch
            await follower.wait_for(lambda hive: hive.engine(arguments.engine).trainer_epoch != known)
            print(f"the trainer of engine {arguments.engine} is there", flush=True)
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)


async def _own_bus(url_file: Path) -> str:
    """The supervisor writes down where its server listens."""
    while not await asyncio.to_thread(url_file.is_file):
        await asyncio.sleep(POLL_S)
    return url_file.read_text().strip()


async def _connected(nats: str, hive: str) -> Bus:
    while True:
        try:
            return await Bus.connect(nats, hive, name="launcher")
        except BusUnavailable:
            await asyncio.sleep(POLL_S)


if __name__ == "__main__":
    sys.exit(main())
