"""Files and folders that survive a power cut."""

import os
from pathlib import Path


def make_durable(path: Path) -> None:
    """Write a file, or the names in a folder, to the disk: a rename is only as safe as the folder that records it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
