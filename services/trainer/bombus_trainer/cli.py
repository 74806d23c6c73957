"""`bombus trainer`: a trainer alone, in one process."""

import argparse
import os
import sys
from importlib.util import find_spec
from pathlib import Path

from pydantic import ValidationError

from bombus import logs
from bombus.cli import add_hive_arguments, add_torch_arguments
from bombus.environments import environment_python
from bombus.errors import EngineFault
from bombus.process import run_service
from bombus_trainer.options import TrainerOptions

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
        default=Path(".bombus/engines"),
        help="checkpoints and weights; replicas see it under the same path (default: %(default)s)",
    )
    parser.add_argument(
        "--debug-root",
        type=Path,
        metavar="DIR",
        help="jobs may write their debug rollout data anywhere below (default: only below the folder of their run)",
    )
    parser.add_argument("--bin-tokens", type=int, default=4096, help="a micro-batch that fits (default: %(default)s)")
    parser.add_argument(
        "--weights-by",
        choices=("folder", "objects"),
        default="folder",
        help="how weights reach the replicas: a folder that they share, or the hive's object store (%(default)s)",
    )
    parser.add_argument(
        "--weights-full-every",
        type=int,
        default=0,
        metavar="N",
        help="a full copy every N versions, in between only what has changed (default: 1, by the object store 16)",
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
    """Raises `ValidationError`."""
    return TrainerOptions(
        engine=arguments.engine,
        folder=arguments.folder.absolute(),
        debug_root=arguments.debug_root,
        device=arguments.device,
        bin_tokens_max=arguments.bin_tokens,
        allow_download=arguments.allow_download,
        weights_by=arguments.weights_by,
        weights_full_every=arguments.weights_full_every,
        weights_lora=arguments.weights_lora,
        operation_timeout_s=arguments.operation_timeout,
    )


def run(arguments: argparse.Namespace) -> int:
    try:
        options = options_of(arguments)
        if arguments.backend == VERL and find_spec(VERL) is None:
            python = environment_python(VERL)  # this process goes on there
            os.execv(python, [str(python), "-m", "bombus", "trainer", "--backend", VERL, *words_of(arguments)])
    except (ValidationError, EngineFault) as error:
        print(f"bombus trainer: {error}", file=sys.stderr)
        return 2
    logs.configure("trainer", arguments.log_level, hive=arguments.hive, engine=arguments.engine)
    if arguments.threads:
        import torch

        torch.set_num_threads(arguments.threads)
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
