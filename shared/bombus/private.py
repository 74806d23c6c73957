"""Folders and files that only the user who runs bombus may read, regardless of the umask."""

import os
from pathlib import Path


def private_folder(path: Path) -> Path:
    """Create a folder and its missing parents, and return it. Modes of existing folders are not changed."""
    if not path.is_dir():
        private_folder(path.parent)
        path.mkdir(mode=0o700, exist_ok=True)
    return path


def write_private(path: Path, text: str) -> None:
    """Write a file that holds a secret. An existing file is replaced atomically, even if there is a power cut."""
    draft = path.with_name(f".{path.name}-{os.getpid()}")
    draft.unlink(missing_ok=True)
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)
