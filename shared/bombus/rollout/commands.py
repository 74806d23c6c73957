"""Commands with fields in braces. No shell is involved, so a field's value always stays within a single argument.

Commands are checked before any episode is claimed.
"""

import os
import re
import shlex
import shutil
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import msgspec

from bombus.errors import Code, Refused
from bombus.rollout.tasks import PATH_FIELDS, AgentTask

# `${name}` is left for a shell, and `{{name}}` becomes `{name}`.
_BRACES = re.compile(r"\$\{\w+\}|\{\{\w+\}\}|\{(\w+)\}")
_OTHER_BRACES = re.compile(r"(?<![{$])\{([^{}]+)\}(?!\})")  # for example `{test-file}` and `{meta.answer}`
HEAD_BYTES = 512  # how much of a program is read: enough to tell a script from a binary


class CommandTemplate(msgspec.Struct, frozen=True):
    """The words of a command, and the flag that it was given with."""

    words: tuple[str, ...]
    flag: str

    def fields(self) -> set[str]:
        return {found[1] for word in self.words for found in _BRACES.finditer(word) if found[1]}

    def near_fields(self, known: Collection[str]) -> list[str]:
        """Return each text in braces that is not a field, although it is a known name or begins with one followed by
        `.` or `[`."""
        found = (found[1] for word in self.words for found in _OTHER_BRACES.finditer(word))
        return [text for text in found if not text.isidentifier() and {text, re.split(r"[.\[]", text)[0]} & set(known)]

    def filled(self, values: Mapping[str, str]) -> list[str]:
        """Return the words with their fields replaced. Raises `KeyError` if a field has no value."""
        return [filled(word, values) for word in self.words]


def filled(text: str, values: Mapping[str, str]) -> str:
    def value(found: re.Match[str]) -> str:
        if found[1]:
            return values[found[1]]
        return found[0] if found[0].startswith("$") else found[0][1:-1]

    return _BRACES.sub(value, text)


def parse_command(text: str, flag: str) -> CommandTemplate:
    """Split a command into words as a shell does. Raises `Refused` if that is impossible."""
    check_utf8(text, flag)
    try:
        words = tuple(shlex.split(text))
    except ValueError as error:
        raise Refused(Code.BAD_CONFIG, f"{flag} {text!r} cannot be split into words: {error}") from error
    if not words:
        raise Refused(Code.BAD_CONFIG, f"{flag} is empty: give a command")
    return CommandTemplate(words, flag)


def check_utf8(text: str, flag: str) -> None:
    """Raise `Refused` if an argument is not UTF-8, because messages to the hive can contain only UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise Refused(Code.BAD_CONFIG, f"{flag} {text!r} has bytes that are not UTF-8") from error


def check_fields(template: CommandTemplate, tasks: Sequence[AgentTask]) -> None:
    """Raise `Refused` if a command has a field that a task lacks."""
    wanted = template.fields() - PATH_FIELDS
    for task in tasks:
        known = task.words()
        for name in sorted(wanted - known.keys()):
            raise Refused(Code.BAD_CONFIG, _unknown(template.flag, name, task, known))
        for text in template.near_fields(known):
            raise Refused(
                Code.BAD_CONFIG,
                f"{template.flag} has {{{text}}}, which is not a field: a name has letters, digits and _ only, and "
                f"cannot refer to a part of a field. Add a field for it to task {task.task_id}",
            )


def _unknown(flag: str, name: str, task: AgentTask, known: Collection[str]) -> str:
    there = ", ".join(sorted({*known, *PATH_FIELDS}))
    return (
        f"{flag} has the field {{{name}}}, which task {task.task_id} does not have; it has {there}. Write "
        f"{{{{{name}}}}} if the command itself needs {{{name}}}"
    )


def check_program(template: CommandTemplate, workspace: Path | None) -> None:
    """Raise `Refused` if no episode could run the program. `workspace` is the original, not a copy."""
    if "{" not in template.words[0]:
        program = Path(_found(template, workspace))
        if why := _why_not_run(program):
            raise Refused(Code.BAD_CONFIG, f"{template.flag}: {program} cannot be run: {why}")


def _found(template: CommandTemplate, workspace: Path | None) -> str:
    """Return the path of a command's program. Raises `Refused` if it does not exist."""
    program = template.words[0]
    if "/" not in program:
        found, where = shutil.which(program), "on the PATH"
    elif os.path.isabs(program):
        found, where = program, "on this machine"
    elif os.path.normpath(program).startswith(".."):
        raise Refused(
            Code.BAD_CONFIG,
            f"{template.flag}: {program} is outside the workspace, but episodes run in copies of the workspace: give "
            "an absolute path",
        )
    elif workspace is None:
        found, where = None, "in an empty workspace: give --workspace"
    else:
        found, where = str(workspace / program), f"in {workspace}"
    if found is None or not os.path.exists(found):
        raise Refused(Code.BAD_CONFIG, f"{template.flag}: there is no program {program} {where}")
    return found


def _why_not_run(program: Path) -> str:
    """Return why the system would not start an existing program, or "" if it would start it."""
    if not program.is_file():
        return "it is not a file"
    if not os.access(program, os.X_OK):
        return "it is not executable (chmod +x)"
    try:
        with program.open("rb") as file:
            head = file.read(HEAD_BYTES)
    except OSError:
        return ""  # a program may be executable but not readable
    if not head.startswith(b"#!"):
        return "" if b"\0" in head else "its first line does not name an interpreter, such as #!/bin/sh"
    line = head[2:].split(b"\n")[0]
    if line.endswith(b"\r"):
        return "its first line ends with a carriage return, as on Windows: save it with Unix line endings"
    interpreter = os.fsdecode(line.split()[0]) if line.split() else ""
    return (
        ""
        if os.access(interpreter, os.X_OK)
        else f"its first line names the interpreter {interpreter!r}, which this machine cannot run"
    )
