"""Syncs the files of a nats-server to the disk whenever a client asks for it: `--durability power`.

One sync serves every request that came before it began (group commit). It covers the files and folders that have
changed since the last sync: the kernel reports them (inotify), so the cost does not grow with the number of files in
the store. A thread of the server's parent process does this, over its own connection.
"""

import ctypes
import json
import logging
import os
import re
import socket
import struct
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

from bombus.bus.syncing import SYNC

logger = logging.getLogger(__name__)

Sync = Callable[[int], None]  # takes a file descriptor, as `os.fsync` does

FILES_AT_ONCE = 8  # file systems commit concurrent syncs together
AGAIN_S = 0.05
CONNECT_S = 5.0
_READ_BYTES = 256 << 10
_REQUEST = re.compile(rb"MSG \S+ 1 (\S+) 0")  # a message on our subscription 1, with the subject for the answer
# Constants of <sys/inotify.h>
_MODIFY, _MOVED_FROM, _MOVED_TO, _CREATE, _DELETE = 0x2, 0x40, 0x80, 0x100, 0x200
_OVERFLOW, _IGNORED, _IS_FOLDER = 0x4000, 0x8000, 0x40000000
_ONLY_FOLDERS = 0x01000000
_EVENT = struct.Struct("iIII")  # watch, what, cookie, length of the name that follows


class SyncFailed(Exception):
    """Something that was stored may not be on the disk."""


class StoreChanges:
    """Tracks the files and folders below `root` that have changed since `take` was last called; at first, all of them.

    Raises `OSError` if they cannot be watched, and `SyncFailed` if watching fails later.
    """

    def __init__(self, root: Path) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._inotify = self._libc.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK)
        if self._inotify < 0:
            raise OSError(ctypes.get_errno(), "inotify cannot be used (fs.inotify.max_user_instances)")
        self._root = os.fspath(root)
        self._watched: dict[int, str] = {}
        self._changed: set[str] = set()
        self.moved = False  # whether something may have been renamed since the last `take`
        self._watch(self._root)

    def take(self) -> set[str]:
        """Return what has changed, including every write that returned before this call."""
        self.look()
        changed, self._changed, self.moved = self._changed, set(), False
        return changed

    def look(self) -> bool:
        """Return whether there are changes that `take` has not returned yet."""
        try:
            while True:
                self._note_all(os.read(self._inotify, _READ_BYTES))
        except BlockingIOError:
            return bool(self._changed)
        except OSError as error:  # some of the changes that the kernel reported were not noted
            raise SyncFailed(str(error)) from error

    def close(self) -> None:
        os.close(self._inotify)

    def _note_all(self, events: bytes) -> None:
        at = 0
        while at < len(events):
            watch, what, _, length = _EVENT.unpack_from(events, at)
            name = events[at + _EVENT.size : at + _EVENT.size + length].rstrip(b"\0")
            at += _EVENT.size + length
            self._note(watch, what, os.fsdecode(name))

    def _note(self, watch: int, what: int, name: str) -> None:
        if what & _OVERFLOW:  # the kernel has dropped some changes
            self.moved = True
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
            if what & (_CREATE | _MOVED_TO):  # a folder that was moved here is watched under its new path from now on
                self._watch(path)
        elif not what & (_DELETE | _MOVED_FROM):
            self._changed.add(path)

    def _watch(self, folder: str) -> None:
        """Watch a folder and those below it, and consider everything in them changed."""
        what = _MODIFY | _CREATE | _DELETE | _MOVED_FROM | _MOVED_TO | _ONLY_FOLDERS
        watch = self._libc.inotify_add_watch(self._inotify, os.fsencode(folder), what)
        if watch < 0:
            code = ctypes.get_errno()
            if not os.path.isdir(folder):
                return  # it is gone again
            raise OSError(code, "it cannot be watched (fs.inotify.max_user_watches)", folder)
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
    """Syncs the store of one run of a server, from `start` until the run has `ended`.

    After a sync has failed, no further request is answered: the kernel marks pages as clean even if it could not write
    them, so a later sync would succeed without writing them. `failure` then says what happened.
    """

    def __init__(self, store: Path, url: str, ended: threading.Event, sync: Sync = os.fsync) -> None:
        """Watch the store. Raises `OSError` if the kernel cannot report what changes."""
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
                self._sync_all(self._parents(), pool)
                while not self._ended.is_set():
                    try:
                        self._serve(pool)
                    except OSError as error:
                        logger.debug("the syncer's connection ended: %s", error)
                    self._ended.wait(AGAIN_S)
        except Exception as error:  # nothing awaits this thread, and without it nothing is acknowledged
            self.failure = (
                f"the disk of {self._store} could not be synced, so nothing is acknowledged any more: {error}. What "
                "was acknowledged before is safe. Check the disk, and restart this machine before you start the hive "
                "again: until then, files may look complete that are not on the disk"
            )
            logger.error("%s", self.failure)
        finally:
            self._changes.close()

    def _parents(self) -> set[str]:
        """Return the folders above the store that are on its file system: their entries on the path to the store may be
        new."""
        device = self._store.stat().st_dev
        return {
            os.fspath(folder)
            for folder in self._store.parents
            if folder.stat().st_dev == device and os.access(folder, os.R_OK)
        }

    def _serve(self, pool: ThreadPoolExecutor) -> None:
        """Answer requests until the connection ends. Raises `OSError`."""
        with socket.create_connection(self._address, timeout=CONNECT_S) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(f"CONNECT {json.dumps(self._login)}\r\nSUB {SYNC} 1\r\n".encode())
            connection.settimeout(None)
            rest = b""
            while received := connection.recv(_READ_BYTES):
                *lines, rest = (rest + received).split(b"\r\n")
                for line in lines:
                    if line.startswith(b"-ERR"):
                        logger.warning("the syncer's connection: %s", line.decode(errors="replace"))
                if b"PING" in lines:
                    connection.sendall(b"PONG\r\n")
                replies = [request[1] for request in map(_REQUEST.fullmatch, lines) if request is not None]
                if replies:
                    self._sync_all(self._changes.take(), pool)
                    # Files that were renamed during the sync were not found, or have names that are not on the disk
                    # yet.
                    while self._changes.look() and self._changes.moved:
                        self._sync_all(self._changes.take(), pool)
                    connection.sendall(b"".join(b"PUB %s 0\r\n\r\n" % reply for reply in replies))

    def _sync_all(self, paths: set[str], pool: ThreadPoolExecutor) -> None:
        if not paths:
            return
        first, *others = paths
        syncs = [pool.submit(self._sync_one, path) for path in others]
        self._sync_one(first)
        for sync in syncs:
            sync.result()

    def _sync_one(self, path: str) -> None:
        """Sync a file or a folder. If it is gone, skip it, since its parent folder has then changed too. Raises
        `SyncFailed` if it cannot be opened or synced."""
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return
        except OSError as error:
            raise SyncFailed(str(error)) from error
        try:
            self._sync(descriptor)
        except OSError as error:
            raise SyncFailed(f"{error}: {path}") from error
        finally:
            os.close(descriptor)
