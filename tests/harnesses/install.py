"""`python -m tests.harnesses.install`: makes the environments of the harnesses in `.harnesses/`, one after the other.

`requirements/` has their versions: package.json and its lock for what npm installs, and a file for each environment of
Python. What is there already is left alone, and what cannot be made here is said in a line.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from bombus.hive.records import digest

ROOT = Path(__file__).parents[2]
REQUIREMENTS = Path(__file__).parent / "requirements"
FOLDER = ROOT / ".harnesses"
NODE = "node"
SCHEMATHESIS = "schemathesis"  # no harness: it looks for answers that the OpenAPI page does not describe
PYTHONS = {"openhands": (3, 12)}  # the least Python of an environment, where it is newer than ours
# Not `npm ci`, which refuses a lock that lacks the native programs of other systems.
NPM = ("npm", "install", "--no-audit", "--no-fund", "--ignore-scripts", "--loglevel", "error")
NATIVE = (
    "npm",
    "rebuild",
    "@anthropic-ai/claude-code",
    "opencode-ai",
)  # their scripts put the native programs in place
PIP = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile", "--no-deps")


class CannotInstall(Exception):
    """Raised with the reason why an environment cannot be made on this machine."""


def environments() -> list[str]:
    return [NODE, *sorted(path.stem for path in REQUIREMENTS.glob("*.txt"))]


def bin_of(environment: str) -> Path:
    """Return the folder of the programs of an environment."""
    folder = FOLDER / environment
    return folder / "node_modules" / ".bin" if environment == NODE else folder / "bin"


def is_installed(environment: str) -> bool:
    stamp = FOLDER / environment / ".installed"
    return stamp.is_file() and stamp.read_text() == wanted(environment)


def wanted(environment: str) -> str:
    """Return the digest of what an environment is made from."""
    names = ["package.json", "package-lock.json"] if environment == NODE else [f"{environment}.txt"]
    return digest(b"".join((REQUIREMENTS / name).read_bytes() for name in names)).hex()


def version_of(environment: str, package: str) -> str:
    """Return the version of a package that an environment is made with."""
    if environment == NODE:
        version: str = json.loads((REQUIREMENTS / "package.json").read_text())["dependencies"][package]
        return version
    pinned = (REQUIREMENTS / f"{environment}.txt").read_text()
    found = re.search(rf"^{re.escape(package)}(?:\[.*\])?==(\S+)", pinned, re.MULTILINE)
    assert found, f"{environment}.txt does not pin {package}"
    return found[1]


def install(environment: str) -> None:
    """Make an environment. Raises `CannotInstall`."""
    folder = FOLDER / environment
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if environment == NODE:
        _install_node(folder)
    else:
        _install_python(folder, environment)
    (folder / ".installed").write_text(wanted(environment))


def _install_node(folder: Path) -> None:
    if shutil.which(NPM[0]) is None:
        raise CannotInstall("there is no npm on PATH")
    for name in ("package.json", "package-lock.json"):
        shutil.copy(REQUIREMENTS / name, folder)
    _run(folder, *NPM)
    _run(folder, *NATIVE)


def _install_python(folder: Path, environment: str) -> None:
    _run(folder, python_for(PYTHONS.get(environment, (3, 11))), "-m", "venv", str(folder))
    _run(folder, str(folder / "bin" / "python"), *PIP, "-r", str(REQUIREMENTS / f"{environment}.txt"))


def python_for(least: tuple[int, int]) -> str:
    """Return the command of a Python that is at least as new. Raises `CannotInstall`."""
    if sys.version_info[:2] >= least:
        return sys.executable
    wanted_name = f"python{least[0]}.{least[1]}"
    for command in (os.environ.get("HARNESSES_PYTHON", ""), wanted_name):
        runs = command and shutil.which(command) and _says_version(command, least)
        if runs:
            return command
    raise CannotInstall(
        f"there is no {wanted_name} on PATH; HARNESSES_PYTHON names one that is elsewhere, or a newer one"
    )


def _says_version(command: str, least: tuple[int, int]) -> bool:
    test = f"import sys; sys.exit(sys.version_info[:2] < {least})"
    return subprocess.run([command, "-c", test], capture_output=True, check=False).returncode == 0


def _run(folder: Path, *command: str) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CannotInstall(f"{' '.join(command[:4])} ... failed: {(done.stderr or done.stdout).strip()[:1000]}")


def main(names: list[str]) -> None:
    for environment in names or environments():
        if is_installed(environment):
            continue
        try:
            install(environment)
        except CannotInstall as why:
            print(f"{environment}: not installed, so its tests are skipped: {why}")
        else:
            print(f"{environment}: installed")


if __name__ == "__main__":
    main(sys.argv[1:])
