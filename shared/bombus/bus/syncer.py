"""Syncs the files of a nats-server to the disk whenever a client asks for it: `--durability power`.

One sync serves every request that came before it began (group commit). It covers each file and folder that has changed
since the sync before: the kernel tells which (inotify), so that a store of thousands of files costs no more than those
that are written to. A thread does this beside the server, over a connection of its own.
"""

import ctypes
import json
import logging
import os
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

from bombus.bus.syncing import SYNC_NOW, SYNC_SOON

logger = logging.getLogger(__name__)

Sync = Callable[[int], None]  # of a file's descriptor, as `os.fsync`

FILES_AT_ONCE = 8  # file systems commit what is synced at the same time together
SOON_S = 0.005  # for which requests that are not urgent wait for one that is
AGAIN_S = 0.05
CONNECT_S = 5.0
_READ_BYTES = 256 << 10
# A request is `MSG <subject> <subscription> <where to answer> 0`, and an empty line.
_NOW, _SOON = (f"MSG {subject} ".encode() for subject in (SYNC_NOW, SYNC_SOON))
# Constants of <sys/inotify.h>
_MODIFY, _MOVED_FROM, _MOVED_TO, _CREATE, _DELETE = 0x2, 0x40, 0x80, 0x100, 0x200
_OVERFLOW, _IGNORED, _IS_FOLDER = 0x4000, 0x8000, 0x40000000
_ONLY_FOLDERS = 0x01000000
_EVENT = struct.Struct("iIII")  # watch, what, cookie, length of the name that follows


class StoreChanges:
    """The files and folders below `root` that have changed since they were taken. At first that is all of them."""

    def __init__(self, root: Path) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._inotify = self._libc.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK)
        if self._inotify < 0:
            raise OSError(ctypes.get_errno(), "inotify is not available")
        self._root = os.fspath(root)
        self._watched: dict[int, str] = {}
        self._changed: set[str] = set()
        self.moved = False  # whether something got another name since they were taken
        self._watch(self._root)

    def take(self) -> set[str]:
        """Return what has changed. A write that has returned before this call is in it."""
        self.look()
        changed, self._changed, self.moved = self._changed, set(), False
        return changed

    def look(self) -> bool:
        """Return whether anything has changed, and keep it to be taken."""
        while True:
            try:
                events = os.read(self._inotify, _READ_BYTES)
            except BlockingIOError:
                return bool(self._changed)
            at = 0
            while at < len(events):
                watch, what, _, length = _EVENT.unpack_from(events, at)
                name = events[at + _EVENT.size : at + _EVENT.size + length].rstrip(b"\0")
                at += _EVENT.size + length
                self._note(watch, what, os.fsdecode(name))

    def close(self) -> None:
        os.close(self._inotify)

    def _note(self, watch: int, what: int, name: str) -> None:
        if what & _OVERFLOW:  # some changes are not known
            self._watch(self._root)
            return
        if what & _IGNORED:  # the folder is gone
            self._watched.pop(watch, None)
            return
        folder = self._watched.get(watch)
        if folder is None:
            return
        path = os.path.join(folder, name)
        if what & (_CREATE | _DELETE | _MOVED_FROM | _MOVED_TO):
            self._changed.add(folder)
            self.moved = self.moved or bool(what & (_MOVED_FROM | _MOVED_TO))
        if what & _IS_FOLDER:
            if what & (_CREATE | _MOVED_TO):  # one that was moved here has the path under which it is watched now
                self._watch(path)
        elif not what & (_DELETE | _MOVED_FROM):
            self._changed.add(path)

    def _watch(self, folder: str) -> None:
        """Watch a folder and those below it, and take all that they contain for changed."""
        what = _MODIFY | _CREATE | _DELETE | _MOVED_FROM | _MOVED_TO | _ONLY_FOLDERS
        watch = self._libc.inotify_add_watch(self._inotify, os.fsencode(folder), what)
        if watch < 0:
            code = ctypes.get_errno()
            if not os.path.isdir(folder):
                return  # it is gone again
            raise _SyncFailed(code, "it cannot be watched (fs.inotify.max_user_watches)", folder)
        self._watched[watch] = folder
        self._changed.add(folder)
        try:
            entries = list(os.scandir(folder))
        except FileNotFoundError:
            return
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                self._watch(entry.path)
            else:
                self._changed.add(entry.path)


