"""`bombus run-api`: serves Atropos's trajectory API on the port that Atropos's own server uses, backed by a log.

It runs a hive of one engine without a trainer or replicas; training and inference are external.
"""

import argparse
import os

from bombus import logs
from bombus.cli import add_engine_argument, add_log_argument
from bombus.commands.deployment import HIVE_FLAGS, PROCESS_FLAGS, check_counts
from bombus.config.cluster import Cluster, validated_cluster
from bombus.config.flags import Flag
from bombus.config.overrides import STREAM_FLAGS, Overrides, add_overrides, typed_overrides
from bombus.host.layout import Layout, services
from bombus.host.supervisor import Supervisor
from bombus.machine.hive_keys import add_key_arguments, keys_for
from bombus.machine.process import run_service
from bombus.terminal import say

PORT = 8_000  # the port that Atropos's clients use by default


FLAGS: Overrides = {
    "gateway.host": Flag(help="where it listens"),
    "gateway.port": Flag(help="its port", default=str(PORT)),
    "gateway.host_names": Flag(
        help="a name by which clients reach it (repeatable); without a client key, names other than "
        "localhost and its address are refused",
    ),
    "data_dir": Flag(metavar="DIR", help="for the log", default=".bombus, in this folder"),
    "nats": HIVE_FLAGS["nats"],
    "hive": HIVE_FLAGS["hive"],
}
COUNT: Overrides = {"gateway.count": PROCESS_FLAGS["gateway.count"]}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_overrides(parser, FLAGS)
    add_engine_argument(parser, "its engine")
    add_overrides(parser, COUNT)
    parser.add_argument("--dry-run", action="store_true", help="print all processes' commands without starting them")
    add_overrides(parser, STREAM_FLAGS)
    add_key_arguments(parser)
    add_log_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    check_counts(arguments, {"port": 65_535})
    cluster = cluster_of(arguments)
    arguments.host = cluster.gateway.host
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
    typed = typed_overrides(arguments, {**FLAGS, **COUNT, **STREAM_FLAGS})
    return validated_cluster(
        {
            "hive": os.environ.get("BOMBUS_HIVE", "main"),
            **typed[""],
            "gateway": {"port": PORT, **typed["gateway"]},
            "streams": typed["streams"],
            "engines": {arguments.engine: {}},
        }
    )
