"""The rows of a run in a file of JSON lines, which one process writes, and from which every tracker is filled."""

import errno
import fcntl
import itertools
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from bombus.errors import BombusError
from bombus.insight.trackers.rows import Row, TrackedRun
from bombus.private import private_folder, write_private

STEPS, RUN = "steps.jsonl", "run.json"


class InUse(BombusError):
    """Another process writes this run."""


class Ledger:
    """The rows of a run, on the disk. `last` is the step of the last one.

    The file is also what the tracker `jsonl` gives: one object for each step. A line that a killed process left
    incomplete, or a power cut damaged, is removed with those after it. A row whose step is not above `last` is already
    there, so a log may be read again at any time; and trackers can be filled although the beginning of the log was
    compacted. Raises `InUse`, or `OSError`.
    """

    def __init__(self, folder: Path, run: TrackedRun) -> None:
        self.run = run
        self.folder = private_folder(folder / run.folder)
        self.last = 0
        self._ends = [0]  # the position after each line
        self._ended = False
        self._changed = threading.Condition()
        self._file = os.open(self.folder / STEPS, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._read()
            write_private(self.folder / RUN, msgspec.json.format(msgspec.json.encode(run)).decode())
        except BaseException as error:
            os.close(self._file)
            if isinstance(error, BlockingIOError):
                why = f"another process writes the run {run.name} to {self.folder}: wait until it ends, or stop it"
                raise InUse(why) from None
            raise

    def _read(self) -> None:
        with (self.folder / STEPS).open("rb") as file:
            for line in file:
                try:
                    step = _decoded(line).step
                except msgspec.MsgspecError:
                    break
                if line.endswith(b"\n"):
                    self.last = step
                    self._ends.append(self._ends[-1] + len(line))
        os.ftruncate(self._file, self._ends[-1])

    def append(self, row: Row) -> None:
        """Add a row, unless it is already there. Raises `OSError`; the row is then not there."""
        if row.step <= self.last:
            return
        samples = {"samples": row.samples} if row.samples else {}
        line = msgspec.json.encode({"step": row.step, "at_ns": row.at_ns, **row.metrics, **samples}) + b"\n"
        try:
            if os.write(self._file, line) < len(line):
                raise OSError(errno.ENOSPC, "a line was written in part")
        except OSError:
            os.ftruncate(self._file, self._ends[-1])
            raise
        with self._changed:
            self._ends.append(self._ends[-1] + len(line))
            self.last = row.step
            self._changed.notify_all()

    def rows(self) -> Iterator[Row]:
        """Yield all rows, and wait for more until the ledger ends."""
        for number in itertools.count():
            with self._changed:
                while number + 1 == len(self._ends):
                    if self._ended:
                        return
                    self._changed.wait()
            begin, end = self._ends[number : number + 2]
            yield _decoded(os.pread(self._file, end - begin, begin))

    def end(self) -> None:
        """Note that no more rows follow from this process. The rows stay readable, and the run locked."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def close(self) -> None:
        """Let other processes write the run."""
        os.close(self._file)


def _decoded(line: bytes) -> Row:
    figures: dict[str, Any] = msgspec.json.decode(line, type=dict[str, Any])
    others = {name: figures.pop(name) for name in ("step", "at_ns", "samples") if name in figures}
    return msgspec.convert(others | {"metrics": figures}, Row)
