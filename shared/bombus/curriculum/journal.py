"""A file of events, one line for each decision. Only one process writes it. A process killed in the middle of a line
loses only that line, which was never acknowledged."""

import fcntl
import os
import stat
from pathlib import Path

import msgspec

from bombus.curriculum.events import AnyCurriculumEvent
from bombus.errors import BombusError, Code, LogCorrupted, Refused
from bombus.private import private_folder

JOURNAL_BYTES_MAX = 1 << 30

_decoder = msgspec.json.Decoder(list[AnyCurriculumEvent])


class JournalFull(BombusError):
    """Nothing more can be written to a journal. Its contents are intact."""


class CurriculumJournal:
    """A journal that only this process may have open, until `close`.

    Raises `Refused` if another process has it open, and `LogCorrupted` if a complete line is not valid.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._process = os.getpid()
        private_folder(path.parent)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            self._lock()
            self.events, self._bytes = self._read()
            os.ftruncate(self._file, self._bytes)
        except BaseException:
            self.close()
            raise

    def append(self, events: list[AnyCurriculumEvent]) -> None:
        """Write the events of one decision, all or none of them.

        Raises `JournalFull` if the file or the disk is full, `Refused` in a process forked since the journal was
        opened, and `OSError` if writing fails.
        """
        if self._file < 0:
            raise ValueError(f"{self.path} is closed")
        if os.getpid() != self._process:  # a forked process would share the lock
            raise Refused(
                Code.NOT_ACTIVE,
                f"{self.path} was opened before this process was forked: record results in the process that opened it",
            )
        line = msgspec.json.encode(events) + b"\n"
        if self._bytes + len(line) > JOURNAL_BYTES_MAX:
            raise JournalFull(f"{self.path} has {self._bytes} bytes, but the limit is 1 GiB: start a new file")
        try:
            if os.write(self._file, line) < len(line):
                raise JournalFull(f"the disk of {self.path} is full: make room, and record the result again")
            os.fsync(self._file)
        except BaseException:
            os.ftruncate(self._file, self._bytes)  # an incomplete line would corrupt the next one
            raise
        self._bytes += len(line)

    def close(self) -> None:
        """Close the journal, so that another process may write it. Closing it twice does nothing."""
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise Refused(
                Code.NOT_ACTIVE, f"another program has the curriculum {self.path} open: stop it, or name another file"
            ) from error

    def _read(self) -> tuple[list[AnyCurriculumEvent], int]:
        """Return the events, and the size in bytes of the lines that hold them. An incomplete last line is ignored."""
        found = os.fstat(self._file)
        if not stat.S_ISREG(found.st_mode):
            raise Refused(Code.BAD_CONFIG, f"{self.path} is not a regular file: a curriculum needs one")
        size = found.st_size
        if size > JOURNAL_BYTES_MAX:
            raise Refused(Code.TOO_LARGE, f"{self.path} has {size} bytes, but the limit for a curriculum is 1 GiB")
        events: list[AnyCurriculumEvent] = []
        whole = 0
        with open(self._file, "rb", closefd=False) as lines:
            for number, line in enumerate(lines, 1):
                if not line.endswith(b"\n"):
                    break
                try:
                    events += _decoder.decode(line)
                except msgspec.MsgspecError as error:
                    raise LogCorrupted(
                        f"line {number} of {self.path} is not an event of a curriculum ({error}): restore the file, or "
                        "name another one"
                    ) from error
                whole += len(line)
        return events, whole
