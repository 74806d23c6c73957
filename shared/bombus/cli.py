"""The `bombus` command. Each subcommand is defined next to the code that it runs, and imported only when it runs."""

import argparse
import gc
import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Protocol

import msgspec

from bombus.bus_address import VARIABLE, has_login, without_login
from bombus.config.flags import Parser, name_of
from bombus.errors import BombusError, Refused
from bombus.terminal import complain, say

OUTPUT_CLOSED = 141  # the exit code that a shell reports for a program killed by SIGPIPE
DEFAULT_NATS = "nats://127.0.0.1:4222"
URL_FILE = Path(".bombus/nats-url")  # the address of the bus, in the data folder of a running `bombus up`


class Command(msgspec.Struct, frozen=True):
    """A command: either one that is defined in a module next to the code that it runs, or one that is made up of
    `subcommands`."""

    module: str
    help: str
    extra: str
    subcommands: dict[str, "Command"] = {}


ENV = {
    "validate": Command("bombus.commands.validate", "check a class before training on it", "yaml"),
    "serve": Command("bombus.environments.serving.command", "serve a class to remote agents", "environments-server"),
}
DEPLOY = {
    "render": Command("bombus.commands.deploy", "write the manifests of a cluster file for other hosts", "yaml"),
    "start": Command("bombus.commands.deploy_start", "start the jobs of a cluster file on a running hive", "gateway"),
}
REPLAY = {
    "timeline": Command("bombus.replay.timeline", "what happened, one line for each event", "server"),
    "episodes": Command("bombus.replay.episodes", "the ended episodes, sorted by their rewards", "server"),
    "state": Command("bombus.replay.state", "what the hive was doing at a position of its log", "server"),
    "diff": Command("bombus.replay.diff", "what changed between two positions", "server"),
    "episode": Command("bombus.replay.episode.command", "an episode in readable form, token by token", "server"),
    "lineage": Command("bombus.replay.lineage", "what a weights version was made of", "server"),
    "batch": Command("bombus_trainer.replay.batch", "write the samples of a step to a file", "trainer"),
    "train": Command("bombus_trainer.replay.train", "train a step again from the log, without inference", "trainer"),
    "what-if": Command("bombus_coordinator.what_if", "batch the same episodes under other rules", "coordinator"),
}
COMMANDS = {
    "up": Command("bombus.commands.up", "start a whole hive on this machine", "all"),
    "demo": Command("bombus.commands.demo", "train a small model through a hive and watch it learn", "demo"),
    "rollout": Command("bombus.commands.rollout", "play episodes with any command as the agent", "yaml"),
    "start": Command("bombus.commands.start", "work with a coding agent on a hive's model, and rate it", "yaml"),
    "tasks": Command("bombus.commands.tasks.listing", "list the tasks that are ready to be played", "yaml"),
    "run": Command("bombus.commands.tasks.run", "play ready tasks against any model, and score them", "yaml"),
    "slime": Command("bombus.commands.slime", "play prompts with slime's hook files, unmodified", "yaml"),
    "eval": Command("bombus.commands.tasks.evaluate", "evaluate the policy that a hive trains", "yaml"),
    "env": Command("", "check or serve environments for agents", "yaml", ENV),
    "run-api": Command("bombus.commands.atropos.run_api", "serve Atropos's trajectory API on port 8000", "all"),
    "atropos": Command("bombus.commands.atropos.settings", "print the settings to use a hive in Atropos", "yaml"),
    "deploy": Command("", "render Compose, Kubernetes, Slurm and SkyPilot manifests", "yaml", DEPLOY),
    "doctor": Command("bombus.commands.doctor", "check what this machine can run, and what is missing", "yaml"),
    "init": Command("bombus.commands.init", "make the credentials of a hive on several machines", "server"),
    "install": Command("bombus.commands.install", "create an environment for vllm or verl", "yaml"),
    "stop": Command("bombus.commands.stop", "stop the job of an engine, so that another can be started", "bus"),
    "resume": Command("bombus.commands.resume", "resume a suspended run", "bus"),
    "status": Command("bombus.commands.status", "print what a hive is doing", "bus"),
    "why": Command("bombus.commands.why", "explain what is waiting for what, and who could end the wait", "server"),
    "export": Command("bombus.commands.export", "write trained weights as a model that other tools load", "all"),
    "diagnose": Command("bombus.commands.diagnose", "say what is wrong with a run's learning", "server"),
    "web": Command("bombus.commands.web", "serve a page that shows a hive and its runs in a browser", "insight"),
    "report": Command("bombus.insight.report", "write one page about a run: charts, diagnosis, weights", "insight"),
    "plot": Command("bombus.insight.plot", "draw one chart of one or several runs", "insight"),
    "track": Command("bombus.commands.track", "write runs to W&B and other experiment trackers", "server"),
    "overwatch": Command("bombus_overwatch.cli", "watch a hive in the terminal", "overwatch"),
    "replay": Command("", "inspect a hive's log: what happened, and why", "server", REPLAY),
    "sql": Command("bombus.commands.sql", "query a hive's log as tables", "sql"),
    "audit": Command("bombus.commands.audit", "account for every sampled token of a hive's log", "server"),
    "log": Command("bombus.commands.log", "check, trim or export a hive's log", "server"),
    "coordinator": Command("bombus_coordinator.cli", "run the coordinator alone", "coordinator"),
    "gateway": Command("bombus_gateway.cli", "run a gateway alone", "gateway"),
    "trainer": Command("bombus_trainer.cli", "run a trainer alone", "trainer"),
    "inference": Command("bombus_inference.cli", "run an inference replica alone", "inference"),
}


