"""`bombus env`: environments. Each subcommand is defined beside what it does, and is imported only when it runs."""

import argparse

from bombus.cli import Command, run_command

SUBCOMMANDS = {
    "validate": Command("bombus.commands.environments.validate", "check a class before it is trained on", "yaml"),
    "serve": Command("bombus.environments.serving.command", "serve a class to agents elsewhere", "environments-server"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("subcommand", choices=SUBCOMMANDS, metavar="subcommand")
    parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, help="the subcommand's own; see `bombus env <subcommand> --help`"
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = "subcommands:\n" + "\n".join(f"  {name:<9} {what.help}" for name, what in SUBCOMMANDS.items())


def run(arguments: argparse.Namespace) -> int:
    name = arguments.subcommand
    return run_command(f"bombus env {name}", SUBCOMMANDS[name], arguments.arguments)
