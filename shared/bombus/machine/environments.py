"""Finds the environments that `bombus install` makes. vLLM and verl exclude each other, so each has its own."""

import os
from pathlib import Path

import msgspec

from bombus.errors import EngineFault
from bombus.weights.models import cache_folder

ENVIRONMENTS = ("vllm", "verl")
MARKER = "bombus-environment.json"


class InstalledEnvironment(msgspec.Struct, frozen=True, kw_only=True):
    """The marker of a finished environment. It is written last: a folder without one was left unfinished."""

    name: str
    python: str  # its version
    packages: dict[str, str]  # the installed version of each package that its recipe reports
    size_bytes: int
    recipe: str  # the digest of the recipe; if that has changed, the environment is rebuilt


def environments_folder() -> Path:
    """Return `$BOMBUS_ENVIRONMENTS`, or a folder in bombus' cache."""
    return Path(os.environ.get("BOMBUS_ENVIRONMENTS") or cache_folder() / "environments")


def read_marker(folder: Path) -> InstalledEnvironment | None:
    """Return the marker in `folder`; None when no environment was made there, or only part of one."""
    try:
        return msgspec.json.decode((folder / MARKER).read_bytes(), type=InstalledEnvironment)
    except (OSError, msgspec.MsgspecError):
        return None


def environment_python(name: str) -> Path:
    """Return the interpreter of the environment `name`. Raises `EngineFault` when it is missing or unfinished."""
    folder = environments_folder() / name
    python = folder / "bin" / "python"
    if read_marker(folder) is None or not python.exists():
        state = "was left unfinished" if folder.exists() else "is not installed"
        raise EngineFault(
            f"the environment {name!r} {state} (its place is {folder}): run `bombus install {name}` first"
        )
    return python.absolute()
