"""The directories that a trainer leaves on disk: drafts of them, making them durable, and removing old ones.

The name of each contains the trainer epoch that it was written in (`step-00000003-epoch-2-attempt-1`,
`version-00000003-epoch-2`, `base-epoch-2`, `.draft-epoch-2-...`). A trainer removes nothing of a later epoch: one that
was suspended, and continues without knowing that it was superseded, would delete its successor's checkpoint.
"""

import re
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

from bombus.durable import make_durable

_OURS = re.compile(r"^(?:step-\d+|version-\d+|base|\.draft)-epoch-(\d+)(?:-|$)")


def draft_directory(root: Path, trainer_epoch: int) -> Path:
    """Create a directory to fill and rename. `remove_others` of the same `root` removes what a crash leaves of it."""
    return Path(tempfile.mkdtemp(prefix=f".draft-epoch-{trainer_epoch}-", dir=root))


def epoch_of(name: str) -> int | None:
    """Return the trainer epoch that a directory was written in; None if it is not a trainer's."""
    ours = _OURS.match(name)
    return int(ours[1]) if ours else None


def remove_others(root: Path, named: Iterable[str], trainer_epoch: int) -> None:
    """Remove what trainers up to `trainer_epoch` left below `root`, except directories `named` by path on the log."""
    kept = {Path(path).name for path in named}
    if not root.is_dir():
        return
    for directory in root.iterdir():
        epoch = epoch_of(directory.name)
        if epoch is not None and epoch <= trainer_epoch and directory.name not in kept:
            shutil.rmtree(directory, ignore_errors=True)


def make_durable_directory(path: Path) -> None:
    """Create a directory and its missing parents, so that they survive a power cut.

    Whoever may read the directory that one is made in may read it too: the operator decides by that of the trainer.
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
