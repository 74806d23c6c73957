"""`bombus inference`: one replica of one engine."""

import argparse
import asyncio

from bombus import logs
from bombus.bus import Bus
from bombus.cli import add_hive_arguments, add_torch_arguments, hint_at_bus
from bombus.config.flags import add_settings_arguments, settings_from
from bombus.errors import BusUnavailable
from bombus.machine.process import run_service
from bombus.terminal import complain, say
from bombus_inference.settings import InferenceSettings


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_hive_arguments(parser)
    add_torch_arguments(parser)
    add_settings_arguments(parser, InferenceSettings)
    parser.add_argument(
        "--show-key",
        action="store_true",
        help="print the key that the hive's replicas require, such as for /metrics, without starting a replica",
    )


def settings_of(arguments: argparse.Namespace) -> InferenceSettings:
    """Return the settings that the arguments give. Raises `Refused(BAD_CONFIG)`."""
    return settings_from(InferenceSettings, arguments, flags={"": "--url"})


def run(arguments: argparse.Namespace) -> int:
    if arguments.show_key:
        return _show_key(arguments)
    settings = settings_of(arguments)
    logs.configure("inference", arguments.log_level, hive=arguments.hive, engine=arguments.engine)
    from bombus_inference import service  # slow to import, so only after the arguments are valid

    return run_service(service.run(settings))


def _show_key(arguments: argparse.Namespace) -> int:
    try:
        say(asyncio.run(_key(arguments.nats, arguments.hive)))
    except BusUnavailable as error:
        complain(f"bombus inference: {error}", *hint_at_bus(arguments))
        return 1
    return 0


async def _key(bus_url: str, hive: str) -> str:
    async with await Bus.connect(bus_url, hive, name="inference", patient=False) as bus:
        await bus.until_streams_exist(timeout_s=0)
        return await bus.replica_key()
