"""Ranks that follow a leader, each a process with a whole model: what they compute, and what happens when one fails.

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
from bombus.operations import (
    AdamParams,
    CheckpointKind,
    CreateModel,
    Failed,
    ForwardBackward,
    LoadWeights,
    OptimStep,
    Reduction,
    Result,
    SaveWeights,
    Scores,
    StepTaken,
)
from bombus_trainer.backend import BackendLost, Interrupted, OperationBackend, TrainerBackend
from bombus_trainer.backends.torch.executor import Executor
from bombus_trainer.data.batch import EpisodeGroup
from bombus_trainer.data.fates import StepAccount
from bombus_trainer.operations.executor import OperationExecutor
from bombus_trainer.operations.settings import ExecutorSettings
from bombus_trainer.publish.export import digest_of
from bombus_trainer.publish.step_checkpoint import StepFacts
from bombus_trainer.rank_leader import Board, Leader, follow
from bombus_trainer.ranks import Ranks
from tests.trainer.operations.small_models import BASE, CROSS_ENTROPY, SPEC, datum, floats
from tests.trainer.small_batches import call, episode, tiny_settings

SIZE = 2
WAIT_S = 60.0
GRACE_S = 3.0
SCENARIOS = ("all is well", "no model", "one fails", "the leader fails", "one dies", "operations", "one cannot read")


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
    """A backend of several ranks, one of which may fail."""

    def __init__(self, folder: Path, ranks: Ranks, scenario: str) -> None:
        if scenario == "no model":
            folder = folder / "nowhere"
        super().__init__(folder / "model", tiny_settings(), ranks=ranks)
        self.scenario = scenario

    def train_step(
        self,
        groups: list[EpisodeGroup],
        step: int,
        interrupted: Callable[[], bool] = lambda: False,
        account: Callable[[StepAccount], None] = lambda account: None,
    ) -> dict[str, float]:
        if self.scenario == "one fails" and not self.ranks.leads:
            raise MemoryError("no room for this rank")
        if self.scenario == "the leader fails" and self.ranks.leads:
            raise OSError("the disk is full")
        if self.scenario == "one dies" and not self.ranks.leads:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.ranks.agree(interrupted()):
            raise Interrupted
        metrics = super().train_step(groups, step, account=account)
        digests = self.ranks.gather(digest_of(self))
        metrics["versions"] = float(len(set(digests)))
        return metrics


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

    def load_base(_: RunConfig, settings: ExecutorSettings) -> OperationExecutor:
        if scenario == "one cannot read" and rank:
            settings = settings.model_copy(update={"checkpoints": settings.checkpoints / "elsewhere"})
        settings = settings.model_copy(update={"scratch": settings.scratch / f"rank-{rank}"})
        return OperationExecutor(folder / "model", tiny_settings(model={"path": BASE}), settings, ranks=board.ranks)

    if rank:
        try:
            follow(board, load, load_base)
        except BackendLost:
            return 3
        return 0
    leader = Leader(board, load, load_base, WAIT_S)
    lead = _lead_operations if scenario in ("operations", "one cannot read") else _lead
    (folder / f"{scenario}.json").write_bytes(msgspec.json.encode(lead(leader, folder)))
    if scenario == "operations":
        assert store.num_keys() < 10, "what is over is not kept"
    leader.stop()
    return 0


def _lead_operations(leader: Leader, folder: Path) -> list[str]:
    root = folder / f"models-{os.getpid()}"
    settings = ExecutorSettings(checkpoints=root / "checkpoints", recovery=root / "recovery", scratch=root / "scratch")
    try:
        return operated(leader.load_base(RunConfig(), settings))
    except BackendLost as error:
        return [f"BackendLost: {error}"]


def operated(executor: OperationBackend) -> list[str]:
    """Train a model, spoil its gradient, train on, save and load. Returns what came of each operation."""
    data = (datum([1, 2, 3, 4], [2, 3, 4, 5]), datum([7, 8, 9], [8, 9, 10]), datum([11, 12], [12, 13]))
    spoilt = (*data[:2], datum([11, 12], [12, 13], weights=floats(3e38, 3e38)))
    executor.execute("m", CreateModel(base=BASE, adapter=SPEC))
    seen: list[str] = []
    for operation in (
        ForwardBackward(loss=CROSS_ENTROPY, data=data),
        ForwardBackward(loss=CROSS_ENTROPY, data=data[:1]),
        OptimStep(adam=AdamParams(learning_rate=0.01), reduction=Reduction.SUM),
        ForwardBackward(loss=CROSS_ENTROPY, data=spoilt),
        OptimStep(adam=AdamParams(learning_rate=0.01), reduction=Reduction.SUM),
        ForwardBackward(loss=CROSS_ENTROPY, data=data, forward_only=True),
        SaveWeights(checkpoint=CheckpointKind.TRAINING, name="x"),
        SaveWeights(checkpoint=CheckpointKind.TRAINING, name="x"),
        LoadWeights(checkpoint="m/training/x", with_optimizer=True),
        ForwardBackward(loss=CROSS_ENTROPY, data=data, forward_only=True),
    ):
        seen.append(_shown(executor.execute("m", operation)))
    return seen


def _shown(result: Result) -> str:
    match result:
        case Scores():
            return f"loss {result.loss:.4f}, {len(result.outputs)} outputs"
        case StepTaken():
            return f"step {result.step}, norm {result.grad_norm:.4f}"
        case Failed():
            return result.error
        case _:
            return type(result).__name__


def trained(backend: TrainerBackend, interrupted: Callable[[], bool] = lambda: False) -> str:
    """Make a step, and return what came of it."""
    first = call("a", list(range(20)), [1, 2, 3], episode="e1")
    second = call("b", list(range(20)), [4, 5], episode="e2")
    third = call("c", list(range(5, 15)), [6, 7, 8], episode="e3")
    played = (episode("e1", 0.0, first), episode("e2", 1.0, second), episode("e3", 0.25, third))
    accounts: list[StepAccount] = []
    metrics = backend.train_step([EpisodeGroup("task", played)], 1, interrupted, accounts.append)
    counts = {name: row for account in accounts for name, row in account.tokens.episodes.items()}
    shown = ", ".join(f"{name} {metrics[name]:.4f}" for name in ("loss", "grad_norm", "clip_fraction"))
    return f"{metrics.get('versions', 1.0):.0f} version: {shown}, tokens {counts}, of {metrics['bins']:.0f} bins"


def _lead(leader: Leader, folder: Path) -> list[str]:
    seen: list[str] = []

    def attempt(act: Callable[[], object]) -> None:
        try:
            seen.append(str(act()))
        except (EngineFault, Interrupted) as error:
            kind = type(error).__name__
            seen.append(f"{kind}: {error}")

    def train(interrupted: bool = False) -> str:
        return trained(backend, lambda: interrupted)

    try:
        backend = leader.load(RunConfig())
    except EngineFault as error:
        attempt(lambda: leader.load(RunConfig()))
        return [f"{type(error).__name__}: {error}", *seen]
    attempt(lambda: train(interrupted=True))
    attempt(train)
    attempt(train)
    facts = StepFacts(engine="main", run=1, step=1, trainer_epoch=1, attempt=1, config_digest="c", metrics={})
    try:
        saved = backend.save(folder / f"checkpoints-{os.getpid()}", facts)
    except BackendLost:
        return seen
    attempt(lambda: backend.restore(saved.path, "of another"))
    attempt(lambda: backend.restore(saved.path, saved.digest))
    attempt(train)
    return seen


if __name__ == "__main__":
    import transformers.models.llama.modeling_llama  # noqa: F401  # what each rank would import

    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
