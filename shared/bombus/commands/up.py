"""`bombus up`: starts a whole hive on this machine, under one supervisor."""

import argparse
import logging
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from bombus import logs
from bombus.bus_address import VARIABLE, BusUser, has_login
from bombus.cli import add_log_argument
from bombus.commands.deployment import add_deployment_arguments, deployment, tell_ignored
from bombus.config.cluster import Cluster
from bombus.config.flags import check_range
from bombus.host.credentials import KEY_FILES, read_environment
from bombus.host.doctor import missing_packages
from bombus.host.layout import Layout, check_can_start, services
from bombus.host.supervisor import Supervisor
from bombus.machine.certificates import TRUST_VARIABLE as TRUST
from bombus.machine.certificates import VARIABLE as TLS
from bombus.machine.hive_keys import add_key_arguments, keys_for
from bombus.machine.process import run_service
from bombus.terminal import complain, say

log = logging.getLogger(__name__)

BETTER = "write the address into a cluster file that only you can read, as `nats`"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_deployment_arguments(parser)
    parser.add_argument("--dry-run", action="store_true", help="print all processes' commands without starting them")
    parser.add_argument(
        "--nats-port",
        type=int,
        default=0,
        metavar="PORT",
        help="the port of our own NATS server; 0: any free port (default: %(default)s)",
    )
    parser.add_argument(
        "--nats-host",
        metavar="NAME",
        default="",
        help="the name of this machine, at which services on other machines reach our own NATS server (default: only "
        "this machine reaches it)",
    )
    parser.add_argument(
        "--debug-root",
        type=Path,
        metavar="DIR",
        help="a folder below which jobs may write debug rollout data (default: only the folder of their run)",
    )
    add_key_arguments(parser)
    add_log_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    check_range("--nats-port", arguments.nats_port, 0, 65_535)
    cluster, jobs = deployment(arguments)
    logs.configure("up", arguments.log_level, hive=cluster.hive)
    own = own_variables(cluster, arguments)
    os.environ.update({name: own[name] for name in (TLS, TRUST) if name in own})  # for all processes of the hive
    keys_of = partial(keys_for, arguments, environment=own)
    web = cluster.web.enabled and not missing_packages("insight")
    if web:
        arguments.host = cluster.web.host
        keys_of(needed=("admin",))
    arguments.host = cluster.gateway.host
    layout = Layout(
        cluster=cluster,
        jobs=jobs,
        nats_port=arguments.nats_port,
        nats_host=arguments.nats_host,
        debug_root=arguments.debug_root,
        log_level=arguments.log_level,
        keys=keys_of(),
        trusted_network=arguments.trusted_network,
        web=web,
    )
    planned = services(layout, cluster.nats or "nats://127.0.0.1:PORT")
    tell_ignored(jobs)
    if arguments.nats and has_login(arguments.nats):
        log.warning("every user of this machine can read the bus's password on this command line: %s", BETTER)
    if arguments.dry_run:
        say(*planned)
        if has_login(cluster.nats):
            complain(f"To type these commands, set {VARIABLE} to the address of the bus, which contains a password.")
        return 0
    check_can_start(layout)
    return run_service(Supervisor(layout).run())


def own_variables(cluster: Cluster, arguments: argparse.Namespace) -> Mapping[str, str]:
    """Return our own variables, and the keys and certificates that `bombus init` made. If keys are in files of their
    own, which are read again when they change, name the files in the arguments instead."""
    if not cluster.credentials:
        return os.environ
    folder = Path(cluster.credentials)
    own = dict(read_environment(folder, cluster.hive, BusUser.GATEWAY))
    for variable, argument, name in KEY_FILES:
        path = folder / cluster.hive / name
        if variable not in os.environ and getattr(arguments, argument) is None and path.exists():
            own.pop(variable, None)
            setattr(arguments, argument, path)
    return {**own, **os.environ}
