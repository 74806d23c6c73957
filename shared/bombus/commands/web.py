"""`bombus web`: serves the page of a hive, running or stopped, or of an archive."""

import argparse
import asyncio
from functools import partial

from bombus import logs
from bombus.cli import add_log_argument
from bombus.config.flags import check_range
from bombus.insight.watch import LogWatch
from bombus.insight.web.access import guarded
from bombus.insight.web.app import create_app, with_headers
from bombus.machine.certificates import scheme
from bombus.machine.hive_keys import HiveKeys, KeyRing, add_key_arguments, keys_for
from bombus.machine.http_server import http_server
from bombus.machine.process import listen, run_service
from bombus.replay.opening import add_source_arguments, open_source
from bombus.replay.running import reported
from bombus.terminal import say

PORT = 8265
SEEN_AT = "the page is at"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_source_arguments(parser)
    parser.add_argument("--host", default="127.0.0.1", help="where the page listens (default: %(default)s)")
    parser.add_argument(
        "--port", type=int, metavar="PORT", default=PORT, help="its port; 0: any free port (default: %(default)s)"
    )
    parser.add_argument(
        "--host-name",
        action="append",
        default=[],
        metavar="NAME",
        help="a name by which browsers reach the page (repeatable); without a key, names other than localhost and its "
        "address are refused",
    )
    parser.add_argument("--reuse-port", action="store_true", help="let other processes of this machine use the port")
    add_key_arguments(parser)
    add_log_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    check_range("--port", arguments.port, 0, 65_535)
    logs.configure("web", arguments.log_level)
    keys = keys_for(arguments, needed=("admin",))
    code = reported("bombus web", lambda: asyncio.run(_check(arguments)))
    return code or run_service(_serve(arguments, keys))


async def _check(arguments: argparse.Namespace) -> None:
    """Raise if the log cannot be opened: it is read only once somebody opens the page."""
    async with open_source(arguments):
        pass


async def _serve(arguments: argparse.Namespace, keys: HiveKeys) -> None:
    bound = listen(arguments.host, arguments.port, arguments.reuse_port)
    watch = LogWatch(partial(open_source, arguments))
    ring = KeyRing(keys)
    app = with_headers(guarded(create_app(watch), ring, bound, arguments.host_name))
    following = asyncio.create_task(ring.follow())
    async with http_server(app, bound, drain_s=0, cut_off=watch.stop_viewing) as serving:
        host = f"[{arguments.host}]" if ":" in arguments.host else arguments.host
        say(f"{SEEN_AT} {scheme()}://{host}:{bound.getsockname()[1]}/", flush=True)
        try:
            await serving
        finally:
            following.cancel()
            await watch.close()
