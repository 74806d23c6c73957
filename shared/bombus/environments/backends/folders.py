"""Folders for backends. They are removed with all their contents, even after their server was killed."""

import asyncio
import fcntl
import logging
import os
import tempfile
from pathlib import Path

import msgspec

from bombus.machine.process import kill

log = logging.getLogger(__name__)

PREFIX = "bombus-backend-"
LOCK = ".server"  # a file in each folder, locked while the process that made the folder is alive


class BackendFolder:
    """A new folder for the files that a backend writes."""

    def __init__(self, kind: str) -> None:
        """Make the folder, with `kind` as a part of its name. Raises `OSError` if it cannot be made."""
        self.path = tempfile.mkdtemp(prefix=f"{PREFIX}{kind}-")
        self._lock = _locked(Path(self.path))
        if self._lock is None:
            raise OSError(f"{self.path} was mistaken for a folder that a killed server left behind: try again")

    async def remove(self) -> None:
        """Remove the folder and its contents. Raises `OSError` if anything is left."""
        await _remove(self.path)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


async def empty_folder(path: str) -> None:
    """Remove all contents of a folder, at any depth and with any permissions. Raises `OSError` if that fails."""
    owner = os.stat(path)
    await _remove(path)
    os.mkdir(path, 0o700)
    if os.geteuid() == 0:
        os.chown(path, owner.st_uid, owner.st_gid)


class FolderUse(msgspec.Struct, frozen=True):
    """The disk usage of a folder."""

    megabytes: int
    files: int  # number of files, including folders and links


async def use_of(path: str) -> FolderUse:
    """Return the disk usage of a folder. Anything that cannot be read is not counted."""
    return FolderUse(*await asyncio.gather(_counted("-m", path), _counted("--inodes", path)))


async def _counted(what: str, path: str) -> int:
    _, printed = await _run("du", "-s", what, "--", path)
    last = printed.splitlines()[-1:]  # earlier lines are about folders that could not be read
    return int(last[0].split()[0]) if last and last[0][:1].isdigit() else 0


async def remove_left_folders() -> int:
    """Remove the folders left by killed servers, and return how many there were."""
    removed = 0
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        try:
            if folder.is_symlink() or (lock := _locked(folder, is_new=False)) is None:
                continue
            await _remove(str(folder))
            os.close(lock)
        except OSError as error:
            log.warning("%s, left behind by a server, could not be removed: %s", folder, error)
        else:
            removed += 1
    return removed


def _locked(folder: Path, is_new: bool = True) -> int | None:
    """Lock a folder, and return the lock's file descriptor, or None if its server is alive or there is no lock file."""
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_CREAT if is_new else 0)
    try:
        lock = os.open(folder / LOCK, flags, 0o600)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    return lock


async def _remove(path: str) -> None:
    """Remove a folder. The programs used here can handle deeper nesting than Python's functions."""
    if not os.path.lexists(path):
        return
    if os.geteuid() != 0:
        await _run("chmod", "-R", "u+rwx", "--", path)  # contents that cannot be listed cannot be removed
    _, printed = await _run("rm", "-rf", "--", path)
    if os.path.lexists(path):
        raise OSError(f"{path} could not be removed: {printed.strip()[-300:]}")


async def _run(*words: str) -> tuple[int, str]:
    """Run a short-lived program, and return its exit code and output.

    No Python code runs between fork and exec, so this process, which may be large, is not copied.
    """
    process = await asyncio.create_subprocess_exec(
        *words,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        printed, _ = await process.communicate()
    except BaseException:  # cancelled, for instance by a time limit
        kill(process)
        await process.wait()
        raise
    return process.returncode or 0, printed.decode(errors="replace")
