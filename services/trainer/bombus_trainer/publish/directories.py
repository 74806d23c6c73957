"""A trainer's directories on disk: writes them as drafts that are renamed into place, and removes old ones.

The name of each directory that trainers remove on their own contains the trainer epoch in which it was written
(`step-00000003-epoch-2-attempt-1`, `version-00000003-epoch-2`, `base-epoch-2`, `cover-7-epoch-2-1`,
`.draft-epoch-2-...`). A trainer removes nothing from a later epoch. Otherwise a trainer whose process was paused, and
that continues unaware that it was superseded, would delete its successor's checkpoint. The checkpoints of training
clients have names that the clients choose.
"""

import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from bombus.durable import make_durable
from bombus.faults import Point, reached

REPLACED = ".replaced-"
_OURS = re.compile(r"^(?:\.replaced-)?(?:step-\d+|version-\d+|cover-\d+|base|\.draft)-epoch-(\d+)(?:-|$)")
_RUN = re.compile(r"run-(\d+)(?:-epoch-(\d+))?\Z")


@contextmanager
def new_directory(directory: Path, drafts: Path, trainer_epoch: int, *, durable: bool) -> Iterator[Path]:
    """Yield a draft in `drafts` to fill. Afterwards it takes the place of `directory`, durably if `durable`.

    An existing `directory` is first moved aside. It is removed at the end, or restored if the draft did not take its
    place: see `settle`.
    """
    make_durable_directory(directory.parent)
    draft = draft_directory(drafts, trainer_epoch)
    try:
        draft.chmod(access_of(directory.parent))
        yield draft
        settle(directory)
        if directory.exists():
            directory.rename(directory.with_name(REPLACED + directory.name))
            reached(Point.TRAINER_DIRECTORY_ASIDE)
        draft.rename(directory)
        if durable:
            make_durable(directory.parent)
    finally:
        settle(directory)
        shutil.rmtree(draft, ignore_errors=True)


def settle(directory: Path) -> None:
    """Finish a replacement that was interrupted. Restore the old directory if the new one is not in place."""
    aside = directory.with_name(REPLACED + directory.name)
    if not aside.exists():
        return
    if directory.exists():
        shutil.rmtree(aside, ignore_errors=True)
    else:
        with suppress(FileNotFoundError):  # another rank has restored it
            aside.rename(directory)
        make_durable(directory.parent)


def draft_directory(root: Path, trainer_epoch: int) -> Path:
    """Create a directory to fill and rename. If a crash leaves it behind, `remove_others(root, ...)` removes it."""
    return Path(tempfile.mkdtemp(prefix=f".draft-epoch-{trainer_epoch}-", dir=root))


def epoch_of(name: str) -> int | None:
    """Return the trainer epoch in which a directory was written, or None if no trainer wrote it."""
    ours = _OURS.match(name)
    return int(ours[1]) if ours else None


def remove_others(root: Path, named: Iterable[str], trainer_epoch: int) -> None:
    """Remove the directories in `root` that trainers up to `trainer_epoch` wrote, except `named`, the paths that are on
    the log."""
    kept = {Path(path).name for path in named}
    if not root.is_dir():
        return
    for directory in root.iterdir():
        epoch = epoch_of(directory.name)
        if epoch is not None and epoch <= trainer_epoch and directory.name not in kept:
            shutil.rmtree(directory, ignore_errors=True)


def remove_earlier(folder: Path, run: int, trainer_epoch: int) -> None:
    """Remove the folders of earlier runs and of this run's earlier trainers in `folder`: `run-3`, `run-4-epoch-1`."""
    if not folder.is_dir():
        return
    for path in folder.iterdir():
        ours = _RUN.match(path.name)
        if ours is None:
            continue
        of = (int(ours[1]), trainer_epoch if ours[2] is None else int(ours[2]))
        if of < (run, trainer_epoch):
            shutil.rmtree(path, ignore_errors=True)
    make_durable(folder)


def make_durable_directory(path: Path) -> None:
    """Create a directory and its missing parents, so that they survive a power failure.

    Each gets the permissions of its parent, so all of them get the permissions that the operator sets on the trainer's
    folder.
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
