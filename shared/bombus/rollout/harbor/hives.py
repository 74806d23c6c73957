"""Finds out, from the running processes, where the hives on this machine keep their logs and keys, so that these can be
hidden from agents."""

import os
from collections.abc import Iterator
from pathlib import Path

from bombus.cli import URL_FILE

DATA = URL_FILE.parent.name  # the data folder of a hive that was started in the working directory
KEY_FLAG = "key-file"  # suffix of flags that name a key file, even in other programs
KEY_FLAGS = ("--admin-key-file", "--client-key-file", "--client-keys-file", "--key-file")
_PROC = Path("/proc")


def private_places() -> list[Path]:
    """Return the data folders of hives that running processes name or use, and the key files named on their command
    lines."""
    seen: dict[Path, bool] = {}
    found = {Path(DATA).resolve()}
    for process in _PROC.glob("[0-9]*"):
        words = _words(process)
        found.update(_key_files(process, words))
        for path in (*_named(process, words), *_open_files(process)):
            found.update(each for each in (path, *path.parents) if _is_hive(each, seen))
    return sorted(found)


def _is_hive(folder: Path, seen: dict[Path, bool]) -> bool:
    if folder not in seen:
        seen[folder] = os.path.isfile(folder / URL_FILE.name)
    return seen[folder]


def _words(process: Path) -> list[str]:
    try:
        return os.fsdecode((process / "cmdline").read_bytes()).split("\0")
    except OSError:  # the process has ended, or belongs to another user
        return []


def _named(process: Path, words: list[str]) -> Iterator[Path]:
    """Yield the paths among the words of a command line."""
    for word in words:
        if (value := word.partition("=")[2] if word.startswith("-") else word) and "/" in value:
            yield _resolved(process, value)


def _key_files(process: Path, words: list[str]) -> Iterator[Path]:
    """Yield the key files that a command line names with a flag, which may be abbreviated."""
    for word, following in zip(words, [*words[1:], ""]):
        flag, _, value = word.partition("=")
        is_ours = len(flag) > len("--") and any(known.startswith(flag) for known in KEY_FLAGS)
        if (is_ours or (flag.startswith("--") and flag.endswith(KEY_FLAG))) and (given := value or following):
            path = _resolved(process, given)
            if path.is_file():
                yield path


def _resolved(process: Path, given: str) -> Path:
    try:
        return Path(os.path.realpath(os.path.join(os.readlink(process / "cwd"), given)))
    except (OSError, ValueError):
        return Path(given)


def _open_files(process: Path) -> Iterator[Path]:
    try:
        for entry in os.scandir(process / "fd"):
            target = os.readlink(entry.path)
            if target.startswith("/") and not target.startswith(("/dev/", "/proc/", "/memfd:")):
                yield Path(target)
    except OSError:
        return
