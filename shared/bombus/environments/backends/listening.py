"""Find out which process listens on a port. Another program may bind a free port before a backend does."""

import os
from collections.abc import Iterator
from pathlib import Path

PROC = Path("/proc")
_LISTENS = "0A"  # the code for the state LISTEN in the kernel's table


def listens(pid: int, port: int) -> bool:
    """Return whether a process or one of its descendants listens on a TCP port.

    If the kernel does not provide this information, return True.
    """
    if not (PROC / "net" / "tcp").exists():
        return True
    sockets = {f"socket:[{inode}]" for inode in _inodes(port)}
    return any(link in sockets for each in _with_children(pid) for link in _links(each))


def _inodes(port: int) -> Iterator[str]:
    """Yield the inode numbers of the sockets that listen on a port."""
    for table in (PROC / "net" / "tcp", PROC / "net" / "tcp6"):
        if not table.exists():
            continue
        for line in table.read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTENS and int(fields[1].rpartition(":")[2], 16) == port:
                yield fields[9]


def _with_children(pid: int) -> Iterator[int]:
    yield pid
    try:
        children = (PROC / str(pid) / "task" / str(pid) / "children").read_text().split()
    except OSError:  # the process has ended, or the kernel has no such list
        return
    for child in children:
        yield from _with_children(int(child))


def _links(pid: int) -> Iterator[str]:
    """Yield the targets of a process's file descriptors."""
    try:
        for descriptor in (PROC / str(pid) / "fd").iterdir():
            yield os.readlink(descriptor)
    except OSError:  # the process has ended, or has just closed a file
        return
