"""`torchrun ... -m bombus_trainer.worker`: one rank of a trainer. Rank 0 is the trainer on the bus; the others follow.

It takes the options of `bombus trainer`, and its rank from torchrun's environment.
"""

import logging
import os
import signal
import sys
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from bombus import logs
from bombus.config.flags import Parser
from bombus.config.job import RunConfig
from bombus.errors import Refused
from bombus.machine.process import PARENT_VARIABLE, die_with_parent, run_service
from bombus.terminal import complain
from bombus_trainer import service
from bombus_trainer.backend import BackendLost, OperationBackend, TrainerBackend
from bombus_trainer.loading import load_backend, load_base
from bombus_trainer.operations.settings import ExecutorSettings
from bombus_trainer.options import TrainerOptions, add_options, options_of
from bombus_trainer.rank_leader import Board, Leader, follow
from bombus_trainer.ranks import Ranks

log = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="bombus_trainer.worker", description=__doc__)
    add_options(parser)
    arguments = parser.parse_args(argv)
    if "RANK" not in os.environ:
        complain("bombus_trainer.worker: start it with torchrun, or use `bombus trainer`")
        return 2
    try:
        options = options_of(arguments)
    except Refused as error:
        complain(f"bombus_trainer.worker: {error.why}")
        return 2
    os.environ[PARENT_VARIABLE] = str(os.getppid())
    die_with_parent(signal.SIGKILL)  # end with torchrun, even while stopped
    rank = os.environ["RANK"]
    logs.configure("trainer", arguments.log_level, hive=arguments.hive, engine=options.engine, rank=rank)
    if options.threads:
        torch.set_num_threads(options.threads)
    return run(arguments.nats, arguments.hive, options)


def run(url: str, hive: str, options: TrainerOptions) -> int:
    board = _join(options)

    def load_here(job: RunConfig) -> TrainerBackend:
        return load_backend(job, options, board.ranks)

    def load_base_here(job: RunConfig, executor: ExecutorSettings) -> OperationBackend:
        return load_base(job, options, executor, board.ranks)

    if not board.ranks.leads:
        try:
            follow(board, load_here, load_base_here)
        except (BackendLost, RuntimeError) as error:  # torch raises many kinds of errors if the leader is gone
            log.error("rank %d ends: %s", board.ranks.rank, error)
            return 1
        return 0
    leader = Leader(board, load_here, load_base_here, options.operation_timeout_s)
    code = run_service(service.run(url, hive, options, load=leader.load, load_base=leader.load_base))
    leader.stop()
    return code


def _join(options: TrainerOptions) -> Board:
    """Join the other ranks at torchrun's address. Gradients go through gloo on CPUs, and through NCCL on GPUs."""
    timeout = timedelta(seconds=options.operation_timeout_s)
    store, rank, size = next(rendezvous("env://", timeout=timeout))
    backend = "gloo"
    if options.device != "cpu":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        backend = "cpu:gloo,cuda:nccl"
    group_store = PrefixStore("group", store)
    dist.init_process_group(backend, store=group_store, rank=rank, world_size=size, timeout=timeout)
    return Board(PrefixStore("board", store), Ranks.of_group(timeout))


if __name__ == "__main__":
    sys.exit(main())
