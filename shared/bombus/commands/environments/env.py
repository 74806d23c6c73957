"""`bombus env`: works with environments. Each subcommand is defined next to the code that it runs, and imported only
when it runs."""

import argparse

from bombus.cli import Command, add_subcommands, run_command

SUBCOMMANDS = {
    "validate": Command("bombus.commands.environments.validate", "check a class before training on it", "yaml"),
    "serve": Command("bombus.environments.serving.command", "serve a class to remote agents", "environments-server"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_subcommands(parser, "env", SUBCOMMANDS)


def run(arguments: argparse.Namespace) -> int:
    name = arguments.subcommand
    return run_command(f"bombus env {name}", SUBCOMMANDS[name], arguments.arguments)
