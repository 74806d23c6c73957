"""Ranks that follow a leader, each a process with a whole model, to see what happens when a rank fails or dies.

Run as a program, it imports torch once and forks two ranks for each scenario, so that a scenario takes a second.
"""

import os
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from bombus.config.job import RunConfig
from bombus.errors import EngineFault
from bombus_trainer.backend import BackendLost, Interrupted, TrainerBackend
from bombus_trainer.backends.torch.executor import Executor
from bombus_trainer.data.batch import EpisodeGroup
from bombus_trainer.operations import Board, Leader, follow
from bombus_trainer.publish.checkpoint import Facts, Saved
from bombus_trainer.publish.export import ModelPart, digest_of
from bombus_trainer.ranks import Ranks
from tests.trainer.small_batches import call, episode, tiny_settings

SIZE = 2
WAIT_S = 60.0
GRACE_S = 3.0
SCENARIOS = ("all is well", "no model", "one fails", "the leader fails", "one dies")


class Seen(msgspec.Struct):
    """The outcomes of the leader's calls, in order, and the exit code of each rank's process."""

    calls: list[str]
    codes: list[int]


def play(folder: Path) -> dict[str, Seen]:
    """Return the outcome of every scenario. `folder` has the model."""
    words = [sys.executable, "-m", "tests.trainer.local_ranks", str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # no threads to fork
    subprocess.run(words, env=environment, check=True, timeout=WAIT_S * len(SCENARIOS))
    return msgspec.json.decode((folder / "seen.json").read_bytes(), type=dict[str, Seen])


class Rank(Executor):
    """A whole model on each rank. They synchronise once in each step; ranks that share a model do so all the time."""

    def __init__(self, folder: Path, ranks: Ranks, scenario: str) -> None:
        if scenario == "no model":
            folder = folder / "nowhere"
        super().__init__(folder / "model", tiny_settings())
        self.ranks = ranks
        self.scenario = scenario

    def train_step(
        self, groups: list[EpisodeGroup], step: int, interrupted: Callable[[], bool] = lambda: False
    ) -> dict[str, float]:
        if self.scenario == "one fails" and not self.ranks.leads:
            raise MemoryError("no room for this rank")
        if self.scenario == "the leader fails" and self.ranks.leads:
            raise OSError("the disk is full")
        if self.scenario == "one dies" and not self.ranks.leads:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.ranks.agree(interrupted()):
            raise Interrupted
        metrics = super().train_step(groups, step)
        digests = self.ranks.gather(digest_of(self))
        metrics["different"] = float(len(set(digests)))
        return metrics

    def save(self, root: Path, facts: Facts) -> Saved:
        """Save on the leader alone: two ranks cannot write the same checkpoint at once."""
        return self.ranks.share(super().save(root, facts)) if self.ranks.leads else self.ranks.share()

    def gather_weights(self, part: ModelPart = ModelPart.MODEL) -> None:
        """Do nothing: each of these ranks has the whole model."""


def main(folder: Path) -> None:
    seen: dict[str, Seen] = {}
    for scenario in SCENARIOS:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            ranks = [_start(folder, scenario, rank, listening) for rank in range(SIZE)]
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in ranks]
        calls = msgspec.json.decode((folder / f"{scenario}.json").read_bytes(), type=list[str])
        seen[scenario] = Seen(calls, codes)
    (folder / "seen.json").write_bytes(msgspec.json.encode(seen))


def _start(folder: Path, scenario: str, rank: int, listening: socket.socket) -> int:
    assert len(os.listdir("/proc/self/task")) == 1, "a thread is running: a fork would lose it"
    pid = os.fork()
    if pid == 0:
        signal.alarm(int(WAIT_S))
        code = 1
        try:
            code = _rank(folder, scenario, rank, listening)
        except BaseException:
            traceback.print_exc()
            raise
        finally:
            os._exit(code)
    return pid


def _rank(folder: Path, scenario: str, rank: int, listening: socket.socket) -> int:
    timeout = timedelta(seconds=WAIT_S)
    port = listening.getsockname()[1]
    descriptor = listening.detach()
    if rank:
        os.close(descriptor)
    store = dist.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", port, is_master=rank == 0, timeout=timeout, master_listen_fd=None if rank else descriptor
    )
    dist.init_process_group("gloo", store=PrefixStore("group", store), rank=rank, world_size=SIZE, timeout=timeout)
    board = Board(PrefixStore("board", store), Ranks.of_group(timeout), GRACE_S)

    def load(_: RunConfig) -> TrainerBackend:
        return Rank(folder, board.ranks, scenario)

    if rank:
        try:
            follow(board, load)
        except BackendLost:
            return 3
        return 0
    leader = Leader(board, load, WAIT_S)
    (folder / f"{scenario}.json").write_bytes(msgspec.json.encode(_lead(leader, folder)))
    leader.stop()
    return 0


def _lead(leader: Leader, folder: Path) -> list[str]:
    first = call("a", list(range(20)), [1, 2, 3], episode="e1")
    second = call("b", list(range(20)), [4, 5], episode="e2")
    groups = [EpisodeGroup("task", (episode("e1", 0.0, first), episode("e2", 1.0, second)))]
    seen: list[str] = []

    def attempt(act: Callable[[], object]) -> None:
        try:
            seen.append(str(act()))
        except (EngineFault, Interrupted) as error:
            kind = type(error).__name__
            seen.append(f"{kind}: {error}")

    def train(interrupted: bool = False) -> float:
        return backend.train_step(groups, 1, lambda: interrupted)["different"]

    try:
        backend = leader.load(RunConfig())
    except EngineFault as error:
        attempt(lambda: leader.load(RunConfig()))
        return [f"{type(error).__name__}: {error}", *seen]
    attempt(lambda: train(interrupted=True))
    attempt(train)
    attempt(train)
    facts = Facts(engine="main", run=1, step=1, trainer_epoch=1, attempt=1, config_digest="c", metrics={})
    try:
        saved = backend.save(folder / f"checkpoints-{os.getpid()}", facts)
    except BackendLost:
        return seen
    attempt(lambda: backend.restore(Path(saved.path), "of another"))
    attempt(lambda: backend.restore(Path(saved.path), saved.digest))
    attempt(train)
    return seen


if __name__ == "__main__":
    import transformers.models.llama.modeling_llama  # noqa: F401  # what each rank would import

    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
