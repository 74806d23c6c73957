"""A disk with little room, which a test can fill."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

MB = 1 << 20


@contextmanager
def small_disk(folder: Path, options: str) -> Iterator[Path]:
    """Make `folder` a disk of its own, with these options of tmpfs. Skips the test where that is not allowed."""
    folder.mkdir(parents=True)
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"a small disk cannot be mounted here: {mounted.stderr.decode().strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def fill(ballast: Path) -> None:
    """Use every byte that is left on the disk."""
    with ballast.open("ab", buffering=0) as file:
        for size in (MB, 4096, 1):
            try:
                while file.write(b"x" * size) == size:
                    pass
            except OSError:
                continue
