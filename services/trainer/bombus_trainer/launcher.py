"""`python -m bombus_trainer.launcher`: start a hive whose trainer has ranks on several machines.

It runs all processes of a hive except the trainer. In mode auto, it also runs torchrun on this machine, as node 0, and
prints the command for each other machine; in mode connect, it prints the commands for all machines. Rank 0 is the
trainer on the bus, and the other ranks follow it.
"""

import argparse
import asyncio
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from bombus import logs
from bombus.bus import Bus
from bombus.bus.follow import Follower
from bombus.bus_address import VARIABLE, has_login
from bombus.cli import URL_FILE, add_engine_argument
from bombus.commands.deployment import (
    TRAINER_FLAGS,
    check_counts,
    check_engine,
    document,
    put_over,
    tell_ignored,
)
from bombus.config.cluster import reconcile, validated_cluster
from bombus.config.documents import Tree
from bombus.config.flags import Flag, Parser, check_range, name_of
from bombus.config.overrides import Overrides, add_overrides, flag_of, typed_overrides
from bombus.config.parts import PROCESSES_MAX, TrainerPart
from bombus.config.placement import check_placement
from bombus.errors import BusUnavailable, Code, Refused
from bombus.host.layout import Layout, Rendezvous, check_can_start, trainer_arguments
from bombus.host.supervisor import Supervisor
from bombus.machine.hive_keys import add_key_arguments, keys_for
from bombus.machine.process import run_service
from bombus.terminal import complain, say

AUTO, CONNECT = "auto", "connect"
NODES_MAX = 4096
TIMEOUT_S_MAX = 86_400
POLL_S = 0.2
RANK_FLAGS: Overrides = {
    "trainer.processes": Flag(
        name="--nproc-per-node",
        metavar="N",
        help="ranks on each machine",
        default="the cluster file's processes, or those of the job, or 1",
    )
}
MACHINE_FLAGS: Overrides = {
    "gateway.host": Flag(
        name="--api-host", metavar="HOST", help="the gateway's address", default="the cluster file's, or 127.0.0.1"
    ),
    "gateway.port": Flag(
        name="--api-port",
        metavar="PORT",
        help="the gateway's port; 0: any free port, which is printed",
        default="the cluster file's, or 10086",
    ),
    "trainer.device": Flag(choices=("cpu", "cuda"), help="the ranks' device", default="the cluster file's, or cpu"),
    "trainer.threads": Flag(
        metavar="N",
        help="threads of torch on the CPU; 0: torchrun's choice",
        default="the cluster file's, or 0",
    ),
    **TRAINER_FLAGS,
}
HIVE_FLAGS: Overrides = {
    "hive": Flag(metavar="NAME", help="the hive's name", default="the cluster file's, or main", read=name_of("hive")),
    "nats": Flag(metavar="URL", help="an external NATS server", default="one that it starts, for this machine only"),
    "data_dir": Flag(metavar="DIR", help="a folder that all machines share"),
}
FLAGS = {**RANK_FLAGS, **MACHINE_FLAGS, **HIVE_FLAGS}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--mode",
        choices=(AUTO, CONNECT),
        default=AUTO,
        help="auto runs this machine's ranks, as node 0; connect prints the commands for all (default: %(default)s)",
    )
    parser.add_argument("--config", type=Path, metavar="FILE.yaml", help="a cluster file, or the job to start with")
    parser.add_argument("--nnodes", type=int, default=1, metavar="N", help="how many machines (default: %(default)s)")
    add_overrides(parser, RANK_FLAGS)
    parser.add_argument(
        "--master-addr", default="127.0.0.1", metavar="HOST", help="address of node 0 (default: %(default)s)"
    )
    parser.add_argument(
        "--master-port",
        type=int,
        default=29500,
        metavar="PORT",
        help="port of node 0, where ranks meet (default: %(default)s)",
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
        help="the lowest level that is logged, to stderr (default: %(default)s)",
    )
    add_overrides(parser, MACHINE_FLAGS)
    parser.add_argument(
        "--debug-root",
        type=Path,
        metavar="DIR",
        help="folder below which jobs may write debug rollout data (default: only below the folder of their run)",
    )
    add_engine_argument(parser, "the engine to train")
    add_overrides(parser, HIVE_FLAGS)
    add_key_arguments(parser)


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="bombus_trainer.launcher", description=__doc__)
    add_arguments(parser)
    arguments = parser.parse_args(argv)
    try:
        layout, trainer = layout_of(arguments)
        check_can_start(layout)
    except Refused as error:
        complain(f"bombus_trainer.launcher: {error.why}")
        return 2
    logs.configure("launcher", arguments.log_level, hive=layout.cluster.hive)
    tell_ignored(layout.jobs)
    return run_service(run(layout, trainer, arguments))


