"""The tasks of a rollout, and how they are read from a file of JSON lines."""

from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec

from bombus.json_lines import read_json_lines

TASK_ID_CHARACTERS = 512  # the longest id that the hive accepts
TASK_BYTES = 100_000  # Linux does not allow an argument or a variable of more than 128 KiB
PATH_FIELDS = frozenset({"workspace", "folder"})  # command fields that every episode has, whatever its task


class TaskPackage(msgspec.Struct, frozen=True, kw_only=True):
    """A task folder in Harbor's format, and the limits that it sets, in seconds.

    `files` is the folder that is copied into the agent's working directory, or None to leave that directory empty. The
    folder `hidden` is hidden from agents.
    """

    folder: Path
    hidden: Path
    files: Path | None
    workdir: str
    timeout_s: float | None  # if None, `--timeout-s` applies
    reward_timeout_s: float
    variables: dict[str, str] = {}
    judge_variables: dict[str, str] = {}


class AgentTask(msgspec.Struct, frozen=True, kw_only=True):
    """A task for an agent. `fields` contains everything on the task's line except the id and the prompt.

    A task with a `package` has its own sandbox, limits and reward.
    """

    task_id: str
    prompt: str
    fields: dict[str, Any] = {}
    package: TaskPackage | None = None

    def as_json(self) -> str:
        return msgspec.json.encode({"task_id": self.task_id, "prompt": self.prompt, **self.fields}).decode()

    def words(self) -> dict[str, str]:
        """Return the text that each of this task's fields has in a command: strings as they are, other values as
        JSON."""
        values = {"task_id": self.task_id, "prompt": self.prompt, **self.fields}
        return {name: value if isinstance(value, str) else _json(value) for name, value in values.items()}


def read_tasks(path: Path) -> list[AgentTask]:
    """Return the tasks in a file, one for each non-empty line.

    A line must be an object with the string `prompt`. Its `task_id` defaults to the file's name, the line's number and
    the line's digest, so that another file with the same name has different tasks. Its other fields can be used in
    commands. Raises `Refused` with the number of an invalid line.
    """
    seen: dict[str, int] = {}

    def read(line: str, number: int) -> AgentTask:
        task = task_of(line, f"{path.stem}-{number}-{_digest(line)}")
        if seen.setdefault(task.task_id, number) != number:
            raise ValueError(f"task_id {task.task_id!r} is already used on line {seen[task.task_id]}")
        return task

    return read_json_lines(path, "task", read, option="--task")


def task_of(line: str, default_id: str) -> AgentTask:
    """Return the task of one line. Raises `ValueError` if the line is invalid."""
    try:
        values = msgspec.json.decode(line, type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise ValueError(f"it is not a JSON object: {error}") from error
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    prompt, task_id = values.pop("prompt", None), values.pop("task_id", default_id)
    if not isinstance(prompt, str) or not prompt:
        raise ValueError("it has no `prompt`, which is the text of the task")
    _check_fields(values)
    return checked_task(task_id, prompt, values)


def checked_task(task_id: object, prompt: str, fields: dict[str, Any], package: TaskPackage | None = None) -> AgentTask:
    """Return a task, after checking it against the limits of the hive and of a program's arguments.

    Raises `ValueError` if the task exceeds them.
    """
    if not isinstance(task_id, str) or not 1 <= len(task_id) <= TASK_ID_CHARACTERS:
        raise ValueError(f"`task_id` must be a string of 1 to {TASK_ID_CHARACTERS} characters")
    task = AgentTask(task_id=task_id, prompt=prompt, fields=fields, package=package)
    if len(task.as_json().encode()) > TASK_BYTES:
        raise ValueError(
            f"it has over {TASK_BYTES} bytes, which is too much for a program's arguments: put long values into "
            "a file of the workspace"
        )
    if any("\0" in text for text in task.words().values()):
        raise ValueError("it has a null character, which no program's argument may contain")
    return task


def _check_fields(fields: Mapping[str, Any]) -> None:
    for name in fields:
        if name in PATH_FIELDS:
            raise ValueError(f"a task cannot set `{name}`: it is a path of the episode")


def _digest(line: str) -> str:
    return blake2b(line.strip().encode(), digest_size=4).hexdigest()


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()
