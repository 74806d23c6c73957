"""The rendered batch script, submitted to a real Slurm: it trains, goes on from the log, and leaves nothing behind."""

import os
import re
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml

from bombus.cli import main
from bombus.machine.process import free_port
from tests.deploy.program import train
from tests.deploy.slurm_cluster import PROGRAMS, Slurm, processes_of, slurm_cluster
from tests.patience import wait_until

pytestmark = pytest.mark.skipif(not os.environ.get("BOMBUS_DEPLOY"), reason="make test-deploy runs it")
READY_S = 120.0


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    assert not missing, f"{missing}: apt-get install slurm-wlm munge"
    with slurm_cluster() as running:
        yield running


class Job:
    """A submitted job. Its log goes on when it is requeued."""

    def __init__(self, slurm: Slurm, folder: Path, nodes: int) -> None:
        self.slurm, self.folder, self.port = slurm, folder, free_port()
        cluster = {
            "hive": "demo",
            "data_dir": "data",
            "gateway": {"port": self.port},
            "web": {"enabled": False},
            "deploy": {"nodes": nodes},
            "engines": {"main": {"trainer": {"threads": 1}, "inference": [{"threads": 1}]}},
        }
        (folder / "cluster.yaml").write_text(yaml.safe_dump(cluster))
        assert not main(
            ["deploy", "render", "--config", str(folder / "cluster.yaml"), "--to", "slurm", "--out", str(folder)]
        )
        slurm.environment["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        told = slurm.run("sbatch", "--parsable", "bombus.sbatch", cwd=folder)
        self.id = told.split(";")[0]

    @property
    def log(self) -> str:
        found = list(self.folder.glob("bombus-demo-*.log"))
        return found[0].read_text() if found else ""

    def wait_until_ready(self, times: int = 1) -> None:
        """Wait until the job's hive has started so many times, and its replicas have what was trained."""
        wait_until(lambda: self.log.count("ready http://") == times, READY_S)
        wait_until(lambda: httpx.get(f"{self.url}/ready").status_code == httpx.codes.OK, READY_S)

    def steps(self) -> list[int]:
        """Return the numbers of the steps that were trained, in order."""
        return [int(number) for number in re.findall(r"trainer .* step (\d+): reward_mean", self.log)]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def cancel(self) -> None:
        self.slurm.run("scancel", self.id)
        wait_until(self.is_gone)

    def is_gone(self) -> bool:
        """Return whether the job's nodes are free again, and no process of it is left."""
        return "idle 2" in self.slurm.run("sinfo", "--noheader", "--format=%t %D") and not processes_of(self.id)


@pytest.mark.parametrize(("nodes", "requeue"), [(1, "by the operator"), (2, "when its time is nearly over")])
def test_a_job_trains_goes_on_from_the_log_when_requeued_and_leaves_no_process_when_cancelled(
    slurm: Slurm, tmp_path: Path, nodes: int, requeue: str
) -> None:
    job = Job(slurm, tmp_path, nodes)
    job.wait_until_ready()
    rewards = train(job.url, 6)
    assert sum(rewards[-2:]) > sum(rewards[:2]), "the reward rises"

    if requeue == "by the operator":
        slurm.run("scontrol", "requeue", job.id)
    else:
        slurm.run("scancel", "--batch", "--signal=USR1", job.id)  # what Slurm does by `--signal` at that time
    job.wait_until_ready(times=2)
    assert slurm.state(job.id) == "RUNNING 1"
    train(job.url, 2)
    wait_until(lambda: len(job.steps()) >= 8)
    assert job.steps() == list(range(1, 9)), "no step is lost or made again"

    job.cancel()


def test_a_node_whose_hive_ends_does_not_leave_the_others_holding_the_allocation(slurm: Slurm, tmp_path: Path) -> None:
    job = Job(slurm, tmp_path, 2)
    job.wait_until_ready()
    (second,) = [process for process in processes_of(job.id) if "node-1.yaml" in process.cmdline()]
    second.send_signal(signal.SIGKILL)
    wait_until(job.is_gone)
