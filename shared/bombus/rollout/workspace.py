"""The folder of an episode: a copy of the workspace, with a home and a folder for temporary files beside it."""

import asyncio
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from math import inf
from pathlib import Path
from typing import Any

import msgspec

from bombus.errors import Code, Refused
from bombus.hive.failures import FailureKind
from bombus.private import private_folder
from bombus.rollout.process import CannotStart, OutputFile, Program, run_program
from bombus.sdk.errors import InfraError

log = logging.getLogger("bombus")

# Copies share blocks with the original where the file system supports it.
COPY = ("cp", "-a", "--reflink=auto") if sys.platform == "linux" else ("cp", "-a")

# Variables that make git use a repository other than the one in its folder (`git rev-parse --local-env-vars`).
GIT_ELSEWHERE = frozenset(
    {
        "GIT_ALTERNATE_OBJECT_DIRECTORIES",
        "GIT_COMMON_DIR",
        "GIT_CONFIG",
        "GIT_CONFIG_COUNT",
        "GIT_CONFIG_PARAMETERS",
        "GIT_DIR",
        "GIT_GRAFT_FILE",
        "GIT_IMPLICIT_WORK_TREE",
        "GIT_INDEX_FILE",
        "GIT_NAMESPACE",
        "GIT_OBJECT_DIRECTORY",
        "GIT_PREFIX",
        "GIT_REPLACE_REF_BASE",
        "GIT_SHALLOW_FILE",
        "GIT_WORK_TREE",
    }
)

ROOM_BYTES = 64 << 10  # a disk with less free space counts as full


class EpisodeFolder(msgspec.Struct, frozen=True):
    """The folder of one episode. `workspace` is a copy, and has the name of the folder that it was copied from, because
    some agents show that name to their model.

    The agent may change anything in the folder, so bombus keeps its own files elsewhere.
    """

    path: Path
    workspace: Path

    @property
    def home(self) -> Path:
        """Return the folder in which a harness keeps its configuration and memory."""
        return self.path / "home"

    @property
    def temporary(self) -> Path:
        return self.path / "tmp"

    @property
    def outputs(self) -> Path:
        """Return the folder for the output of the episode's programs, which is beside `path`, not in it."""
        return self.path.with_name(f"{self.path.name}.outputs")

    def words(self) -> dict[str, str]:
        """Return the values of the command fields that are paths."""
        return {"workspace": str(self.workspace), "folder": str(self.path)}


def check_workspace(workspace: Path, scratch: Path, out: Path | None = None) -> Path:
    """Return the absolute path of a workspace. Raises `Refused` if it cannot be copied for an agent."""
    found = workspace.expanduser().resolve()
    if not found.is_dir():
        raise Refused(Code.BAD_CONFIG, f"--workspace {workspace} is not a folder")
    if scratch.resolve().is_relative_to(found):
        raise Refused(
            Code.BAD_CONFIG,
            f"--scratch {scratch} is inside the workspace {found}, so each copy would contain the earlier ones",
        )
    if out is not None and out.resolve().is_relative_to(found):
        raise Refused(
            Code.BAD_CONFIG,
            f"--out {out} is inside the workspace {found}, so agents could read the output of other agents",
        )
    for git in _git_elsewhere(found):
        raise Refused(
            Code.BAD_CONFIG,
            f"--workspace {workspace} contains {git}, which points to a git repository or working tree outside the "
            "workspace, as in a worktree or a submodule: agents would commit to the original. Pass a clone instead",
        )
    return found


def _git_elsewhere(workspace: Path) -> Iterator[Path]:
    """Yield each `.git` whose repository or working tree is outside the workspace, so that a copy would share it."""
    for parent, folders, files in os.walk(workspace):
        if ".git" in folders or ".git" in files:
            git = Path(parent, ".git")
            target = _target(git)
            found = git.parent / target
            if _leads_out(workspace, git.parent, target) or _leads_out(workspace, found, _work_tree(found)):
                yield git
        folders[:] = [name for name in folders if name != ".git"]


def _leads_out(workspace: Path, start: Path, path: Path) -> bool:
    """Return whether a path, relative to `start` or absolute, would lead out of a copy of the workspace."""
    return path.is_absolute() or not (start / path).resolve().is_relative_to(workspace)


def _work_tree(git_folder: Path) -> Path:
    """Return a repository's `core.worktree` without resolving it, or an empty path if it is not set."""
    if shutil.which("git") is None:
        return Path()
    for name in ("config.worktree", "config"):
        asked = ("git", "config", "--file", git_folder / name, "--includes", "--get", "core.worktree")
        written = subprocess.run(asked, capture_output=True, check=False).stdout
        if written.strip():
            return Path(os.fsdecode(written.removesuffix(b"\n")))
    return Path()