class CommandModule(Protocol):
    """The interface of a subcommand's module.

    `run` returns the exit code. If it raises `Refused`, the command line is invalid: the error's sentence is printed
    and the exit code is 2.
    """

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, arguments: argparse.Namespace) -> int: ...


class NotInstalled(BombusError):
    """A required package is not installed. The sentence says how to install it."""

    def __init__(self, package: str, extra: str) -> None:
        self.package = package
        self.remedy = f"pip install 'bombus[{extra}]'"
        super().__init__(f"{package} is not installed: {self.remedy}")


def load(module: str, extra: str) -> ModuleType:
    """Import a module of this project that needs the packages in an extra. Raises `NotInstalled` if a package is
    missing."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise NotInstalled(error.name or module, extra) from error


def default_nats() -> str:
    """Return `$BOMBUS_NATS`, else the bus of a `bombus up` running in this folder, else NATS's default address."""
    if address := os.environ.get(VARIABLE):
        return address
    return URL_FILE.read_text().strip() if URL_FILE.is_file() else DEFAULT_NATS


def add_hive_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that every service and tool needs to find the hive, and the log level."""
    parser.add_argument(
        "--nats",
        metavar="URL",
        default=default_nats(),
        help="the bus (default: $BOMBUS_NATS, or the bus of the hive that runs in this folder; here "
        f"{without_login(default_nats()).replace('%', '%%')})",
    )
    parser.add_argument(
        "--hive",
        type=name_of("hive"),
        metavar="NAME",
        default=os.environ.get("BOMBUS_HIVE", "main"),
        help="the hive's name (default: $BOMBUS_HIVE, or main; here %(default)s)",
    )
    add_log_argument(parser)


def hint_at_bus(arguments: argparse.Namespace) -> tuple[str, ...]:
    """Return a line to print after a bus error if the address may be wrong or lack a password, otherwise nothing."""
    remedy = f"set ${VARIABLE} to the address of its bus, which is in the file `{URL_FILE.name}` in its data folder"
    if arguments.nats == DEFAULT_NATS:
        return (f"No hive is running in this folder: go to the folder where `bombus up` was started, or {remedy}",)
    if not has_login(arguments.nats):
        return (f"A bus started by `bombus up` requires a password: if this is one, {remedy}",)
    return ()


def add_log_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        default="info",
        help="the lowest level that is logged, to stderr (default: %(default)s)",
    )


def add_engine_argument(parser: argparse.ArgumentParser, help: str) -> None:
    help = f"{help} (default: %(default)s)"
    parser.add_argument("--engine", type=name_of("engine"), metavar="NAME", default="main", help=help)


def add_torch_arguments(parser: argparse.ArgumentParser) -> None:
    add_engine_argument(parser, "the engine it works for")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N (default: %(default)s)")
    parser.add_argument(
        "--threads",
        type=int,
        metavar="N",
        default=0,
        help="torch's threads on the CPU; 0: one for each core (default: %(default)s)",
    )


def main(argv: Sequence[str] | None = None) -> int:
    # torch and transformers create millions of permanent objects. Scanning them for garbage takes a tenth of the
    # startup time.
    gc.set_threshold(50_000, 20, 20)
    given = list(sys.argv[1:] if argv is None else argv)
    parser = Parser(
        prog="bombus",
        description="A swarm server for agentic reinforcement learning of language models.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    parser.add_argument("command", nargs="?", choices=COMMANDS, metavar="command")
    parser.epilog = "commands:\n" + "\n".join(f"  {name:<12} {command.help}" for name, command in COMMANDS.items())
    first, rest = given[:1], given[1:]
    arguments = parser.parse_args(first)
    if arguments.version:
        from bombus.version import described

        say(described())
        return 0
    if arguments.command is None:
        parser.print_help()
        return 2
    return run_command(f"bombus {arguments.command}", COMMANDS[arguments.command], rest)


def run_command(prog: str, command: Command, given: Sequence[str]) -> int:
    """Import a command and run it with its own arguments. Return the exit code."""
    try:
        parser = Parser(prog=prog, description=f"{command.help[0].upper()}{command.help[1:]}.")
        if command.subcommands:
            arguments = _choice_of(parser, command.subcommands).parse_args(given)
            chosen = command.subcommands[arguments.subcommand]
            return run_command(f"{prog} {arguments.subcommand}", chosen, arguments.arguments)
        module: CommandModule = load(command.module, command.extra)
        module.add_arguments(parser)
        code = module.run(parser.parse_args(given))
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader of our output, such as `head`, has closed it: do not flush at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OUTPUT_CLOSED
    except NotInstalled as error:
        complain(f"{prog} needs {error.package}: {error.remedy}")
        return 1
    except Refused as error:
        complain(f"{prog}: {error.why}")
        return 2
    except KeyboardInterrupt:
        return 130


def _choice_of(parser: Parser, subcommands: Mapping[str, Command]) -> Parser:
    """Let a parser accept subcommands, each with its own arguments, and list them all in its help."""
    parser.add_argument("subcommand", choices=subcommands, metavar="subcommand")
    parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, help=f"for the subcommand; see `{parser.prog} <subcommand> --help`"
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = "subcommands:\n" + "\n".join(f"  {name:<9} {what.help}" for name, what in subcommands.items())
    return parser
