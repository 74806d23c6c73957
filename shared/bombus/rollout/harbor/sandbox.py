"""The sandbox of a task in Harbor's format: folders are mounted where the task says, and all other files are
read-only.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from bombus.errors import Code, Refused
from bombus.rollout.harbor.hives import private_places
from bombus.rollout.tasks import TaskPackage
from bombus.rollout.workspace import EpisodeFolder

SETUP = Path(__file__).with_name("sandbox.sh")
NAMESPACES = ("--user", "--map-root-user", "--pid", "--fork", "--mount", "--ipc", "--uts", "--kill-child")
CHECK_S = 30.0
TEST = "/tests/test.sh"
SHELL = "/bin/bash"  # for tests that name no interpreter, as in Harbor
OWN = frozenset({"HOME", "TMPDIR"})  # variables that the sandbox sets itself, even if the task sets them


def agent_prefix(package: TaskPackage, folder: EpisodeFolder, printed: Path) -> list[str]:
    """Return the words to put before an agent's command, so that the agent runs in a sandbox.

    The sandbox hides the data set, with all tests and solutions, and the folder `printed`, which contains the output of
    all episodes' programs. The task's variables are among the words because they must be set inside the sandbox: if the
    task's `PATH` were set outside, it would determine which program creates the sandbox.
    """
    for made in (folder.path / "agent", folder.path / "artifacts", folder.outputs / "root"):
        made.mkdir()
    return _words(package, folder, "", str(printed.resolve()), package.variables)


def judge_words(package: TaskPackage, folder: EpisodeFolder) -> list[str]:
    """Return the words of the command that runs a task's tests, from a copy that no agent has seen.

    The tests must write the reward into `verifier_folder`, which is created here.
    """
    tests = folder.outputs / "tests"
    shutil.copytree(package.folder / "tests", tests, symlinks=True)
    script = tests / "test.sh"
    script.unlink()  # it may be a link to another file of the task, whose mode must not change
    shutil.copyfile(package.folder / "tests/test.sh", script)
    script.chmod(0o755)
    verifier_folder(folder).mkdir()
    command = [TEST] if script.read_bytes().startswith(b"#!") else [SHELL, TEST]
    return [*_words(package, folder, str(folder.outputs), "", package.judge_variables), *command]


def verifier_folder(folder: EpisodeFolder) -> Path:
    """Return the folder into which a task's tests write the reward, and into which no agent can write."""
    return folder.outputs / "verifier"


def hides(package: TaskPackage, program: Path) -> bool:
    """Return whether the task's sandbox hides a file of this machine by mounting other folders in its place."""
    workdir = Path(package.workdir)
    if program.is_relative_to(workdir):
        return False  # a file of the task
    places = (Path("/tmp"), Path("/run"), Path(*workdir.parts[:2]), package.hidden.resolve())
    return any(path.is_relative_to(place) for path in (program, program.resolve()) for place in places)


def _words(
    package: TaskPackage, folder: EpisodeFolder, judged: str, printed: str, variables: Mapping[str, str]
) -> list[str]:
    episode = (folder.path, folder.outputs, folder.workspace, package.workdir)
    private = "\n".join(str(each) for each in private_places() if "\n" not in str(each))
    places = (*episode, package.hidden, printed, judged, Path.home(), private)
    inside = [f"{name}={value}" for name, value in variables.items() if name not in OWN]
    return [_unshare() or "unshare", *NAMESPACES, "/bin/sh", str(SETUP), *map(str, places), "env", *inside]


def _unshare() -> str | None:
    """Return the absolute path of `unshare`, so that a file in a task's working directory cannot take its place."""
    found = shutil.which("unshare", path=os.pathsep.join(("/usr/bin", "/bin", os.environ.get("PATH", ""))))
    return os.path.abspath(found) if found is not None else None


def check_sandbox(package: TaskPackage, scratch: Path) -> None:
    """Raise `Refused` if this machine cannot create a task's sandbox."""
    if sys.platform != "linux" or _unshare() is None or shutil.which("setpriv") is None:
        raise Refused(
            Code.UNSUPPORTED, "tasks in Harbor's format need Linux with `unshare` and `setpriv` (package util-linux)"
        )
    with tempfile.TemporaryDirectory(prefix="bombus-check-", dir=scratch) as made:
        path = Path(made).resolve() / "0"
        folder = EpisodeFolder(path, path / "copy")
        for each in (folder.workspace, folder.home, folder.temporary, folder.outputs):
            each.mkdir(parents=True)
        try:
            tried = subprocess.run(
                [
                    *agent_prefix(package, folder, folder.outputs),
                    "sh",
                    "-c",
                    "pwd; touch /usr/.bombus 2>/dev/null && echo writable",
                ],
                capture_output=True,
                text=True,
                errors="replace",
                timeout=CHECK_S,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise Refused(
                Code.UNSUPPORTED, f"the sandbox of a task took longer than {CHECK_S:g} s to create"
            ) from error
    if tried.stdout.strip() != package.workdir:
        raise Refused(
            Code.UNSUPPORTED,
            "this machine cannot create a sandbox for Harbor's tasks: the kernel or a container does not let this user "
            "create namespaces (sysctl kernel.unprivileged_userns_clone, "
            f"kernel.apparmor_restrict_unprivileged_userns). It said: {tried.stderr.strip()[-300:]}",
        )
