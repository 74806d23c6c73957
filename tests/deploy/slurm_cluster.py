"""A real Slurm on this machine: munged, slurmctld and two slurmd, with all of their files in one folder.

Debian's packages munge and slurm-wlm suffice. munged refuses to run as root, so it runs as the user that its package
creates. Both nodes are this machine, with ports and spool folders of their own.
"""

import contextlib
import os
import pwd
import secrets
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

from bombus.machine.process import free_port
from tests.patience import wait_until

NODES = ("n1", "n2")
PROGRAMS = ("munged", "slurmctld", "slurmd")
STOP_S = 10  # between the signal that asks a job's processes to end, and the one that makes them
REQUEUE_S = 5  # Slurm lets a requeued job start again when the credentials of its first run have expired

CONFIGURATION = """\
ClusterName=bombus
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire={requeue_s}
CryptoType=crypto/munge
SlurmctldPort={ports[0]}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
MailProg=/bin/true
ReturnToService=2
KillWait={stop_s}
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs={cores}
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs={cores}
PartitionName=main Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
"""


class Slurm:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}

    def run(self, *command: str, cwd: Path | None = None) -> str:
        done = subprocess.run(command, cwd=cwd, env=self.environment, capture_output=True, text=True, timeout=60)
        assert not done.returncode, f"{command}: {done.stderr}"
        return done.stdout.strip()

    def state(self, job: str) -> str:
        """Return the state of a job, such as RUNNING, and how often it was restarted."""
        told = self.run("scontrol", "show", "job", "-o", job)
        words = dict(word.split("=", 1) for word in told.split() if "=" in word)
        return f"{words['JobState']} {words['Restarts']}"


def processes_of(job: str) -> list[psutil.Process]:
    """Return the processes that a job has started, wherever they went in the tree of processes."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            own = process.environ().get("SLURM_JOB_ID") == job
            if own and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


@contextlib.contextmanager
def slurm_cluster() -> Iterator[Slurm]:
    folder = Path(tempfile.mkdtemp(prefix="bombus-slurm-"))
    folder.chmod(0o755)  # munged has to reach its own folder in it
    host = socket.gethostname()
    try:
        ports = [free_port() for _ in range(3)]
        configuration = CONFIGURATION.format(
            host=host, folder=folder, ports=ports, stop_s=STOP_S, requeue_s=REQUEUE_S, cores=os.cpu_count()
        )
        (folder / "slurm.conf").write_text(configuration)
        slurm = Slurm(folder)
        with contextlib.ExitStack() as daemons:
            daemons.enter_context(_daemon(slurm, "munged", _munged(folder / "munge")))
            wait_until((folder / "munge/socket").exists)
            daemons.enter_context(_daemon(slurm, "slurmctld", ["slurmctld", "-D", "-i"]))
            for node in NODES:
                daemons.enter_context(_daemon(slurm, node, ["slurmd", "-D", "-N", node]))
            wait_until(lambda: "idle 2" in _told(slurm))
            try:
                yield slurm
            finally:  # of a test that has failed
                slurm.run("scancel", "--user", str(os.geteuid()))
                wait_until(lambda: not slurm.run("squeue", "--noheader"))
    finally:
        shutil.rmtree(folder)


def _told(slurm: Slurm) -> str:
    """Return the states of nodes, or nothing while slurmctld starts."""
    with contextlib.suppress(AssertionError, subprocess.TimeoutExpired):
        return slurm.run("sinfo", "--noheader", "--format=%t %D")
    return ""


def _munged(folder: Path) -> list[str]:
    folder.mkdir()
    (folder / "key").write_bytes(secrets.token_bytes(1024))
    (folder / "key").chmod(0o400)
    names = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
    command = ["munged", "--foreground", *(f"--{option}={folder / name}" for option, name in names.items())]
    if os.geteuid():
        return command
    user = pwd.getpwnam("munge")
    for path in (folder, folder / "key"):
        os.chown(path, user.pw_uid, user.pw_gid)
    return ["setpriv", f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--clear-groups", *command]


@contextlib.contextmanager
def _daemon(slurm: Slurm, name: str, command: Sequence[str]) -> Iterator[None]:
    with (slurm.folder / f"{name}.out").open("wb") as out:
        process = subprocess.Popen(
            command, env=slurm.environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
        )
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
