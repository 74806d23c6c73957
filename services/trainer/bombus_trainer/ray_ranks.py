"""`python -m bombus_trainer.ray_ranks`: run a trainer's ranks as tasks of a Ray cluster, which places them on machines.

Each task runs the worker that torchrun would otherwise start. When one task ends, all end, and so does this process:
its supervisor must restart it.
"""

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

from bombus import logs
from bombus.config.flags import Parser, check_range
from bombus.errors import Refused
from bombus.machine.certificates import TRUST_VARIABLE, VARIABLE
from bombus.machine.process import die_with_parent
from bombus.terminal import complain
from bombus_trainer.options import TrainerOptions, add_options, options_of

RANKS_MAX = 4096
NO_RAY = "Ray is not installed here: run `bombus install verl`, and start this with the Python of that environment"


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="bombus_trainer.ray_ranks", description=__doc__)
    add_options(parser)
    parser.add_argument(
        "--ranks",
        type=int,
        default=1,
        metavar="N",
        help="how many ranks, with a CPU or a GPU each (default: %(default)s)",
    )
    parser.add_argument(
        "--ray-address", metavar="HOST:PORT", help="the cluster's address (default: a cluster on this machine only)"
    )
    arguments = parser.parse_args(argv)
    try:
        options = options_of(arguments)
        check_range("--ranks", arguments.ranks, 1, RANKS_MAX)
    except Refused as error:
        complain(f"bombus_trainer.ray_ranks: {error.why}")
        return 2
    try:
        import ray
    except ModuleNotFoundError:
        complain(f"bombus_trainer.ray_ranks: {NO_RAY}")
        return 2
    die_with_parent()
    logs.configure("trainer", arguments.log_level, hive=arguments.hive, engine=options.engine)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    own = {} if arguments.ray_address else {"num_cpus": arguments.ranks}
    ray.init(arguments.ray_address, include_dashboard=False, **own)
    try:
        return _run(arguments, options)
    finally:
        ray.shutdown()  # ends the tasks


def _run(arguments: argparse.Namespace, options: TrainerOptions) -> int:
    import ray
    import torch.distributed as dist

    address = ray.util.get_node_ip_address()
    store = dist.TCPStore(address, 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    environment = {
        "WORLD_SIZE": str(arguments.ranks),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store already exists
        "LOCAL_RANK": "0",  # Ray shows a task only its own device
        **{name: os.environ[name] for name in (TRUST_VARIABLE, VARIABLE) if name in os.environ},
    }
    needs = {"num_gpus": 1} if options.device != "cpu" else {"num_cpus": 1}
    task: Any = ray.remote(max_retries=0, **needs)(_rank)
    given = (arguments.nats, arguments.hive, options.model_dump_json(), arguments.log_level)
    ranks = [task.remote(environment | {"RANK": str(rank)}, *given) for rank in range(arguments.ranks)]
    ended, _ = ray.wait(ranks, num_returns=1)
    return int(ray.get(ended[0]))


def _rank(environment: dict[str, str], url: str, hive: str, options: str, log_level: str) -> int:
    import torch

    from bombus_trainer.worker import run

    os.environ.update(environment)
    chosen = TrainerOptions.model_validate_json(options)
    logs.configure("trainer", log_level, hive=hive, engine=chosen.engine, rank=environment["RANK"])
    if chosen.threads:
        torch.set_num_threads(chosen.threads)
    return run(url, hive, chosen)


if __name__ == "__main__":
    sys.exit(main())
