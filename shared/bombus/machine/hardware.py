"""Finds out what hardware this machine has, without importing torch, which would take seconds."""

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import msgspec

from bombus.errors import Code, Refused

NVIDIA_SMI_S = 15.0
CGROUP = Path("/sys/fs/cgroup")


class Gpu(msgspec.Struct, frozen=True):
    name: str
    memory_bytes: int


def nvidia_gpus() -> tuple[Gpu, ...]:
    """Return the GPUs that `nvidia-smi` lists. Return none if `nvidia-smi` is missing or fails, as it does without a
    driver."""
    found = shutil.which("nvidia-smi")
    if found is None:
        return ()
    query = [found, "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=NVIDIA_SMI_S)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    lines = [line.rpartition(",") for line in done.stdout.splitlines()] if done.returncode == 0 else []
    return tuple(Gpu(name.strip(), int(size) << 20) for name, _, size in lines if size.strip().isdigit())


def gpu_environment(numbers: Sequence[int]) -> dict[str, str]:
    """Return the variables that make a process see only these GPUs.

    GPUs are numbered as in nvidia-smi or, if our own CUDA_VISIBLE_DEVICES is set, by their position in it. Raises
    `Refused(BAD_CONFIG)` if CUDA_VISIBLE_DEVICES does not have that position.
    """
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is None:
        return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": ",".join(map(str, numbers))}
    names = [name for name in given.split(",") if name]
    if beyond := [number for number in numbers if number >= len(names)]:
        why = f"GPU {beyond[0]} is not among the {len(names)} of CUDA_VISIBLE_DEVICES={given!r}"
        raise Refused(Code.BAD_CONFIG, why)
    return {"CUDA_VISIBLE_DEVICES": ",".join(names[number] for number in numbers)}


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory_bytes(cgroup: Path = CGROUP) -> tuple[int, int]:
    """Return the total memory and the free memory. In a container with a limit, these are the container's."""
    page = os.sysconf("SC_PAGE_SIZE")
    total = page * os.sysconf("SC_PHYS_PAGES")
    free = _available(default=total)
    limit, used = (_number(cgroup / name) for name in ("memory.max", "memory.current"))
    if limit is not None and limit < total:
        return limit, min(free, max(limit - (used or 0) + _cached(cgroup), 0))
    return total, free


def _cached(cgroup: Path) -> int:
    """Return how much of a container's memory is file cache, which is freed when memory is needed."""
    try:
        fields = (line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        return sum(int(size) for name, size in fields if name in ("active_file", "inactive_file"))
    except (OSError, ValueError):
        return 0


def _available(default: int) -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    except OSError:
        pass  # not Linux
    return default


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
