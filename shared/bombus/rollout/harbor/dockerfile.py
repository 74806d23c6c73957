"""Reads Dockerfiles that need no build: a base image, a working directory, and a copy of the task's files in that
directory."""

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import msgspec

from bombus.errors import BombusError

BYTES_MAX = 1 << 20
IGNORED = frozenset({"LABEL", "MAINTAINER", "CMD"})  # Harbor starts its own shell instead of the CMD
LEAVES_OUT = (".dockerignore", "Dockerfile.dockerignore")
SERVICES = ("docker-compose.yaml", "docker-compose.yml", "compose.yaml", "compose.yml")


class CannotDoWithout(BombusError):
    """Raised if a task cannot be played without its image. The message says why."""


class PlainBase(msgspec.Struct, frozen=True):
    """An image that needs no build: its working directory, and whether that directory contains the files beside the
    Dockerfile."""

    workdir: str
    copies_files: bool


def read_dockerfile(environment: Path, workdir: object, default: str) -> PlainBase:
    """Return the image that a task's folder `environment` describes. `workdir` is the setting in `task.toml`, or None.

    Without a Dockerfile, the agent gets the folder's files. Raises `CannotDoWithout` if the task needs a built image,
    and `ValueError` if `workdir` is not a string.
    """
    for name in SERVICES:
        if (environment / name).exists():
            raise CannotDoWithout(f"environment/{name} starts services")
    if workdir is not None and not isinstance(workdir, str):
        raise ValueError("environment.workdir in task.toml is not a string")
    path = environment / "Dockerfile"
    if not path.exists():
        return PlainBase(workdir or default, environment.is_dir())
    with path.open(encoding="utf-8", errors="replace") as file:
        base = _base_of(file.read(BYTES_MAX), default)
    for name in LEAVES_OUT:
        if base.copies_files and (environment / name).exists():
            raise CannotDoWithout(f"environment/{name} keeps files out of the image")
    if base.copies_files and workdir and PurePosixPath(workdir) != PurePosixPath(base.workdir):
        raise CannotDoWithout(
            f"environment/Dockerfile copies files to {base.workdir}, but environment.workdir is {workdir}"
        )
    return PlainBase(workdir or base.workdir, base.copies_files)


def _base_of(text: str, default: str) -> PlainBase:
    """Return the image that a Dockerfile describes. Raises `CannotDoWithout` if it has build steps."""
    inside, copies, bases = default, False, 0
    is_known = False  # a relative WORKDIR starts at the base image's WORKDIR, which is not known
    for number, words in _instructions(text):
        match words:
            case ["FROM", *_] if not bases:
                bases += 1
            case ["WORKDIR", where] if "$" not in where and not copies and (is_known or where.startswith("/")):
                inside, is_known = str(PurePosixPath(inside, where)), True
            case ["COPY" | "ADD", "." | "./", target] if PurePosixPath(inside, target) == PurePosixPath(inside):
                copies = True
            case [word, *_] if word in IGNORED:
                pass
            case _:
                raise CannotDoWithout(f"environment/Dockerfile line {number} is {' '.join(words)[:80]}")
    return PlainBase(inside, copies)


def _instructions(text: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the line number and the words of each instruction, with the first word in upper case."""
    words: list[str] = []
    began = 0
    for number, line in enumerate(text.split("\n"), 1):
        bare = line.strip()
        if not bare or bare.startswith("#"):
            continue
        began = began if words else number
        words += bare.removesuffix("\\").split()
        if words and not bare.endswith("\\"):
            yield began, [words[0].upper(), *words[1:]]
            words = []
    if words:
        yield began, [words[0].upper(), *words[1:]]
