"""Runs our own programs that process text written by models. If the kernel allows it, they run in separate namespaces.

Each program sees this machine's programs (read-only), a home in memory, no other processes, and no network.
"""

import shlex
import shutil
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from bombus.environments.backends.shell import NAMESPACES

SETUP = Path(__file__).with_name("isolation.sh")
HOME, CONFIG = "/bombus/home", "/bombus/config"  # paths inside the namespaces
WITHOUT_CAPABILITIES = "setpriv --no-new-privs --bounding-set=-all --inh-caps=-all --ambient-caps=-all"


def why_no_isolation() -> str:
    """Return what this machine lacks for isolation, or "" if nothing is missing. The kernel may still refuse."""
    if sys.platform != "linux" or shutil.which("unshare") is None or shutil.which("setpriv") is None:
        return "that needs Linux, with `unshare` and `setpriv` (package util-linux)"
    return ""


def isolated(
    root: Path, config: Path, program: Sequence[str], packages: Sequence[str], before: Sequence[str] = ()
) -> list[str]:
    """Return the command that runs `before` and then `program`, without capabilities, in new namespaces.

    `before` and `program` are given as arguments for the Python interpreter. `root` is an empty folder, and `config` a
    file that appears at `CONFIG`.
    """
    lines = [shlex.join([sys.executable, *before])] if before else []
    lines.append(f"exec {WITHOUT_CAPABILITIES} {shlex.join([sys.executable, *program])}")
    setup = [SETUP.read_text(), "isolation", str(root), str(config), "; ".join(lines)]
    return ["unshare", *NAMESPACES, "/bin/sh", "-c", *setup, *_folders(packages)]


def import_path(packages: Sequence[str]) -> str:
    """Return a PYTHONPATH on which a program finds our own package and these packages."""
    return ":".join(map(str, _sites(packages)))


def _sites(packages: Sequence[str]) -> list[Path]:
    """Return the folder that contains our package, and the folders of these packages, however they were installed."""
    found = [find_spec(name) for name in packages]
    sites = [Path(spec.origin).parent.parent for spec in found if spec is not None and spec.origin is not None]
    return list(dict.fromkeys([Path(__file__).parents[2], *sites]))


def _folders(packages: Sequence[str]) -> list[str]:
    """Return the folders that a program may read, parents before their contents. Of our own source tree, only the
    package is included."""
    shown = {str(Path(__file__).parents[1]), sys.prefix, sys.base_prefix, *map(str, _sites(packages)[1:])}
    return sorted(shown)
