"""The processes of a benchmark's hive, and the CPU time that they use."""

import os
from pathlib import Path

import psutil

TICKS = os.sysconf("SC_CLK_TCK")


def process_of(parent: int, service: str) -> int:
    """Return the id of a service, such as "gateway", among the processes that `parent` has started."""
    for process in psutil.Process(parent).children(recursive=True):
        if service in process.cmdline():
            return process.pid
    raise AssertionError(f"no {service} among the children")


def cpu_s(pid: int) -> float:
    """Return the user and system seconds of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def cpu_ns(pid: int) -> int:
    """Return the nanoseconds that the threads of a process have run."""
    return sum(int((task / "schedstat").read_text().split()[0]) for task in Path(f"/proc/{pid}/task").iterdir())
