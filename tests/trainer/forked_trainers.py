"""Start trainers as separate processes in milliseconds: a process that has imported torch forks for each.

It runs no threads, so that a fork loses none. Commands and answers are lines of JSON on its stdin and stdout.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from signal import Signals
from typing import Any

import msgspec

from bombus.faults import Point, arm

RUNS = -1  # the answer in place of the status of a trainer that has not ended
READY = b"ready\n"  # its first line
THREADS = "1"  # of torch in a trainer, so that all its processes compute the same sums


class Ended(msgspec.Struct, frozen=True):
    """How a wait for a trainer ended: `signal` killed or stopped it, or it ended by itself with `code`.

    `said` is the last fault point that it logged.
    """

    signal: int
    stopped: bool
    said: str
    code: int

    def by(self, number: Signals, point: Point) -> bool:
        return self.signal == number and self.said == f"{number.name} at {point}"


class Forge:
    """The test's side, one for several tests. The trainers' stderr goes to `folder`.

    It is ready when it was made: importing torch takes many seconds on a busy machine, and a loop that waits for a
    process has no time for the acknowledgements of its hive.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._living: set[int] = set()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.trainer.forked_trainers"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": THREADS, "OPENBLAS_NUM_THREADS": THREADS},
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == READY, "it ended while it imported"

    async def start(self, url: str, hive: str, options: str, **environment: str) -> int:
        """Start a trainer and return its process id. `options` are `TrainerOptions` as JSON."""
        pid = self._ask({"url": url, "hive": hive, "options": options, "environment": environment})
        self._living.add(pid)
        return pid

    async def wait(self, pid: int) -> Ended:
        """Wait until the trainer has died or was stopped."""
        while (status := self._ask({"wait": pid})) == RUNS:
            await asyncio.sleep(0.01)
        stopped = os.WIFSTOPPED(status)
        if not stopped:
            self._living.discard(pid)
        number = os.WSTOPSIG(status) if stopped else os.WTERMSIG(status)
        said = [line for line in self.log(pid).splitlines() if line.startswith("SIG")]
        return Ended(number, stopped, said[-1] if said else "", os.WEXITSTATUS(status) if os.WIFEXITED(status) else 0)

    async def kill(self, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)
        assert (await self.wait(pid)).signal == signal.SIGKILL

    def log(self, pid: int) -> str:
        return (self._folder / f"{pid}.log").read_text()

    def kill_all(self) -> None:
        for pid in self._living:
            os.kill(pid, signal.SIGKILL)
        self._living.clear()

    def close(self) -> None:
        self.kill_all()
        self._process.communicate()

    def _ask(self, command: dict[str, Any]) -> int:
        """Return what is answered at once: no thread waits for it, since a loop cannot end before its threads."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({**command, "folder": str(self._folder)}).encode() + b"\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())


# ---- the process ------------------------------------------------------------------------------------------------


def main() -> None:
    import transformers.models.llama.modeling_llama  # noqa: F401  # what a trainer would import one by one

    import bombus_trainer.service  # noqa: F401

    assert len(os.listdir("/proc/self/task")) == 1, "a thread is running: a fork would lose it"
    sys.stdout.write(READY.decode())
    sys.stdout.flush()
    for line in sys.stdin:
        command = json.loads(line)
        if "wait" in command:
            changed, status = os.waitpid(command["wait"], os.WUNTRACED | os.WNOHANG)
            _answer(status if changed else RUNS)
            continue
        pid = os.fork()
        if pid == 0:
            os._exit(_trainer(command))
        _answer(pid)


def _answer(value: int) -> None:
    sys.stdout.write(f"{value}\n")
    sys.stdout.flush()


def _trainer(command: dict[str, Any]) -> int:
    from bombus import logs
    from bombus.machine.process import run_service
    from bombus_trainer import service
    from bombus_trainer.options import TrainerOptions

    log = os.open(f"{command['folder']}/{os.getpid()}.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    arm(command["environment"])
    logs.configure("trainer", "info")
    options = TrainerOptions.model_validate_json(command["options"])
    return run_service(service.run(command["url"], command["hive"], options))


if __name__ == "__main__":
    main()
