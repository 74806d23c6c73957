"""Files and folders that survive a power cut."""

import os
from pathlib import Path


def make_durable(path: Path) -> None:
    """Flush a file or a folder to disk. A rename is durable only once the folder that contains it is flushed."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
