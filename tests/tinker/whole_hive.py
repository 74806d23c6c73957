"""A running `bombus up`, for the tests with clients' own packages. This imports none of them."""

import os
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from bombus.machine.process import free_port

PYTHON = os.environ.get("BOMBUS_PYTHON", "")  # of the environment that the hive runs in
READY_S = 120.0


class Hive:
    """A running `bombus up`."""

    def __init__(self, up: "subprocess.Popen[str]", url: str) -> None:
        self._up = up
        self.url = url

    def kill(self, service: str) -> None:
        """Kill the process of a service. `bombus up` starts another."""
        (process,) = (
            child
            for child in psutil.Process(self._up.pid).children()
            if service in child.cmdline() or f"bombus_{service}" in " ".join(child.cmdline())
        )
        process.kill()


@contextmanager
def running(folder: Path, *others: str) -> Iterator[Hive]:
    """Run `bombus up` while the block runs, with these `others` of its options, and audit its log after it."""
    options = ("--port", str(free_port()), "--data-dir", str(folder / "data"), "--threads", "1", "--record-samples")
    with (folder / "up.log").open("wb") as log:
        command = [PYTHON, "-m", "bombus", "up", *options, *others]
        up = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True)
    try:
        yield Hive(up, ready_url(up, folder / "up.log"))
    finally:
        up.terminate()
        up.wait(60)
    audit = subprocess.run([PYTHON, "-m", "bombus", "audit", "--data", folder / "data"], capture_output=True, text=True)
    assert audit.returncode == 0, audit.stdout + audit.stderr


def ready_url(up: "subprocess.Popen[str]", log: Path) -> str:
    assert up.stdout is not None
    timer = threading.Timer(READY_S, up.kill)
    timer.start()
    try:
        for line in up.stdout:
            if line.startswith("ready "):
                return line.split()[1]
    finally:
        timer.cancel()
    raise AssertionError(f"bombus up did not become ready:\n{log.read_text()}")
