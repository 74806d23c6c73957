"""What long runs begin with (a seed, a folder, and lines with the time), and how they end."""

import logging
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
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


def end(folder: Path, wrong: Sequence[str]) -> int:
    """Print what went wrong and return the exit status. The folder is kept only if something did."""
    for each in wrong:
        print(f"WRONG {each}")
    if wrong:
        print(f"everything is kept in {folder}")
        return 1
    shutil.rmtree(folder)
    return 0
