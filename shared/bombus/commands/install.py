"""`bombus install`: creates a separate environment for vLLM or verl, which cannot share bombus's own."""

import argparse
import shlex

from bombus.errors import EngineFault
from bombus.figures import byte_size
from bombus.host.installing import commands, install, recipe
from bombus.machine.environments import ENVIRONMENTS, environments_folder
from bombus.machine.hardware import nvidia_gpus
from bombus.terminal import complain, say


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", choices=ENVIRONMENTS, help="vllm serves models, verl trains them on many GPUs")
    parser.add_argument("--force", action="store_true", help="reinstall it, even if it exists")
    parser.add_argument("--dry-run", action="store_true", help="print the commands without running them")


def run(arguments: argparse.Namespace) -> int:
    gpus = nvidia_gpus()
    wanted = recipe(arguments.name, gpu=bool(gpus))
    folder = environments_folder() / arguments.name
    if arguments.dry_run:
        say(*(shlex.join(command) for command in commands(wanted, folder)))
        return 0
    say(f"for {'GPU: ' + gpus[0].name if gpus else 'the CPU: no NVIDIA GPU was found'}", flush=True)
    try:
        made, new = install(wanted, lambda line: say(line, flush=True), arguments.force)
    except (EngineFault, OSError) as error:
        complain(f"bombus install {arguments.name}: {error}")
        return 1
    versions = ", ".join(f"{name} {version}" for name, version in made.packages.items())
    state = "is ready" if new else "already exists"
    say(f"{folder} {state}: {versions}; Python {made.python}; {byte_size(made.size_bytes)}")
    return 0