def layout_of(arguments: argparse.Namespace) -> tuple[Layout, TrainerPart]:
    """Return this machine's layout, and the trainer's configuration, which is the same on every machine. Raises
    `Refused(BAD_CONFIG)` if the arguments or the document are invalid."""
    check_counts(arguments, {"nnodes": NODES_MAX, "nproc_per_node": PROCESSES_MAX, "master_port": 65_535})
    check_range("--operation-timeout", arguments.operation_timeout, 1, TIMEOUT_S_MAX)
    name = arguments.engine
    plain, jobs = document(arguments.config, [name], {"inference": [{}]})
    check_engine(name, plain["engines"])
    described = validated_cluster(_with_flags(plain, arguments), flag_of(arguments, FLAGS))
    cluster, jobs = reconcile(described, jobs, {name: arguments.nnodes})
    engine = cluster.engines[name]
    trainer = engine.trainer
    assert trainer is not None  # set from the flags
    if trainer.backend != "verl":
        raise Refused(Code.BAD_CONFIG, f"engines.{name}.trainer.backend is {trainer.backend}, but must be verl")
    if arguments.mode == CONNECT:
        engines = {**cluster.engines, name: engine.model_copy(update={"trainer": None})}
        cluster = cluster.model_copy(update={"engines": engines})
    check_placement(cluster)
    arguments.host = cluster.gateway.host
    layout = Layout(
        cluster=cluster,
        jobs=jobs,
        debug_root=arguments.debug_root,
        log_level=arguments.log_level,
        keys=keys_for(arguments),
        trusted_network=arguments.trusted_network,
        rendezvous=Rendezvous(
            nnodes=arguments.nnodes,
            address=arguments.master_addr,
            port=arguments.master_port,
            operation_timeout_s=arguments.operation_timeout,
        ),
    )
    return layout, trainer


def _with_flags(plain: Tree, arguments: argparse.Namespace) -> Tree:
    """Return the document, with its values for the trainer, the gateway and the hive overridden by those given as
    flags."""
    typed = typed_overrides(arguments, FLAGS)
    engine = plain["engines"][arguments.engine]
    trainer = put_over({"backend": "verl", **(engine.get("trainer") or {})}, typed["trainer"])
    return {
        **plain,
        **typed[""],
        "gateway": {**plain.get("gateway", {}), **typed["gateway"]},
        "engines": {**plain["engines"], arguments.engine: {**engine, "trainer": trainer}},
    }


def worker_line(layout: Layout, trainer: TrainerPart, engine: str, nats: str, node: int) -> str:
    """Return the command to type on machine number `node`."""
    assert layout.rendezvous is not None
    gpus = [f"CUDA_VISIBLE_DEVICES={','.join(map(str, trainer.devices))}"] if trainer.devices else []
    own = shlex.join(["cat", str(_url_file(layout).absolute())])
    address = f"${VARIABLE}" if layout.cluster.nats else f"$({own})"
    bus = [f'{VARIABLE}="{address}"'] if has_login(nats) else []
    words = ["torchrun", *layout.rendezvous.torchrun(str(node), trainer.processes), "-m", "bombus_trainer.worker"]
    return " ".join([*bus, *gpus, shlex.join([*words, *trainer_arguments(trainer, engine, layout, nats)])])


async def run(layout: Layout, trainer: TrainerPart, arguments: argparse.Namespace) -> None:
    _url_file(layout).unlink(missing_ok=True)  # may be left over from a launcher that was killed
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(Supervisor(layout).run())
        tasks.create_task(_introduce(layout, trainer, arguments))


async def _introduce(layout: Layout, trainer: TrainerPart, arguments: argparse.Namespace) -> None:
    """Print the commands to run on each machine, and report when the trainer is ready."""
    nats = layout.cluster.nats or await _own_bus(_url_file(layout))
    elsewhere = range(1, arguments.nnodes) if arguments.mode == AUTO else range(arguments.nnodes)
    if elsewhere:
        say("run on each machine, in verl's environment (`bombus install verl`):", flush=True)
        if layout.cluster.nats and has_login(nats):
            say(f"(first set {VARIABLE} to the address of the bus, which contains a password)", flush=True)
    for node in elsewhere:
        say(worker_line(layout, trainer, arguments.engine, nats, node), flush=True)
    if arguments.mode == CONNECT and not layout.cluster.nats:
        say("node 0 needs the bus, which listens only on this machine: run node 0 here, or pass --nats", flush=True)
    async with await _connected(nats, layout.cluster.hive) as bus:
        await bus.until_streams_exist()
        follower = Follower(bus)
        following = asyncio.create_task(follower.run())
        try:
            ranks = arguments.nnodes * trainer.processes
            expected = f"{ranks} ranks on {arguments.nnodes} machines" if arguments.nnodes > 1 else f"{ranks} ranks"
            when = "" if layout.jobs else ", once a job is started"
            say(f"waiting for the trainer of engine {arguments.engine}: {expected}{when}", flush=True)
            await follower.caught_up(None)
            before = follower.hive.engine(arguments.engine).trainer_epoch
            await follower.wait_for(lambda hive: hive.engine(arguments.engine).trainer_epoch != before)
            say(f"the trainer of engine {arguments.engine} is ready", flush=True)
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)


def _url_file(layout: Layout) -> Path:
    """Return the file to which the supervisor writes the address of its NATS server."""
    return layout.data_dir / URL_FILE.name


async def _own_bus(url_file: Path) -> str:
    """Wait until the supervisor has written the address of its NATS server, and return it."""
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
