"""Reads a folder of Harbor tasks, and refuses, by name, the tasks that cannot be played without their image."""

import re
import tomllib
from collections.abc import Iterator, Mapping, Set
from pathlib import Path, PurePosixPath
from typing import Any

from bombus.errors import Code, Refused
from bombus.rollout.environment import WITHHELD
from bombus.rollout.harbor.dockerfile import CannotDoWithout, read_dockerfile
from bombus.rollout.tasks import AgentTask, TaskPackage, checked_task

FILE_BYTES_MAX = 1 << 20  # size of task.toml or instruction.md
TASKS_MAX = 100_000
VARIABLES_BYTES_MAX = 64 << 10  # size of one table: variables are passed as arguments to a program
VERIFIER_S = 600.0  # Harbor's default. For agents there is no default limit
DAY_S = 86_400.0
NAMED_MAX = 8
WORKDIR = "/app"
PARTS = ("task.toml", "instruction.md", "environment", "environment/Dockerfile", "tests", "tests/test.sh")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_CANARY = re.compile(r"\A(?:[ \t]*(?:<!--.*canary.*-->|#.*canary.*)[ \t]*\n)+\s*", re.IGNORECASE)
# Without the packages that these commands install, tests would fail and a good answer would be judged to be bad.
_INSTALLS = re.compile(r"\b(apt|apt-get|apk|dnf|yum|pip|pip3|npm|conda)\s+(-\S+\s+)*(install|add|update|i)\b")
# Folders in / that cannot contain a task's working directory: the machine's own, and Harbor's.
RESERVED = {"bin", "boot", "dev", "etc", "home", "lib", "lib32", "lib64", "libx32", "logs", "old", "opt", "proc"}
RESERVED |= {"root", "run", "sbin", "sys", "tests", "tmp", "usr", "var"}

# The keys that each table may have. Image limits are ignored; any other key would change the task.
_TOP = {"version", "schema_version", "task", "metadata", "source", "artifacts", "solution"}
_TOP |= {"agent", "verifier", "environment"}
_AGENT = {"timeout_sec"}
_VERIFIER = {"timeout_sec", "env"}
_ENVIRONMENT = {"workdir", "env", "allow_internet"}
_ENVIRONMENT |= {"build_timeout_sec", "cpus", "memory", "memory_mb", "storage", "storage_mb"}
_DEFAULTS = {"user": "root", "environment_mode": "shared", "os": "linux", "network_mode": "public"}

Table = Mapping[str, Any]


def read_task_folders(path: Path) -> list[AgentTask]:
    """Return the task in a folder that has a `task.toml`, or else the tasks in its subfolders that have one, sorted by
    name.

    Raises `Refused` with the names of tasks that are invalid or need an image.
    """
    try:
        folders = [path] if (path / "task.toml").is_file() else list(_sub_folders(path))
    except OSError as error:
        raise Refused(Code.BAD_CONFIG, f"--task {path} cannot be read: {error}") from error
    if not folders or len(folders) > TASKS_MAX:
        raise Refused(
            Code.BAD_CONFIG,
            f"--task {path} has {len(folders) or 'no'} tasks: a Harbor folder must have 1 to {TASKS_MAX} sub-folders "
            "with task.toml, instruction.md and tests/test.sh",
        )
    tasks: dict[str, AgentTask] = {}
    imaged: list[str] = []
    for folder in folders:
        try:
            task = task_of_folder(folder, path)
            if task.task_id in tasks:
                raise ValueError(f"another task is also named {task.task_id!r}")
        except CannotDoWithout as error:
            imaged.append(f"{folder.name} ({error})")
        except (ValueError, OSError, RuntimeError) as error:  # RuntimeError is raised for links that form a loop
            raise Refused(Code.BAD_CONFIG, f"--task {folder}: {error}") from error
        else:
            tasks[task.task_id] = task
    if imaged:
        more = f", and {len(imaged) - NAMED_MAX} more" if len(imaged) > NAMED_MAX else ""
        raise Refused(
            Code.BAD_CONFIG,
            f"--task {path}: {len(imaged)} of {len(folders)} tasks need an image, but `bombus rollout` plays with "
            f"this machine's own programs: {', '.join(imaged[:NAMED_MAX])}{more}. Leave them out, or play them in "
            "Harbor",
        )
    return list(tasks.values())


