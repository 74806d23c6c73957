"""A file of events, one line for each decision. Only one process writes it, and a kill in the middle of a line costs
that line alone: it was never acknowledged.
"""

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
    """Nothing more can be written to a journal. What it holds is whole."""


class CurriculumJournal:
    """A journal that is open only for this process, until `close`.

    Raises `Refused` where another process has it open, and `LogCorrupted` where a line in its middle is broken.
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
        """Write the events of one decision, all or none of them. Raises `JournalFull`, `Refused` or `OSError`."""
        if self._file < 0:
            raise ValueError(f"{self.path} is closed")
        if os.getpid() != self._process:  # which a lock does not tell apart
            raise Refused(
                Code.NOT_ACTIVE, f"{self.path} was opened by the program that forked this one: record results there"
            )
        line = msgspec.json.encode(events) + b"\n"
        if self._bytes + len(line) > JOURNAL_BYTES_MAX:
            raise JournalFull(f"{self.path} has {self._bytes} bytes, but 1 GiB is the limit: start another one")
        try:
            if os.write(self._file, line) < len(line):
                raise JournalFull(f"the disk of {self.path} is full: make room, and record the result again")
            os.fsync(self._file)
        except BaseException:
            os.ftruncate(self._file, self._bytes)  # a half-written line would be in the way of the next one
            raise
        self._bytes += len(line)

    def close(self) -> None:
        """Let another process write the journal. Closing again does nothing."""
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise Refused(
                Code.NOT_ACTIVE, f"another program has the curriculum {self.path} open: end it, or name another file"
            ) from error

    def _read(self) -> tuple[list[AnyCurriculumEvent], int]:
        """Return the events, and how many bytes their lines have. What comes after the last line break was cut off."""
        found = os.fstat(self._file)
        if not stat.S_ISREG(found.st_mode):
            raise Refused(Code.BAD_CONFIG, f"{self.path} is not a regular file: a curriculum needs one")
        size = found.st_size
        if size > JOURNAL_BYTES_MAX:
            raise Refused(Code.TOO_LARGE, f"{self.path} has {size} bytes: a curriculum's file has at most 1 GiB")
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
