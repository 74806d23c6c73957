"""Manage a trainer's directories on disk: make drafts, make directories durable, and remove old ones.

The name of each contains the trainer epoch that it was written in (`step-00000003-epoch-2-attempt-1`,
`version-00000003-epoch-2`, `base-epoch-2`, `.draft-epoch-2-...`). A trainer removes nothing of a later epoch:
otherwise a trainer that was suspended, and continues unaware that it was superseded, would delete its successor's
checkpoint.
"""

import re
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

from bombus.durable import make_durable

_OURS = re.compile(r"^(?:step-\d+|version-\d+|base|\.draft)-epoch-(\d+)(?:-|$)")


def draft_directory(root: Path, trainer_epoch: int) -> Path:
    """Create a directory to fill and rename. If a crash leaves it behind, `remove_others(root, ...)` removes it."""
    return Path(tempfile.mkdtemp(prefix=f".draft-epoch-{trainer_epoch}-", dir=root))


def epoch_of(name: str) -> int | None:
    """Return the trainer epoch that a directory was written in; None if it is not a trainer's."""
    ours = _OURS.match(name)
    return int(ours[1]) if ours else None


def remove_others(root: Path, named: Iterable[str], trainer_epoch: int) -> None:
    """Remove the directories of trainers up to `trainer_epoch` below `root`, except `named`, their paths on the log."""
    kept = {Path(path).name for path in named}
    if not root.is_dir():
        return
    for directory in root.iterdir():
        epoch = epoch_of(directory.name)
        if epoch is not None and epoch <= trainer_epoch and directory.name not in kept:
            shutil.rmtree(directory, ignore_errors=True)


def make_durable_directory(path: Path) -> None:
    """Create a directory and its missing parents, so that they survive a power cut.

    Each gets the permissions of its parent, so those of the trainer's folder, which the operator sets, apply to all.
    """
    if path.exists():
        return
    make_durable_directory(path.parent)
    path.mkdir(mode=0o700, exist_ok=True)
    path.chmod(access_of(path.parent))
    make_durable(path.parent)


def access_of(path: Path) -> int:
    """Return the permissions of a directory."""
    return path.stat().st_mode & 0o777
