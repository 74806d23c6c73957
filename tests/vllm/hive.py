"""A hive of real processes, started as an operator would, with vLLM as its only replica."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil

from bombus.bus import EmbeddedServer
from bombus.machine.process import PARENT_VARIABLE, free_port

READY_S = 60.0
STOP_S = 60.0


class VllmHive:
    """`url` is the gateway's, `nats` is the bus's, and `folder` has the logs of all processes."""

    def __init__(self, folder: Path, nats: str) -> None:
        self.folder = folder
        self.nats = nats
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, service: str, *arguments: str) -> None:
        command = [sys.executable, "-m", "bombus", service, "--nats", self.nats, "--hive", "main", *arguments]
        with (self.folder / f"{service}.log").open("wb") as log:
            self.processes[service] = subprocess.Popen(
                command, stdout=log, stderr=log, start_new_session=True,
                env={**os.environ, PARENT_VARIABLE: str(os.getpid()), "OMP_WAIT_POLICY": "PASSIVE"},
            )  # fmt: skip

    def log(self, service: str) -> str:
        return (self.folder / f"{service}.log").read_text()

    def engine(self) -> list[psutil.Process]:
        """Return vLLM's server, its engine and its worker, which are descendants of the replica's keeper."""
        replica = psutil.Process(self.processes["inference"].pid)
        (keeper,) = replica.children()
        return keeper.children(recursive=True)

    def stop(self, service: str) -> None:
        process = self.processes.pop(service)
        process.send_signal(signal.SIGINT)
        process.wait(STOP_S)

    def wait_for_the_gateway(self) -> None:
        deadline = time.monotonic() + READY_S
        while True:
            try:
                if httpx.get(f"{self.url}/health", timeout=2).status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            assert time.monotonic() < deadline, self.log("gateway")


@contextmanager
def vllm_hive(folder: Path, *inference: str, trainer: tuple[str, ...] = ()) -> Iterator[VllmHive]:
    server = EmbeddedServer(folder / "nats")
    server.start()
    hive = VllmHive(folder, server.url)
    try:
        hive.start("coordinator")
        hive.start("trainer", "--folder", str(folder / "engines"), "--threads", "1", *trainer)
        hive.start("inference", "--backend", "vllm", "--threads", "1", *inference)
        hive.start("gateway", "--port", str(hive.port))
        hive.wait_for_the_gateway()
        yield hive
    finally:
        for service in list(hive.processes):
            hive.stop(service)
        server.stop()
