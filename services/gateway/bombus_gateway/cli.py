"""`bombus gateway`: a gateway alone."""

import argparse

from bombus import logs
from bombus.cli import add_hive_arguments
from bombus.config.flags import made_of_flags, name_of
from bombus.host.hive_keys import add_key_arguments, keys_for
from bombus.host.process import run_service
from bombus_gateway import service
from bombus_gateway.settings import GatewaySettings


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_hive_arguments(parser)
    parser.add_argument("--host", default="127.0.0.1", help="where it listens (default: %(default)s)")
    parser.add_argument("--port", type=int, default=10086, help="0: any that is free (default: %(default)s)")
    parser.add_argument("--reuse-port", action="store_true", help="share the port with other gateways of this host")
    parser.add_argument(
        "--engine",
        action="append",
        type=name_of("engine"),
        metavar="NAME",
        help="may be given several times: one door each, the first at the root too (default: main)",
    )
    parser.add_argument(
        "--public-url",
        default="",
        metavar="URL",
        help="scheme://host:port as clients see it, behind a proxy (default: what a client's request says)",
    )
    add_key_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    logs.configure("gateway", arguments.log_level, hive=arguments.hive)
    given = {
        "hive": arguments.hive,
        "bus_url": arguments.nats,
        "host": arguments.host,
        "port": arguments.port,
        "reuse_port": arguments.reuse_port,
        "engines": tuple(arguments.engine or ["main"]),
        "public_url": arguments.public_url,
        "keys": keys_for(arguments),
    }
    settings = made_of_flags(GatewaySettings, given, {"bus_url": "--nats", "engines": "--engine"})
    return run_service(service.run(settings))
