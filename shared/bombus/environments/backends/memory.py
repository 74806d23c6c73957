"""How much memory a process and its descendants use together, as Linux counts it."""

import contextlib
import os
from collections.abc import Iterator

PROC = "/proc"


def memory_of(leader: int, suspicious: int) -> int:
    """Return the memory in bytes of a process and its descendants, including their in-memory files.

    A quick first estimate counts shared pages once per process. They are counted exactly only if that estimate is above
    `suspicious` bytes.
    """
    processes = list(_descendants(leader))
    roughly = sum(_kilobytes(f"{PROC}/{each}/status", "RssAnon:", "RssShmem:") for each in processes)
    files = _files_in_memory(processes)
    if 1024 * roughly + files <= suspicious:
        return 1024 * roughly + files
    return 1024 * sum(_kilobytes(f"{PROC}/{each}/smaps_rollup", "Pss:") for each in processes) + files


def _descendants(leader: int) -> Iterator[int]:
    """Yield a process and its descendants. A process orphaned in a PID namespace remains a descendant, because it gets
    a new parent in that namespace."""
    left = [leader]
    while left:
        yield (process := left.pop())
        with contextlib.suppress(OSError):  # the process has ended
            for thread in os.listdir(f"{PROC}/{process}/task"):
                left += map(int, _text(f"{PROC}/{process}/task/{thread}/children").split())


def _kilobytes(path: str, *names: str) -> int:
    return sum(int(line.split()[1]) for line in _text(path).splitlines() if line.startswith(names))


def _files_in_memory(processes: list[int]) -> int:
    """Return the total size in bytes of open in-memory files without a name, such as those made by `memfd_create`."""
    found: dict[int, int] = {}
    for process in processes:
        with contextlib.suppress(OSError):
            for entry in os.scandir(f"{PROC}/{process}/fd"):
                with contextlib.suppress(OSError):
                    if os.readlink(entry.path).startswith("/memfd:"):
                        status = os.stat(entry.path)
                        found[status.st_ino] = 512 * status.st_blocks
    return sum(found.values())


def _text(path: str) -> str:
    try:
        with open(path) as file:
            return file.read()
    except OSError:
        return ""  # the process has ended