def _target(git: Path) -> Path:
    """Return the path to which a `.git` link or file points, without resolving it, or `.git` itself if it is a
    folder."""
    if git.is_symlink():
        return git.readlink()
    if git.is_file():
        return Path(git.read_text(errors="replace").strip().removeprefix("gitdir:").strip())
    return Path(".git")


def check_scratch(scratch: Path) -> None:
    """Raise `Refused` unless `scratch` is a folder in which files can be written."""
    if not scratch.is_dir():
        raise Refused(Code.BAD_CONFIG, f"--scratch {scratch} is not a folder")
    _check_writable(scratch, f"--scratch {scratch}")


def check_out(out: Path) -> None:
    """Raise `Refused` unless `out` is, or can be created as, a folder in which files can be written."""
    there = out.absolute()
    while not os.path.lexists(there):
        there = there.parent
    if not there.is_dir():
        raise Refused(Code.BAD_CONFIG, f"--out {out} cannot be made: {there} is not a folder")
    _check_writable(there, f"--out {out}")


def _check_writable(folder: Path, what: str) -> None:
    try:
        check_room(folder)
    except OSError as error:
        raise Refused(Code.BAD_CONFIG, f"{what} cannot be written: {error.strerror} in {folder}") from error


@asynccontextmanager
async def episode_folder(path: Path, workspace: Path | None) -> AsyncIterator[EpisodeFolder]:
    """Make the folder of an episode, with a copy of the workspace or an empty workspace, and remove it afterwards.

    Raises `InfraError` if the workspace cannot be copied, and `OSError` if a folder cannot be made because it already
    exists or the disk is full.
    """
    # The copy is one level deeper than the other folders, because a workspace may have the same name as one of them.
    folder = EpisodeFolder(path, path / "copy" / (workspace.name if workspace is not None else "workspace"))
    made = (path, folder.outputs)
    for each in made:
        each.mkdir(mode=0o700)
    try:
        for each in (folder.workspace, folder.home, folder.temporary):
            private_folder(each)
        if workspace is not None:
            await _copy(workspace, folder)
        yield folder
    finally:
        for each in made:
            await asyncio.to_thread(remove_folder, each)


def check_room(folder: Path) -> None:
    """Raise `OSError` if no file can be written in the folder, for example because the disk is full."""
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(bytes(ROOM_BYTES))
        file.flush()


async def _copy(source: Path, folder: EpisodeFolder) -> None:
    """Copy a workspace into the folder of an episode. Raises `InfraError` if that fails.

    The copying program has its own process group, so that a Ctrl-C in the terminal reaches only bombus, which then ends
    the program.
    """
    with OutputFile(folder.outputs / "copy.txt") as printed:
        words = (*COPY, "--", f"{source}/.", str(folder.workspace))
        copying = Program(words=words, folder=folder.path, variables=os.environ, output=printed)
        try:
            ended = await run_program(copying, inf)
        except CannotStart as error:
            raise InfraError(f"the workspace could not be copied: {error}", FailureKind.SANDBOX) from error
        if ended.exit_code:
            raise InfraError(f"the workspace could not be copied: {printed.tail().strip()[-300:]}", FailureKind.SANDBOX)


def remove_folder(path: Path) -> None:
    """Remove a folder and everything in it, even if an agent has made it read-only. Log a warning if that fails."""
    try:
        _remove(path)
    except RecursionError:
        _remove_deep(path)
    except OSError as error:
        _complain(path, str(error))


def _remove_deep(path: Path) -> None:
    """Remove a folder that is nested too deeply for Python's own functions."""
    try:
        removed = subprocess.run(
            ("rm", "-rf", "--", path), capture_output=True, text=True, errors="replace", check=False
        )
    except OSError as error:
        _complain(path, str(error))
    else:
        if removed.returncode:
            _complain(path, removed.stderr.strip()[-300:])


def _complain(path: Path, why: str) -> None:
    log.warning("%s could not be removed: %s", path, why)


def _remove(path: Path) -> None:

    def retry(remove: Callable[..., Any], name: str, _: object) -> None:
        if not os.path.lexists(name):
            return  # the rollout and its episode may remove the same folder at the same time
        os.chmod(Path(name).parent, 0o700)
        if os.path.isdir(name) and not os.path.islink(name):
            os.chmod(name, 0o700)
            for each in _folders_in(name):
                with suppress(FileNotFoundError):
                    each.chmod(0o700)
            shutil.rmtree(name, ignore_errors=True)
        else:
            remove(name)

    if path.exists():
        shutil.rmtree(path, onerror=retry)


def _folders_in(folder: str) -> Iterator[Path]:
    """Yield the folders below `folder`, yielding each one before reading its entries."""
    for parent, folders, _ in os.walk(folder):
        for name in folders:
            if not os.path.islink(each := Path(parent, name)):
                yield each
