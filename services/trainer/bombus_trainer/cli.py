"""`bombus trainer`: a trainer alone, in one process."""

import argparse
import os
from importlib.util import find_spec
from pathlib import Path

from bombus import logs
from bombus.cli import add_hive_arguments, add_torch_arguments
from bombus.config.flags import made_of_flags
from bombus.errors import Code, EngineFault, Refused
from bombus.host.environments import environment_python
from bombus.host.process import run_service
from bombus_trainer.options import TrainerOptions
from bombus_trainer.settings import CPU_BIN_TOKENS

VERL = "verl"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(parser)
    parser.add_argument(
        "--backend",
        choices=("torch", VERL),
        default="torch",
        help="what it can train with: verl runs in an environment of its own (default: %(default)s)",
    )


def add_options(parser: argparse.ArgumentParser) -> None:
    """What every rank is told."""
    add_hive_arguments(parser)
    add_torch_arguments(parser)
    parser.add_argument(
        "--folder",
        type=Path,
        metavar="DIR",
        default=Path(".bombus/engines"),
        help="checkpoints and weights; replicas see it under the same path (default: %(default)s)",
    )
    parser.add_argument(
        "--debug-root",
        type=Path,
        metavar="DIR",
        help="jobs may write their debug rollout data anywhere below (default: only below the folder of their run)",
    )
    parser.add_argument(
        "--bin-tokens",
        type=int,
        metavar="TOKENS",
        default=0,
        help="the most that a micro-batch holds, whatever a job's max_tokens_per_bin; 0: on a GPU what the job says, "
        f"on a CPU {CPU_BIN_TOKENS} "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--weights-by",
        choices=("folder", "objects"),
        default="folder",
        help="how weights reach the replicas: in a folder that they share, or by the hive's object store "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--weights-full-every",
        type=int,
        default=0,
        metavar="N",
        help="a full copy every N versions, in between only what has changed; 0: 1 by a folder, 16 by the object store "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--weights-lora",
        choices=("merged", "adapter"),
        default="adapter",
        help="what travels of a LoRA job: once the model and then adapters alone, or in each step the model with the "
        "adapter merged into it (default: %(default)s)",
    )
    parser.add_argument("--allow-download", action="store_true", help="models may be fetched from a hub")
    parser.add_argument(
        "--operation-timeout",
        type=float,
        default=1800.0,
        metavar="SECONDS",
        help="how long ranks wait for each other in a step, a checkpoint or an export (default: %(default)s)",
    )


def options_of(arguments: argparse.Namespace) -> TrainerOptions:
    """Raises `Refused(BAD_CONFIG)`."""
    given = {
        "engine": arguments.engine,
        "folder": arguments.folder.absolute(),
        "debug_root": arguments.debug_root,
        "device": arguments.device,
        "threads": arguments.threads,
        "bin_tokens_max": arguments.bin_tokens,
        "allow_download": arguments.allow_download,
        "weights_by": arguments.weights_by,
        "weights_full_every": arguments.weights_full_every,
        "weights_lora": arguments.weights_lora,
        "operation_timeout_s": arguments.operation_timeout,
    }
    flags = {"bin_tokens_max": "--bin-tokens", "operation_timeout_s": "--operation-timeout"}
    return made_of_flags(TrainerOptions, given, flags)


def run(arguments: argparse.Namespace) -> int:
    options = options_of(arguments)
    if arguments.backend == VERL and find_spec(VERL) is None:
        try:
            python = environment_python(VERL)  # this process goes on there
        except EngineFault as error:
            raise Refused(Code.BAD_CONFIG, str(error)) from error
        os.execv(python, [str(python), "-m", "bombus", "trainer", "--backend", VERL, *words_of(arguments)])
    logs.configure("trainer", arguments.log_level, hive=arguments.hive, engine=arguments.engine)
    if options.threads:
        import torch

        torch.set_num_threads(options.threads)
    from bombus_trainer import service

    return run_service(service.run(arguments.nats, arguments.hive, options))


def words_of(arguments: argparse.Namespace) -> list[str]:
    """The options of `add_options`, as they are typed."""
    words = ["--nats", arguments.nats, "--hive", arguments.hive, "--log-level", arguments.log_level]
    words += ["--engine", arguments.engine, "--device", arguments.device, "--threads", str(arguments.threads)]
    words += ["--folder", str(arguments.folder.absolute()), "--bin-tokens", str(arguments.bin_tokens)]
    words += ["--weights-by", arguments.weights_by, "--weights-full-every", str(arguments.weights_full_every)]
    words += ["--weights-lora", arguments.weights_lora]
    words += ["--operation-timeout", str(arguments.operation_timeout)]
    words += ["--debug-root", str(arguments.debug_root)] if arguments.debug_root is not None else []
    return words + (["--allow-download"] if arguments.allow_download else [])
