"""`bombus trainer`: a trainer on its own, in one process."""

import argparse
import os
from importlib.util import find_spec

from bombus import logs
from bombus.bus_address import bus_arguments, bus_environment
from bombus.errors import Code, EngineFault, Refused
from bombus.machine.environments import environment_python
from bombus.machine.process import run_service
from bombus_trainer.options import TrainerOptions, add_options, options_of

VERL = "verl"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(parser)
    parser.add_argument(
        "--backend",
        choices=("torch", VERL),
        default="torch",
        help="the training backend; verl runs in its own environment (default: %(default)s)",
    )


def run(arguments: argparse.Namespace) -> int:
    options = options_of(arguments)
    if arguments.backend == VERL and find_spec(VERL) is None:
        _continue_in_verls_environment(arguments, options)
    logs.configure("trainer", arguments.log_level, hive=arguments.hive, engine=options.engine)
    if options.threads:
        import torch

        torch.set_num_threads(options.threads)
    from bombus_trainer import service

    return run_service(service.run(arguments.nats, arguments.hive, options))


def _continue_in_verls_environment(arguments: argparse.Namespace, options: TrainerOptions) -> None:
    """Replace this process with the same trainer, run by the Python that has verl."""
    try:
        python = environment_python(VERL)
    except EngineFault as error:
        raise Refused(Code.BAD_CONFIG, str(error)) from error
    command = [str(python), "-m", "bombus", "trainer", "--backend", VERL, "--log-level", arguments.log_level]
    command += [*bus_arguments(arguments.nats), "--hive", arguments.hive, "--options", options.model_dump_json()]
    os.execve(python, command, {**os.environ, **bus_environment(arguments.nats)})
