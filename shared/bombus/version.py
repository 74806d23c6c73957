"""What is installed: the release and, in a clone of the repository, its commit."""

import subprocess
from importlib.metadata import version
from pathlib import Path

from bombus.hive.levels import LEVEL

_GIT = ("git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--exclude=*")


def described() -> str:
    """Return the release, the commit if this is a clone, and the feature level up to which logs can be read."""
    commit = ""
    if (Path(__file__).parents[2] / ".git").exists():
        try:
            done = subprocess.run(_GIT, capture_output=True, text=True, timeout=5, check=True)
        except (OSError, subprocess.SubprocessError):  # there is no git
            pass
        else:
            commit = f", commit {done.stdout.strip()}"
    return f"{version('bombus')}{commit}, feature level {LEVEL}"
