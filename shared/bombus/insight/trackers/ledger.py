"""The rows of a run in a file of JSON lines, which one process writes, and from which every tracker is filled."""

import errno
import fcntl
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec

from bombus.errors import BombusError
from bombus.insight.trackers.rows import Row, ShownSample, TrackedRun
from bombus.private import private_folder, write_private

STEPS, SAMPLES, RUN = "steps.jsonl", "samples", "run.json"
_LINE = msgspec.json.Decoder(dict[str, int | float])
_SAMPLES = msgspec.json.Decoder(tuple[ShownSample, ...])


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
        self._size = 0
        self._ended = False
        self._changed = threading.Condition()
        self._file = os.open(self.folder / STEPS, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._read()
            os.ftruncate(self._file, self._size)
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
                    step = int(_LINE.decode(line)["step"])
                except msgspec.MsgspecError:
                    return
                if line.endswith(b"\n"):
                    self.last, self._size = step, self._size + len(line)

    def append(self, row: Row) -> None:
        """Add a row, unless it is already there. Raises `OSError`; the row is then not there."""
        if row.step <= self.last:
            return
        if row.samples:  # before the row, so that whoever sees the row finds them
            private_folder(self.folder / SAMPLES)
            write_private(self._samples(row.step), msgspec.json.encode(row.samples).decode())
        line = msgspec.json.encode({"step": row.step, "at_ns": row.at_ns, **row.metrics}) + b"\n"
        try:
            if os.write(self._file, line) < len(line):
                raise OSError(errno.ENOSPC, "a line was written in part")
        except OSError:
            os.ftruncate(self._file, self._size)
            raise
        with self._changed:
            self._size += len(line)
            self.last = row.step
            self._changed.notify_all()

    def rows(self, offset: int) -> Iterator[tuple[Row, int]]:
        """Yield the rows after a position of the file, each with the position after it."""
        with (self.folder / STEPS).open("rb") as file:
            file.seek(offset)
            while offset < self._size:
                line = file.readline()
                offset += len(line)
                figures = _LINE.decode(line)
                step, at_ns = int(figures.pop("step")), int(figures.pop("at_ns"))
                path = self._samples(step)
                samples = _SAMPLES.decode(path.read_bytes()) if path.is_file() else ()
                yield Row(step=step, at_ns=at_ns, metrics=figures, samples=samples), offset

    def _samples(self, step: int) -> Path:
        return self.folder / SAMPLES / f"{step:06d}.json"

    def wait(self, offset: int) -> bool:
        """Wait for rows after a position. Return False once there are none and none will follow."""
        with self._changed:
            self._changed.wait_for(lambda: self._size > offset or self._ended)
            return self._size > offset

    def end(self) -> None:
        """Note that no more rows follow from this process. The rows stay readable, and the run locked."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def close(self) -> None:
        """Let other processes write the run."""
        os.close(self._file)
