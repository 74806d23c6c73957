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

STEPS, SAMPLES, RUN = "steps.jsonl", "samples.jsonl", "run.json"
_LINE = msgspec.json.Decoder(dict[str, int | float])
_SAMPLES = msgspec.json.Decoder(tuple[int, tuple[ShownSample, ...]])


class InUse(BombusError):
    """Another process writes this run."""


class Ledger:
    """The rows of a run, on the disk. `last` is the step of the last one.

    The file is also what the tracker `jsonl` gives: one object for each step. A line that a killed process left
    incomplete is removed. A row whose step is not above `last` is already there, so a log may be read again at any
    time; and trackers can be filled although the beginning of the log was compacted. Raises `InUse`, or `OSError`.
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
            with (self.folder / STEPS).open("rb") as file:
                for line in file:
                    if line.endswith(b"\n"):
                        self._size += len(line)
                        self.last = int(_LINE.decode(line)["step"])
            os.ftruncate(self._file, self._size)
            self._samples = dict(self._sampled())
            write_private(self.folder / RUN, msgspec.json.format(msgspec.json.encode(run)).decode())
        except BaseException as error:
            os.close(self._file)
            if isinstance(error, BlockingIOError):
                why = f"another process writes the run {run.name} to {self.folder}: wait until it ends, or stop it"
                raise InUse(why) from None
            raise

    def _sampled(self) -> Iterator[tuple[int, tuple[int, int]]]:
        """Yield the place of each step's samples in their file."""
        path, offset = self.folder / SAMPLES, 0
        for line in path.open("rb") if path.is_file() else ():
            try:
                yield _SAMPLES.decode(line)[0], (offset, len(line))
            except msgspec.DecodeError:  # a killed process left it incomplete: its row is not there, and follows again
                pass
            offset += len(line)

    def append(self, row: Row) -> None:
        """Add a row, unless it is already there. Raises `OSError`; the row is then not there."""
        if row.step <= self.last:
            return
        if row.samples:  # before the row, so that whoever sees the row finds them
            line = msgspec.json.encode((row.step, row.samples)) + b"\n"
            with (self.folder / SAMPLES).open("ab") as file:
                file.write(b"\n")  # ends a line that is incomplete
                place = file.tell()
                file.write(line)
            self._samples[row.step] = (place, len(line))
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
                yield Row(step=step, at_ns=at_ns, metrics=figures, samples=self._samples_of(step)), offset

    def _samples_of(self, step: int) -> tuple[ShownSample, ...]:
        if step not in self._samples:
            return ()
        offset, size = self._samples[step]
        with (self.folder / SAMPLES).open("rb") as file:
            file.seek(offset)
            return _SAMPLES.decode(file.read(size))[1]

    def wait(self, offset: int) -> bool:
        """Wait for rows after a position. Return False once there are none and none will follow."""
        with self._changed:
            self._changed.wait_for(lambda: self._size > offset or self._ended)
            return self._size > offset

    def ends_within(self, seconds: float) -> bool:
        """Wait for the end, for that long at most. Return whether it has come."""
        with self._changed:
            return self._changed.wait_for(lambda: self._ended, seconds)

    def end(self) -> None:
        """Note that no more rows follow from this process. The rows stay readable, and the run locked."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def close(self) -> None:
        """Let other processes write the run."""
        os.close(self._file)
