"""Folders that a trainer leaves on disk: drafts beside them, what makes them durable, and which may be removed.

The name of each says the trainer epoch that it was written in (`step-00000003-epoch-2-attempt-1`,
`version-00000003-epoch-2`, `base-epoch-2`, `.draft-epoch-2-...`). A trainer removes nothing of a later epoch: one that
was stopped, and goes on without knowing that it was superseded, would take its successor's checkpoint away.
"""

import os
import re
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

_OURS = re.compile(r"^(?:step-\d+|version-\d+|base|\.draft)-epoch-(\d+)(?:-|$)")


def draft_directory(root: Path, trainer_epoch: int) -> Path:
    """A new folder to be filled and renamed. What a crash leaves of it is removed by `remove_others`."""
    return Path(tempfile.mkdtemp(prefix=f".draft-epoch-{trainer_epoch}-", dir=root))


def epoch_of(name: str) -> int | None:
    """The trainer epoch that a folder was written in; None for what is not ours."""
    ours = _OURS.match(name)
    return int(ours[1]) if ours else None


def remove_others(root: Path, named: Iterable[str], trainer_epoch: int) -> None:
    """Remove what trainers up to `trainer_epoch` left below `root`, but for the folders `named` (paths on the log)."""
    kept = {Path(path).name for path in named}
    if not root.is_dir():
        return
    for place in root.iterdir():
        epoch = epoch_of(place.name)
        if epoch is not None and epoch <= trainer_epoch and place.name not in kept:
            shutil.rmtree(place, ignore_errors=True)


def make_durable_directory(path: Path) -> None:
    """Make a folder, and those above it that are missing, so that they survive a power cut."""
    if path.exists():
        return
    make_durable_directory(path.parent)
    path.mkdir(exist_ok=True)
    fsync_directory(path.parent)


def fsync_directory(path: Path) -> None:
    """Make names in a folder durable: a rename is only as safe as the folder that records it."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
