"""Lists the open resources of a process, to find those that an environment left behind."""

import asyncio
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec

SETTLE_S = 2.0  # time for threads and processes to end
LOOK_S = 0.02
SHOWN = 5
_OF_THE_LOOP = "asyncio_"  # prefix of the names of `asyncio.to_thread`'s threads, which are kept for reuse
_PROC = Path("/proc")  # where this folder is missing, as on macOS, open files and processes are not checked


class Footprint(msgspec.Struct, frozen=True, kw_only=True):
    """What a process has at one moment: threads, asyncio tasks, open files, child processes, and the contents of some
    folders, each counted by name."""

    threads: Counter[str]
    tasks: Counter[str]
    files: Counter[str]
    processes: Counter[str]
    left: Counter[str]


def footprint(*folders: Path) -> Footprint:
    """Return this process's current resources, and the contents of these folders."""
    this = asyncio.current_task()
    return Footprint(
        threads=Counter(thread.name for thread in threading.enumerate() if not thread.name.startswith(_OF_THE_LOOP)),
        tasks=Counter(task.get_name() for task in asyncio.all_tasks() if task is not this),
        files=Counter(_open_files()),
        processes=Counter(_children()),
        left=Counter(str(path) for folder in folders for path in folder.iterdir() if path.name != "__pycache__"),
    )


async def left_behind(before: Footprint, *folders: Path) -> list[str]:
    """Describe the resources that did not exist `before`. Resources that are about to end get some time to do so."""
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
            continue  # the descriptor of this listing itself
        if not target.startswith("/proc/"):
            yield target


def _children() -> Iterator[str]:
    """Yield the name and the id of each child process of this process."""
    for entry in _PROC.iterdir() if _PROC.is_dir() else ():
        if entry.name.isdigit():
            try:
                name, _, rest = (entry / "stat").read_text().partition("(")[2].rpartition(")")
            except OSError:
                continue  # the process has just ended
            if rest.split()[1] == str(os.getpid()):
                yield f"{name} {entry.name}"
