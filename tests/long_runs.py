"""What `tests.chaos` and `tests.fuzz` begin with: a seed, a folder for the run, and lines with the time."""

import logging
import tempfile
import time
from collections.abc import Callable
from pathlib import Path


def begin(name: str, seed: int | None) -> tuple[int, Path, Callable[[str], None]]:
    """Return the seed of a run (without one, the clock's), its folder, and what prints a line with the time."""
    logging.getLogger("httpx").setLevel(logging.WARNING)
    seed = int(time.time()) if seed is None else seed
    folder = Path(tempfile.mkdtemp(prefix=f"bombus-{name}-"))
    print(f"seed {seed}, folder {folder}", flush=True)
    began = time.monotonic()

    def say(line: str) -> None:
        print(f"{time.monotonic() - began:6.0f} s  {line}", flush=True)

    return seed, folder, say
