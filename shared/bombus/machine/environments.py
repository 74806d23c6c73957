"""Finds the environments that `bombus install` makes. vLLM and verl cannot be installed together, so each has its
own."""

import os
from pathlib import Path

import msgspec

from bombus.errors import EngineFault
from bombus.weights.models import cache_folder

ENVIRONMENTS = ("vllm", "verl")
MARKER = "bombus-environment.json"


class InstalledEnvironment(msgspec.Struct, frozen=True, kw_only=True):
    """The marker of a finished environment. It is written last, so a folder without a marker is unfinished."""

    name: str
    python: str  # version of Python
    packages: dict[str, str]  # the installed version of each package that its recipe reports
    size_bytes: int
    recipe: str  # digest of the recipe; if the recipe has changed, the environment is rebuilt


def environments_folder() -> Path:
    """Return `$BOMBUS_ENVIRONMENTS`, or a folder in bombus's cache."""
    return Path(os.environ.get("BOMBUS_ENVIRONMENTS") or cache_folder() / "environments")


def read_marker(folder: Path) -> InstalledEnvironment | None:
    """Return the marker in `folder`, or None if the folder has no environment or an incomplete one."""
    try:
        return msgspec.json.decode((folder / MARKER).read_bytes(), type=InstalledEnvironment)
    except (OSError, msgspec.MsgspecError):
        return None


def environment_python(name: str) -> Path:
    """Return the interpreter of the environment `name`. Raises `EngineFault` if it is missing or unfinished."""
    folder = environments_folder() / name
    python = folder / "bin" / "python"
    if read_marker(folder) is None or not python.exists():
        state = "was left unfinished" if folder.exists() else "is not installed"
        raise EngineFault(
            f"the environment {name!r} {state} (it should be in {folder}): run `bombus install {name}` first"
        )
    return python.absolute()
