"""`bombus run-api`: Atropos's trajectory API where its own server has it, kept on a log.

It is a hive of one engine without a trainer or replicas, whose trainer and inference are somebody else's.
"""

import argparse
import os

from bombus import logs
from bombus.cli import add_log_argument
from bombus.commands.deployment import given
from bombus.config.cluster import Cluster, validated_cluster
from bombus.config.flags import add_settings_arguments, check_range, flags_of, name_of
from bombus.config.streams import StreamLimits
from bombus.host.hive_keys import add_key_arguments, keys_for
from bombus.host.layout import Layout, services
from bombus.host.process import run_service
from bombus.host.supervisor import Supervisor
from bombus.terminal import say

PORT = 8_000  # where Atropos's clients look for it
HOST = "127.0.0.1"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--host", metavar="HOST", default=HOST, help="where it listens (default: %(default)s)")
    parser.add_argument("--port", type=int, metavar="PORT", default=PORT, help="its port (default: %(default)s)")
    parser.add_argument(
        "--host-name",
        action="append",
        metavar="NAME",
        help="a name by which clients reach it, once or several times; without a client key, others than localhost and "
        "its address are refused",
    )
    parser.add_argument("--data-dir", metavar="DIR", help="for the log (default: .bombus, in this folder)")
    parser.add_argument("--nats", metavar="URL", help="an external NATS server (default: our own is started)")
    parser.add_argument(
        "--hive", type=name_of("hive"), metavar="NAME", help="the hive's name (default: $BOMBUS_HIVE, or main)"
    )
    parser.add_argument(
        "--engine", type=name_of("engine"), metavar="NAME", default="main", help="its engine (default: %(default)s)"
    )
    parser.add_argument("--gateways", type=int, metavar="N", help="how many gateways, sharing the port (default: 1)")
    parser.add_argument("--dry-run", action="store_true", help="print the commands of all processes, and start none")
    add_settings_arguments(parser, StreamLimits)
    add_key_arguments(parser)
    add_log_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    check_range("--port", arguments.port, 1, 65_535)
    cluster = cluster_of(arguments)
    logs.configure("run-api", arguments.log_level, hive=cluster.hive)
    layout = Layout(
        cluster=cluster,
        log_level=arguments.log_level,
        keys=keys_for(arguments),
        trusted_network=arguments.trusted_network,
    )
    if arguments.dry_run:
        say(*services(layout, cluster.nats or "nats://127.0.0.1:PORT"))
        return 0
    return run_service(Supervisor(layout).run())


def cluster_of(arguments: argparse.Namespace) -> Cluster:
    """Return a cluster of one engine that has neither a trainer nor replicas. Raises `Refused(BAD_CONFIG)`."""
    streams = {field: getattr(arguments, flag[2:].replace("-", "_")) for field, flag in flags_of(StreamLimits).items()}
    return validated_cluster(
        {
            "hive": arguments.hive or os.environ.get("BOMBUS_HIVE", "main"),
            **given(arguments, nats="nats", data_dir="data_dir"),
            "gateway": given(arguments, host="host", port="port", count="gateways", host_names="host_name"),
            "streams": {field: value for field, value in streams.items() if value is not None},
            "engines": {arguments.engine: {}},
        }
    )
