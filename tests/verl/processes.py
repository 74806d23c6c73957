"""Ranks of a trainer without a hive: started as processes of their own by a test, and what each of them runs."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bombus_trainer.ranks import Ranks

WAIT_S = 400
EXCHANGE_S = 60


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


def found_by_ranks(module: str, count: int, folder: Path) -> dict[str, Any]:
    """Run `module` on `count` ranks, alone or by torchrun, and return what its `on_ranks` found."""
    ranks = ["torch.distributed.run", f"--nproc-per-node={count}", f"--master-port={free_port()}", "-m"]
    command = [sys.executable, "-m", *(ranks if count > 1 else []), module, str(folder), str(folder / "results.json")]
    done = subprocess.run(
        command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=WAIT_S
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads((folder / "results.json").read_text())
    return found


def on_ranks(compute: Callable[[Path, Ranks], dict[str, object]]) -> None:
    """Compute as this process' rank, and let the leader write down what it found: `python -m ... FOLDER RESULTS`."""
    folder, results = map(Path, sys.argv[1:])
    torch.set_num_threads(1)
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo")
    ranks = Ranks.of_group(timedelta(seconds=EXCHANGE_S)) if dist.is_initialized() else Ranks.alone()
    found = compute(folder, ranks)
    if ranks.leads:
        results.write_text(json.dumps({**found, "ranks": ranks.size}))
    if dist.is_initialized():
        dist.destroy_process_group()
