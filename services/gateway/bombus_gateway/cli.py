"""`bombus gateway`: a gateway alone."""

import argparse
import os
import sys

from pydantic import ValidationError

from bombus import logs
from bombus.cli import add_hive_arguments
from bombus.process import run_service
from bombus_gateway import service
from bombus_gateway.settings import GatewaySettings


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_hive_arguments(parser)
    parser.add_argument("--host", default="127.0.0.1", help="where it listens (default: %(default)s)")
    parser.add_argument("--port", type=int, default=10086, help="default: %(default)s")
    parser.add_argument("--reuse-port", action="store_true", help="share the port with other gateways of this host")
    parser.add_argument("--engine", action="append", metavar="NAME", help="one door each, the first at the root too")
    parser.add_argument("--public-url", default="", help="scheme://host:port as clients see it, behind a proxy")


def run(arguments: argparse.Namespace) -> int:
    try:
        settings = GatewaySettings(
            hive=arguments.hive,
            bus_url=arguments.nats,
            host=arguments.host,
            port=arguments.port,
            reuse_port=arguments.reuse_port,
            engines=tuple(arguments.engine or ["main"]),
            public_url=arguments.public_url,
            admin_key=os.environ.get("BOMBUS_ADMIN_KEY", ""),
        )
    except ValidationError as error:
        print(f"bombus gateway: {error}", file=sys.stderr)
        return 2
    logs.configure("gateway", arguments.log_level, hive=arguments.hive)
    return run_service(service.run(settings))
