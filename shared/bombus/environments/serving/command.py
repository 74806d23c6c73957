"""`bombus env serve`: serves a class as an environment server."""

import argparse
import os
from pathlib import Path

from bombus import logs
from bombus.bus_address import VARIABLE
from bombus.cli import add_log_argument
from bombus.config.flags import add_settings_arguments, check_range, name_of, settings_from
from bombus.environments.serving.announcing import announce
from bombus.environments.serving.running import (
    SLOTS_VARIABLE,
    BackendKind,
    Deployment,
    serve_until_cancelled,
)
from bombus.environments.serving.server import EnvironmentServer
from bombus.environments.serving.settings import SLOTS_MAX, ServingSettings
from bombus.environments.variables import number_of
from bombus.errors import Code, Refused
from bombus.machine.advertising import url_of
from bombus.machine.host_names import is_loopback
from bombus.machine.process import listen, run_service
from bombus.terminal import say

PORT = 8_000
HOST = "127.0.0.1"
KEY_VARIABLE = "BOMBUS_ENV_KEY"
SPARES_MAX = 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "path", metavar="module:Class", help="the class, such as my_env:Counter for my_env.py in this folder"
    )
    parser.add_argument("--host", metavar="HOST", default=HOST, help="the address to listen on (default: %(default)s)")
    parser.add_argument(
        "--port", type=int, metavar="PORT", default=PORT, help="the port, or 0 for any free one (default: %(default)s)"
    )
    parser.add_argument(
        "--host-name", action="append", metavar="NAME", help="a host name that clients use for the server (repeatable)"
    )
    parser.add_argument(
        "--slots", type=int, metavar="N", help=f"how many environments there are (default: ${SLOTS_VARIABLE}, or 1)"
    )
    add_settings_arguments(parser, ServingSettings)
    parser.add_argument(
        "--backend",
        choices=[kind.value for kind in BackendKind],
        default=BackendKind.NONE.value,
        help="what each environment runs on: its own AWS simulator, or its own sandbox for a shell (default: "
        "%(default)s)",
    )
    parser.add_argument(
        "--spares", type=int, metavar="N", default=0, help="how many spare backends are kept running (default: 0)"
    )
    parser.add_argument(
        "--key-file", type=Path, metavar="FILE", help=f"the file with the server's key (default: ${KEY_VARIABLE})"
    )
    parser.add_argument(
        "--trusted-network",
        action="store_true",
        help="let anyone who can reach the port use the environments without a key",
    )
    parser.add_argument(
        "--nats",
        metavar="URL",
        default=os.environ.get(VARIABLE),
        help="the bus of a hive whose `bombus status` should show the slots (default: $BOMBUS_NATS, or none)",
    )
    parser.add_argument(
        "--hive",
        type=name_of("hive"),
        metavar="NAME",
        default=os.environ.get("BOMBUS_HIVE", "main"),
        help="the hive on that bus (default: %(default)s)",
    )
    add_log_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    check_range("--port", arguments.port, 0, 65_535)
    check_range("--spares", arguments.spares, 0, SPARES_MAX)
    logs.configure("env", arguments.log_level)
    key = _key(arguments.key_file)
    if not key and not arguments.trusted_network and not is_loopback(arguments.host):
        raise Refused(
            Code.BAD_CONFIG,
            f"listening on {arguments.host} opens the environments, and what they can do, to the network: pass "
            "--key-file, or --trusted-network if anyone who can reach this port may use them",
        )
    slots = arguments.slots
    if slots is None:
        slots = number_of(os.environ, SLOTS_VARIABLE, 1, 1, SLOTS_MAX)
    deployment = Deployment(
        path=arguments.path,
        settings=settings_from(ServingSettings, arguments, {"slots": slots, "key": key}),
        backend=BackendKind(arguments.backend),
        spares=arguments.spares,
        host_names=tuple(arguments.host_name or ()),
    )
    bound = listen(arguments.host, arguments.port)
    url = url_of(bound)
    beside = [lambda server: announce(server.counts, arguments.nats, arguments.hive, url)] if arguments.nats else []

    def ready(server: EnvironmentServer) -> None:
        say(f"ready {url}", flush=True)

    return run_service(serve_until_cancelled(deployment, bound, os.environ, ready, beside))


def _key(file: Path | None) -> str:
    if file is None:
        return os.environ.get(KEY_VARIABLE, "").strip()
    try:
        key = file.read_text().strip()
    except OSError as error:
        raise Refused(Code.BAD_CONFIG, f"--key-file {file} cannot be read: {error}") from error
    if not key:
        raise Refused(Code.BAD_CONFIG, f"--key-file {file} is empty: put a key into it")
    return key
