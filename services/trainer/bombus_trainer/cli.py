"""`bombus trainer`: a trainer alone."""

import argparse
import sys
from pathlib import Path

from pydantic import ValidationError

from bombus import logs
from bombus.cli import add_hive_arguments, add_torch_arguments
from bombus.process import run_service
from bombus_trainer.options import TrainerOptions


def add_arguments(parser: argparse.ArgumentParser) -> None:
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
    parser.add_argument("--allow-download", action="store_true", help="models may be fetched from a hub")


def run(arguments: argparse.Namespace) -> int:
    try:
        options = TrainerOptions(
            engine=arguments.engine,
            folder=arguments.folder.absolute(),
            debug_root=arguments.debug_root,
            device=arguments.device,
            bin_tokens_max=arguments.bin_tokens,
            allow_download=arguments.allow_download,
        )
    except ValidationError as error:
        print(f"bombus trainer: {error}", file=sys.stderr)
        return 2
    logs.configure("trainer", arguments.log_level, hive=arguments.hive, engine=arguments.engine)
    if arguments.threads:
        import torch

        torch.set_num_threads(arguments.threads)
    from bombus_trainer import service

    return run_service(service.run(arguments.nats, arguments.hive, options))
