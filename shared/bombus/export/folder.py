"""The folder of an export. It is filled as a draft, and renamed once it is complete."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bombus.durable import make_durable
from bombus.export.card import CARD, WRITTEN_BY
from bombus.replay.running import BadUsage


def _check_place(out: Path, force: bool) -> None:
    """Raise `BadUsage` unless an export may be written to `out`."""
    if not out.parent.is_dir():
        raise BadUsage(f"there is no folder {out.parent}")
    if out.exists() and not out.is_dir():
        raise BadUsage(f"{out} is a file")
    if not out.is_dir() or not any(out.iterdir()):
        return
    if not force:
        raise BadUsage(f"{out} is not empty: choose another folder, or replace an earlier export with --force")
    if not _is_export(out):
        raise BadUsage(f"{out} is not an earlier export, and --force replaces nothing else: choose another folder")


def _is_export(folder: Path) -> bool:
    card = folder / CARD
    return card.is_file() and WRITTEN_BY in card.read_text(errors="replace")


@contextmanager
def drafted(out: Path, force: bool = False) -> Iterator[Path]:
    """Yield an empty folder that is renamed to `out` on success, and removed on failure.

    With `force`, `out` may be an earlier export, which is then replaced. Raises `BadUsage` if an export may not be
    written to `out`.
    """
    _check_place(out, force)
    draft = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        draft.chmod(0o755)
        yield draft
        for file in draft.iterdir():
            make_durable(file)
        _check_place(out, force)
        _put_in_place(draft, out)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _put_in_place(draft: Path, out: Path) -> None:
    if not out.exists() or not any(out.iterdir()):
        draft.rename(out)  # this may replace an empty folder
        return
    old = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    out.rename(old)
    draft.rename(out)
    shutil.rmtree(old, ignore_errors=True)
