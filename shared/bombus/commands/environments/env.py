"""`bombus env`: environments. Each subcommand is defined next to what it does, and is imported only when it runs."""

import argparse

from bombus.cli import Command, add_subcommands, run_command

SUBCOMMANDS = {
    "validate": Command("bombus.commands.environments.validate", "check a class before it is trained on", "yaml"),
    "serve": Command("bombus.environments.serving.command", "serve a class to agents elsewhere", "environments-server"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_subcommands(parser, "env", SUBCOMMANDS)


def run(arguments: argparse.Namespace) -> int:
    name = arguments.subcommand
    return run_command(f"bombus env {name}", SUBCOMMANDS[name], arguments.arguments)
