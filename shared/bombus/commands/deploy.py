"""`bombus deploy render`: writes the manifests of a cluster file for other hosts than this machine."""

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path

from bombus.bus_address import has_login
from bombus.commands.deployment import cluster_in
from bombus.config.cluster import Cluster, Jobs
from bombus.deploy import compose, kubernetes, skypilot, slurm
from bombus.deploy.nats import init_command
from bombus.errors import Code, Refused
from bombus.private import write_private
from bombus.terminal import complain, say

RENDERERS: Mapping[str, Callable[[Cluster, Jobs], Mapping[str, str]]] = {
    "compose": compose.render,
    "kubernetes": kubernetes.render,
    "slurm": slurm.render,
    "skypilot": skypilot.render,
}

HOSTS = {"compose": compose.HOSTS, "kubernetes": kubernetes.HOSTS}  # of the NATS servers


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, metavar="FILE.yaml", required=True, help="a cluster file")
    parser.add_argument("--to", choices=RENDERERS, required=True, help="what runs the hive")
    parser.add_argument("--out", type=Path, metavar="DIR", help="a folder for the files (default: they are printed)")


def run(arguments: argparse.Namespace) -> int:
    cluster, jobs = cluster_in(arguments.config)
    for name, text in RENDERERS[arguments.to](cluster, jobs).items():
        if arguments.out is None:
            say(f"# ---- {name}", *text.splitlines())
            continue
        has_secret = has_login(cluster.nats) and cluster.nats in text
        try:
            arguments.out.mkdir(parents=True, exist_ok=True)
            (write_private if has_secret else Path.write_text)(arguments.out / name, text)
        except OSError as error:
            raise Refused(Code.BAD_CONFIG, f"{arguments.out / name} cannot be written: {error.strerror}") from error
        complain(f"wrote {arguments.out / name}")
    if arguments.out is not None and (hosts := HOSTS.get(arguments.to)):
        complain(f"once, in {arguments.out}, make the logins: {init_command(cluster, hosts)}")
    return 0