def task_of_folder(folder: Path, data_set: Path) -> AgentTask:
    """Return the task in one folder of a data set.

    Raises `ValueError` if the task is invalid, and `CannotDoWithout` if it needs an image.
    """
    _check_inside(folder, data_set)
    settings = _settings(_text(folder / "task.toml"))
    agent, verifier, environment = (_table(settings, name) for name in ("agent", "verifier", "environment"))
    for name, table, known in (
        ("", settings, _TOP),
        ("agent.", agent, _AGENT),
        ("verifier.", verifier, _VERIFIER),
        ("environment.", environment, _ENVIRONMENT),
    ):
        _check_keys(name, table, known)
    prompt = without_canary(_text(folder / "instruction.md"))
    if not prompt.strip():
        raise ValueError("its instruction.md is empty")
    if not (folder / "tests/test.sh").is_file():
        raise ValueError("it has no tests/test.sh, which judges it")
    _check_installs(folder)
    if (folder / "trajectory.json").exists():
        raise CannotDoWithout("its trajectory.json contains an earlier agent's actions, which agents here do not get")
    if environment.get("allow_internet", True) is not True:
        raise CannotDoWithout("environment.allow_internet is false, but agents have this machine's network")
    dockerfile = read_dockerfile(folder / "environment", environment.get("workdir"), WORKDIR)
    everywhere = _variables(environment, "environment")
    package = TaskPackage(
        folder=folder.resolve(),
        hidden=data_set.resolve(),
        files=folder.resolve() / "environment" if dockerfile.copies_files else None,
        workdir=_checked_workdir(dockerfile.workdir),
        timeout_s=_seconds(agent, "agent") if "timeout_sec" in agent else None,
        reward_timeout_s=_seconds(verifier, "verifier"),
        variables=everywhere,
        judge_variables={**everywhere, **_variables(verifier, "verifier")},
    )
    return checked_task(_table(settings, "task").get("name", folder.resolve().name), prompt, {}, package)


def _sub_folders(path: Path) -> Iterator[Path]:
    for folder in sorted(path.iterdir()):
        if (folder / "task.toml").is_file():
            yield folder
        elif (folder / "instruction.md").is_file():
            raise Refused(Code.BAD_CONFIG, f"--task {folder} has an instruction.md but no task.toml")


def without_canary(text: str) -> str:
    """Return an instruction without its leading canary lines, which mark a benchmark's files and are not meant for
    agents."""
    return _CANARY.sub("", text, count=1)


def _check_inside(folder: Path, data_set: Path) -> None:
    """Raise `ValueError` if a task, or a part of it, is a link that leads out of the data set.

    The link's target may be one of the user's files, or a folder with tests and solutions that is not hidden from
    agents.
    """
    whole = data_set.resolve()
    if not (found := folder.resolve()).is_relative_to(whole):
        raise ValueError(
            f"it is a link that leads out of {data_set}, to {found}, which agents could read: replace it with a copy"
        )
    for name in PARTS:
        if not (found := (folder / name).resolve()).is_relative_to(whole):
            raise ValueError(f"its {name} is a link that leads out of the data set, to {found}: replace it with a copy")


def _text(path: Path) -> str:
    with path.open("rb") as file:
        data = file.read(FILE_BYTES_MAX + 1)
    if len(data) > FILE_BYTES_MAX:
        raise ValueError(f"{path.name} has over {FILE_BYTES_MAX} bytes")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path.name} is not UTF-8: {error}") from error


def _settings(text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ValueError(f"task.toml cannot be read: {error}") from error


def _table(settings: Table, name: str) -> Table:
    found = settings.get(name, {})
    if not isinstance(found, dict):
        raise ValueError(f"{name} in task.toml is not a table")
    return found


def _check_keys(prefix: str, table: Table, known: Set[str]) -> None:
    for key, value in table.items():
        if key not in known and value and value != _DEFAULTS.get(key):
            raise CannotDoWithout(f"task.toml sets {prefix}{key}")


def _check_installs(folder: Path) -> None:
    """Raise `CannotDoWithout` if `test.sh`, or another script in `tests`, installs packages."""
    for script in sorted(path for path in (folder / "tests").rglob("*.sh") if path.is_file()):
        for number, line in enumerate(_text(script).split("\n"), 1):
            if not line.lstrip().startswith("#") and (found := _INSTALLS.search(line)):
                name = script.relative_to(folder)
                raise CannotDoWithout(f"{name} line {number} installs packages with {found[0]!r}")


def _seconds(table: Table, name: str) -> float:
    found = table.get("timeout_sec", VERIFIER_S)
    if isinstance(found, bool) or not isinstance(found, int | float) or not 0 < found <= DAY_S:
        raise ValueError(f"{name}.timeout_sec in task.toml is {found!r}, but must be above 0 and at most {DAY_S:.0f} s")
    return float(found)


def _variables(table: Table, name: str) -> dict[str, str]:
    found = _table(table, "env")
    for key, value in found.items():
        if not _VARIABLE.fullmatch(key):
            raise ValueError(f"{name}.env in task.toml has {key!r}, which is not a valid name for a variable")
        if not isinstance(value, str) or "\0" in value:
            raise ValueError(f"{name}.env.{key} in task.toml must be a string without null characters")
        if key.startswith(WITHHELD) and name == "environment":
            raise ValueError(
                f"environment.env in task.toml sets {key}, a name that is reserved for what `bombus rollout` sets"
            )
        if "${" in value:
            raise ValueError(f"{name}.env.{key} in task.toml refers to a variable of Harbor's caller: write the value")
    if sum(len(f"{key}={value}".encode()) for key, value in found.items()) > VARIABLES_BYTES_MAX:
        raise ValueError(f"{name}.env in task.toml has over {VARIABLES_BYTES_MAX} bytes: put long values into a file")
    return dict(found)


def _checked_workdir(workdir: str) -> str:
    parts = PurePosixPath(workdir).parts
    if len(parts) < 2 or parts[0] != "/" or ".." in parts or parts[1] in RESERVED or ":" in workdir:
        raise CannotDoWithout(f"its working directory is {workdir}, where the sandbox cannot put the task's folder")
    return workdir
