"""`bombus run-api` as a process, for tests."""

import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil

from bombus.machine.process import free_port
from tests.chaos.killer import kind_of

TRAINER = {
    "wandb_group": "g",
    "wandb_project": "p",
    "batch_size": 2,
    "max_token_len": 64,
    "checkpoint_dir": "c",
    "save_checkpoint_interval": 5,
    "starting_step": 0,
    "num_steps": 7,
}


class RunApi:
    """A running `bombus run-api`, whose address is `url`."""

    def __init__(self, process: subprocess.Popen[str], port: int) -> None:
        self._process = process
        self.url = f"http://127.0.0.1:{port}"

    def services(self, kind: str) -> list[psutil.Process]:
        """Return its processes of a kind that run now."""
        return [child for child in psutil.Process(self._process.pid).children() if kind_of(child) == kind]


@contextlib.contextmanager
def run_api(folder: Path, *arguments: str, port: int = 0) -> Iterator[RunApi]:
    """Run the command from when it is ready, and end it as Ctrl-C does."""
    port = port or free_port()
    log = folder / "run-api.log"
    command = [sys.executable, "-m", "bombus", "run-api", "--port", str(port), "--data-dir", str(folder / "data")]
    with log.open("ab") as told:
        running = subprocess.Popen(
            [*command, *arguments], stdout=subprocess.PIPE, stderr=told, text=True, start_new_session=True
        )
    try:
        assert running.stdout is not None
        assert any(line.startswith("ready ") for line in running.stdout), log.read_text()
        yield RunApi(running, port)
    finally:
        family = psutil.Process(running.pid).children(recursive=True)
        running.send_signal(signal.SIGINT)
        running.wait(60)
        assert psutil.wait_procs(family, timeout=10)[1] == []
