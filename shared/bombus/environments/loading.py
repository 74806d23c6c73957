"""Load environments by class name, and tasks from a JSON Lines file."""

import importlib
import inspect
import os
import sys
from pathlib import Path
from typing import Any

import msgspec

from bombus.errors import Code, Refused, in_one_line
from bombus.json_lines import read_json_lines
from bombus.sdk.types import Task

TASK_FIELDS = frozenset(Task.model_fields)


def load_class(name: str) -> type:
    """Return the class named by `module:Class`; modules in the working directory are found too. Raises `Refused` if
    there is no such class."""
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise Refused(Code.BAD_CONFIG, f"{name!r} is not the name of a class: write module:Class, as in my_env:Counter")
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        found: Any = importlib.import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, SyntaxError) as error:
        raise Refused(Code.BAD_CONFIG, f"{name} cannot be imported: {in_one_line(error)}") from error
    if not inspect.isclass(found):
        raise Refused(Code.BAD_CONFIG, f"{name} is of type {type(found).__name__}, not a class: name the class itself")
    return found


def read_environment_tasks(path: Path) -> list[Task]:
    """Return the tasks in a file with one JSON object per line. Empty lines are skipped.

    Fields that `Task` does not have go into its metadata; `prompt` is another name for `main_query`. Raises `Refused`
    with the line's number if a line is malformed.
    """

    def task(line: str, number: int) -> Task:
        values = msgspec.json.decode(line, type=dict[str, Any])
        if "prompt" in values:
            values.setdefault("main_query", values.pop("prompt"))
        values.setdefault("task_id", f"{path.stem}-{number}")
        own = {name: value for name, value in values.items() if name in TASK_FIELDS}
        others = {name: value for name, value in values.items() if name not in TASK_FIELDS}
        return Task(**{**own, "metadata": {**own.get("metadata", {}), **others}})

    return read_json_lines(path, "task", task)
