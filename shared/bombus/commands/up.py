"""`bombus up`: a whole hive on this machine, under one supervisor."""

import argparse
import os
import sys
from pathlib import Path

from bombus import logs
from bombus.cli import add_log_argument
from bombus.errors import Refused
from bombus.hive_keys import add_key_arguments, keys_for
from bombus.job import parse_job
from bombus.process import run_service
from bombus.subjects import check_name
from bombus.supervisor import Layout, Supervisor

PROCESSES_MAX = 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--host", default="127.0.0.1", help="where the gateway listens (default: %(default)s)")
    parser.add_argument("--port", "--swarm-port", type=int, default=10086, help="of the gateway (default: %(default)s)")
    parser.add_argument(
        "--data-dir", type=Path, default=Path(".bombus"), help="the log, checkpoints and weights (default: %(default)s)"
    )
    parser.add_argument("--nats", metavar="URL", default="", help="an external NATS server instead of our own")
    parser.add_argument("--nats-port", type=int, default=0, help="of our own NATS server; 0: a free one")
    parser.add_argument("--hive", default=os.environ.get("BOMBUS_HIVE", "main"), help="its name (default: %(default)s)")
    parser.add_argument("--engine", action="append", metavar="NAME", help="may be given several times (default: main)")
    parser.add_argument("--gateways", type=_count, default=1, metavar="N", help="they share the port (default: 1)")
    parser.add_argument("--coordinators", type=_count, default=1, metavar="N", help="one leads (default: 1)")
    parser.add_argument("--replicas", type=_count, default=1, metavar="N", help="of each engine (default: 1)")
    parser.add_argument("--config", type=Path, metavar="JOB.yaml", help="configure and start the engine with this job")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=0, help="of torch on the CPU; 0: one for each core")
    parser.add_argument(
        "--debug-root", type=Path, metavar="DIR", help="where jobs may name files for save_debug_rollout_data"
    )
    add_key_arguments(parser)
    add_log_argument(parser)


def _count(text: str) -> int:
    count = int(text)
    if not 1 <= count <= PROCESSES_MAX:
        raise argparse.ArgumentTypeError(f"{count} is not between 1 and {PROCESSES_MAX}")
    return count


def run(arguments: argparse.Namespace) -> int:
    logs.configure("up", arguments.log_level, hive=arguments.hive)
    try:
        check_name(arguments.hive, "hive")
        engines = tuple(check_name(name, "engine") for name in arguments.engine or ["main"])
        keys = keys_for(arguments)
        if arguments.config is not None:
            parse_job(arguments.config.read_text())
    except (ValueError, OSError, Refused) as error:
        print(f"bombus up: {error}", file=sys.stderr)
        return 2
    layout = Layout(
        host=arguments.host,
        port=arguments.port,
        data_dir=arguments.data_dir,
        nats=arguments.nats,
        nats_port=arguments.nats_port,
        hive=arguments.hive,
        engines=engines,
        gateways=arguments.gateways,
        coordinators=arguments.coordinators,
        replicas=arguments.replicas,
        config=arguments.config,
        device=arguments.device,
        debug_root=arguments.debug_root,
        threads=arguments.threads,
        log_level=arguments.log_level,
        keys=keys,
        trusted_network=arguments.trusted_network,
    )
    return run_service(Supervisor(layout).run())
