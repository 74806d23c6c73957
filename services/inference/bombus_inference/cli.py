"""`bombus inference`: one replica of one engine."""

import argparse

from bombus import logs
from bombus.cli import add_hive_arguments, add_torch_arguments
from bombus.config.flags import add_settings_arguments, settings_from
from bombus.host.process import run_service
from bombus_inference.settings import InferenceSettings


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_hive_arguments(parser)
    add_torch_arguments(parser)
    add_settings_arguments(parser, InferenceSettings)


def settings_of(arguments: argparse.Namespace) -> InferenceSettings:
    """Raises `Refused(BAD_CONFIG)`."""
    return settings_from(InferenceSettings, arguments, flags={"": "--url"})


def run(arguments: argparse.Namespace) -> int:
    settings = settings_of(arguments)
    logs.configure("inference", arguments.log_level, hive=arguments.hive, engine=arguments.engine)
    from bombus_inference import service  # slow to import: only once the arguments are known to be valid

    return run_service(service.run(settings))
