"""`bombus gateway`: run only a gateway."""

import argparse

from bombus import logs
from bombus.cli import add_hive_arguments
from bombus.config.flags import add_settings_arguments, settings_from
from bombus.machine.hive_keys import add_key_arguments, keys_for
from bombus.machine.process import run_service
from bombus_gateway import service
from bombus_gateway.settings import GatewaySettings


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_hive_arguments(parser)
    add_settings_arguments(parser, GatewaySettings)
    add_key_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    logs.configure("gateway", arguments.log_level, hive=arguments.hive)
    settings = settings_from(GatewaySettings, arguments, {"keys": keys_for(arguments)})
    return run_service(service.run(settings))
