"""Where the environments lie that `bombus install` makes: vLLM and verl exclude each other, so each has its own."""

import os
from pathlib import Path

import msgspec

from bombus.errors import EngineFault
from bombus.weights.models import cache_folder

ENVIRONMENTS = ("vllm", "verl")
MARKER = "bombus-environment.json"


class InstalledEnvironment(msgspec.Struct, frozen=True, kw_only=True):
    """What the marker of a whole environment says. It is written last: a folder without one was left unfinished."""

    name: str
    python: str  # its version
    packages: dict[str, str]  # of what was asked for, and which version that became
    size_bytes: int
    recipe: str  # the digest of how it was made: another one asks for it to be made anew


def environments_folder() -> Path:
    """`$BOMBUS_ENVIRONMENTS`, or a folder in bombus' cache."""
    return Path(os.environ.get("BOMBUS_ENVIRONMENTS") or cache_folder() / "environments")


def read_marker(folder: Path) -> InstalledEnvironment | None:
    """What was made in `folder`; None when nothing was, or not to its end."""
    try:
        return msgspec.json.decode((folder / MARKER).read_bytes(), type=InstalledEnvironment)
    except (OSError, msgspec.MsgspecError):
        return None


def environment_python(name: str) -> Path:
    """The interpreter of the environment `name`. Raises `EngineFault` when that is not there, or not whole."""
    folder = environments_folder() / name
    python = folder / "bin" / "python"
    if read_marker(folder) is None or not python.exists():
        state = "was left unfinished" if folder.exists() else "is not installed"
        raise EngineFault(
            f"the environment {name!r} {state} (its place is {folder}): run `bombus install {name}` first"
        )
    return python.absolute()
