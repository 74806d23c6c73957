"""A disk that forgets, in a power cut, what was not synced: some of it, all of it, or none, file by file."""

import os
import random
import stat
import threading
import time
from dataclasses import dataclass
from pathlib import Path

SLOW_S = 0.1  # the longest sync
COPY_BYTES = 1 << 20


@dataclass
class _File:
    """A file's synced bytes, of which `size` count. Its descriptor keeps the number of its inode in use."""

    descriptor: int
    data: bytearray
    size: int = 0


class Disk:
    """Notes what is synced, by inode: the bytes of files and the entries of folders as they were when a sync began.

    Only what comes through `sync` is noted, so what nats-server has synced by itself is lost as well.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.syncs = 0
        self.lock = threading.Lock()  # while it is held, nothing becomes synced
        self._files: dict[int, _File] = {}
        self._folders: dict[int, dict[str, int]] = {}

    def sync(self, descriptor: int) -> None:
        """Do as `os.fsync` does, slowly: a cut before it returns finds nothing of it on the disk."""
        found = os.fstat(descriptor)
        if stat.S_ISDIR(found.st_mode):
            entries = _entries(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
            time.sleep(self.random.random() * SLOW_S)
            with self.lock:
                self._folders[found.st_ino] = entries
        else:
            with self.lock:
                file = self._files.get(found.st_ino)
                if file is None:
                    file = self._files[found.st_ino] = _File(os.dup(descriptor), bytearray())
                data, size = file.data, found.st_size
            # The server only appends to a block, and replaces it to compact it; it writes its other files anew.
            name = os.readlink(f"/proc/self/fd/{descriptor}")
            if name.endswith(".blk") and len(data) <= size:
                data += _read(descriptor, len(data), size)
            else:
                data = bytearray(_read(descriptor, 0, size))
            time.sleep(self.random.random() * SLOW_S)
            with self.lock:
                if file.data is not data or file.size < len(data):
                    file.data, file.size = data, min(size, len(data))
                self.syncs += 1

    def cut(self, root: Path, copy: Path) -> None:
        """Write to `copy` what a power cut leaves of `root`. The caller holds `lock`, and lets nothing write there."""
        self._leave(root, root.stat().st_ino, copy)

    def has_synced(self, files: int) -> bool:
        return self.syncs >= files

    def close(self) -> None:
        with self.lock:  # the last sync may be under way
            for file in self._files.values():
                os.close(file.descriptor)
            self._files.clear()

    def _leave(self, live: Path, inode: int, copy: Path) -> None:
        copy.mkdir(parents=True)
        there, synced = _entries(live) if live.is_dir() else {}, self._folders.get(inode, {})
        for name in sorted(there.keys() | synced.keys()):
            now, before = there.get(name), synced.get(name)
            chosen = now if now == before else self.random.choice([now, before])
            if chosen is None:
                continue
            place = live / name
            is_folder = chosen in self._folders or (chosen == now and place.is_dir())
            if is_folder:
                self._leave(place if chosen == now else Path("/nowhere"), chosen, copy / name)
            else:
                (copy / name).write_bytes(self._left(place if chosen == now else None, chosen))

    def _left(self, live: Path | None, inode: int) -> bytes:
        """Return a file's synced bytes and, at random, some that were not synced, or zeros in their place."""
        file = self._files.get(inode)
        kept = bytes(file.data[: file.size]) if file is not None else b""
        if live is None:
            return kept
        now = live.read_bytes()
        if not now.startswith(kept):  # it was written anew
            return self.random.choice([kept, now, now[: self.random.randrange(len(now) + 1)]])
        more = self.random.choice([0, len(now) - len(kept), self.random.randint(0, len(now) - len(kept))])
        tail = now[len(kept) : len(kept) + more]
        return kept + (bytes(len(tail)) if self.random.random() < 0.2 else tail)


def _entries(folder: Path) -> dict[str, int]:
    return {entry.name: entry.inode() for entry in os.scandir(folder)}


def _read(descriptor: int, begin: int, end: int) -> bytes:
    parts = []
    while begin < end and (part := os.pread(descriptor, min(COPY_BYTES, end - begin), begin)):
        parts.append(part)
        begin += len(part)
    return b"".join(parts)
