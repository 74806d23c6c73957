"""Lists what a process has open, to find what an environment has left behind."""

import asyncio
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec

SETTLE_S = 2.0  # for threads and processes that are ending
LOOK_S = 0.02
SHOWN = 5
_OF_THE_LOOP = "asyncio_"  # threads of `asyncio.to_thread`, which are kept for the next use
_PROC = Path("/proc")  # without it, as on macOS, files and processes are not seen


class Footprint(msgspec.Struct, frozen=True, kw_only=True):
    """Threads, tasks of the loop, open files, child processes, and files in two folders, by their names."""

    threads: Counter[str]
    tasks: Counter[str]
    files: Counter[str]
    processes: Counter[str]
    left: Counter[str]


def footprint(*folders: Path) -> Footprint:
    """Return what this process has now, and what is in these folders."""
    this = asyncio.current_task()
    return Footprint(
        threads=Counter(thread.name for thread in threading.enumerate() if not thread.name.startswith(_OF_THE_LOOP)),
        tasks=Counter(task.get_name() for task in asyncio.all_tasks() if task is not this),
        files=Counter(_open_files()),
        processes=Counter(_children()),
        left=Counter(str(path) for folder in folders for path in folder.iterdir() if path.name != "__pycache__"),
    )


async def left_behind(before: Footprint, *folders: Path) -> list[str]:
    """Describe what is there now and was not before. What is about to end gets some time to do so."""
    deadline = time.monotonic() + SETTLE_S
    while True:
        found = list(_more(before, footprint(*folders)))
        if not found or time.monotonic() > deadline:
            return found
        await asyncio.sleep(LOOK_S)


def _more(before: Footprint, now: Footprint) -> Iterator[str]:
    for name, what in (
        ("threads", "threads"),
        ("tasks", "tasks of the loop"),
        ("files", "open files"),
        ("processes", "processes"),
        ("left", "files on the disk"),
    ):
        more = getattr(now, name) - getattr(before, name)
        if more:
            shown = ", ".join(sorted(more)[:SHOWN])
            yield f"{sum(more.values())} {what} ({shown}{', ...' if len(more) > SHOWN else ''})"


def _open_files() -> Iterator[str]:
    folder = _PROC / "self/fd"
    for entry in folder.iterdir() if folder.is_dir() else ():
        try:
            target = os.readlink(entry)
        except OSError:
            continue  # it is that of this very listing
        if not target.startswith("/proc/"):
            yield target


def _children() -> Iterator[str]:
    """Yield the name and the id of each process that this one is the parent of."""
    for entry in _PROC.iterdir() if _PROC.is_dir() else ():
        if entry.name.isdigit():
            try:
                name, _, rest = (entry / "stat").read_text().partition("(")[2].rpartition(")")
            except OSError:
                continue  # it has ended meanwhile
            if rest.split()[1] == str(os.getpid()):
                yield f"{name} {entry.name}"
