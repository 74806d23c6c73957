"""The processes of a benchmark's hive, and the CPU time that they use."""

import os
from pathlib import Path

import psutil

TICKS = os.sysconf("SC_CLK_TCK")


def gateway_process(parent: int) -> int:
    """Return the id of the gateway among the processes that `parent` has started."""
    for process in psutil.Process(parent).children(recursive=True):
        if "gateway" in process.cmdline():
            return process.pid
    raise AssertionError("no gateway among the children")


def cpu_s(pid: int) -> float:
    """Return the user and system seconds of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / TICKS