class Syncer:
    """Syncs the store of one run of a server, from `start` until that has `ended`.

    After a sync that has failed it answers nobody: the kernel takes what could not be written for clean, so a later
    sync would succeed without it. `failure` then says what has happened.
    """

    def __init__(self, store: Path, url: str, ended: threading.Event, sync: Sync = os.fsync) -> None:
        """Watch the store. Raises `OSError` where the kernel cannot tell what changes."""
        self.failure = ""
        self._store = store
        self._changes = StoreChanges(store)
        server = urlsplit(url)
        self._address = (server.hostname, server.port)
        self._login = {"user": server.username, "pass": server.password, "name": "bombus-syncer", "verbose": False}
        self._sync = sync
        self._ended = ended

    def start(self) -> None:
        threading.Thread(target=self._run, name="syncer", daemon=True).start()

    def _run(self) -> None:
        try:
            with ThreadPoolExecutor(FILES_AT_ONCE, "sync") as pool:
                # The entries that name the store, in case they are new.
                self._sync_all({os.fspath(folder) for folder in (self._store.parent, self._store.parent.parent)}, pool)
                while not self._ended.is_set():
                    try:
                        self._serve(pool)
                    except _SyncFailed:
                        raise
                    except OSError as error:
                        logger.debug("the syncer's connection ended: %s", error)
                    self._ended.wait(AGAIN_S)
        except OSError as error:
            self.failure = (
                f"the disk of {self._store} could not be synced, so nothing is acknowledged any more: {error}. What "
                "was acknowledged before is safe. Check the disk, and restart this machine before you start the hive "
                "again: until then files may look whole that are not on the disk"
            )
            logger.error("%s", self.failure)
        finally:
            self._changes.close()

    def _serve(self, pool: ThreadPoolExecutor) -> None:
        """Answer requests until the connection ends. Raises `OSError`."""
        with socket.create_connection(self._address, timeout=CONNECT_S) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            subscriptions = f"SUB {SYNC_NOW} 1\r\nSUB {SYNC_SOON} 2\r\n"
            connection.sendall(f"CONNECT {json.dumps(self._login)}\r\n{subscriptions}".encode())
            rest = b""
            patient: list[bytes] = []  # where to answer requests that are not urgent
            while True:
                connection.settimeout(SOON_S if patient else None)
                try:
                    received = connection.recv(_READ_BYTES)
                except TimeoutError:
                    urgent, patient = patient, []
                else:
                    if not received:
                        return
                    *lines, rest = (rest + received).split(b"\r\n")
                    urgent = [line.split(b" ")[3] for line in lines if line.startswith(_NOW)]
                    patient += [line.split(b" ")[3] for line in lines if line.startswith(_SOON)]
                    if b"PING" in lines:
                        connection.sendall(b"PONG\r\n")
                    self._tell_errors(lines)
                if urgent or (patient and not self._changes.look()):
                    self._sync_all(self._changes.take(), pool)
                    # What was moved meanwhile may have been synced under a name that the disk does not know yet.
                    while self._changes.look() and self._changes.moved:
                        self._sync_all(self._changes.take(), pool)
                    answers, patient = urgent + patient, []
                    connection.sendall(b"".join(b"PUB %s 0\r\n\r\n" % reply for reply in answers))

    def _tell_errors(self, lines: Sequence[bytes]) -> None:
        for line in lines:
            if line.startswith(b"-ERR"):
                logger.warning("the syncer's connection: %s", line.decode(errors="replace"))

    def _sync_all(self, paths: set[str], pool: ThreadPoolExecutor) -> None:
        if not paths:
            return
        first, *others = paths
        syncs = [pool.submit(self._sync_one, path) for path in others]
        self._sync_one(first)
        for sync in syncs:
            sync.result()

    def _sync_one(self, path: str) -> None:
        """Sync a file or a folder, unless it is gone, of which its folder tells. Raises `_SyncFailed`."""
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return
        except OSError as error:
            raise _SyncFailed(error.errno, error.strerror, path) from error
        try:
            self._sync(descriptor)
        except OSError as error:
            raise _SyncFailed(error.errno, error.strerror, path) from error
        finally:
            os.close(descriptor)


class _SyncFailed(OSError):
    """A file may not be on the disk."""
