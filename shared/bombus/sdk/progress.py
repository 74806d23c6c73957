"""A progress bar on stderr: one line, redrawn at most ten times a second, and shown only if stderr is a terminal."""

import sys
import threading
import time
from typing import TextIO

CELLS = 30
DRAW_S = 0.1


class ProgressBar:
    """`with ProgressBar(total, "episodes") as progress: progress.step(failed=False)`. Safe to use from many threads."""

    def __init__(self, total: int, unit: str, stream: TextIO | None = None, shown: bool | None = None) -> None:
        self._total = total
        self._unit = unit
        self._stream = stream or sys.stderr
        self._shown = self._stream.isatty() if shown is None else shown
        self._done = 0
        self._failed = 0
        self._began = time.monotonic()
        self._drawn = 0.0
        self._lock = threading.Lock()

    def step(self, failed: bool = False) -> None:
        with self._lock:
            self._done += 1
            self._failed += failed
            now = time.monotonic()
            if self._shown and (now - self._drawn >= DRAW_S or self._done == self._total):
                self._drawn = now
                self._stream.write("\r" + self.line())
                self._stream.flush()

    def line(self) -> str:
        filled = CELLS * self._done // self._total if self._total else CELLS
        failed = f", {self._failed} failed" if self._failed else ""
        elapsed = time.monotonic() - self._began
        bar = "#" * filled + "." * (CELLS - filled)
        return f"[{bar}] {self._done}/{self._total} {self._unit}{failed}, {elapsed:.0f} s"

    def __enter__(self) -> "ProgressBar":
        return self

    def __exit__(self, *_: object) -> None:
        if self._shown:
            self._stream.write("\n")
