"""Turns a reward command's exit code and output into a reward."""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from bombus.hive.episodes import REWARD_MAX
from bombus.sdk.errors import InfraError

CANNOT_START = (126, 127)  # a shell's exit codes for a program that it may not run or cannot find
SIGNALLED = range(129, 193)  # a shell's exit codes for a program ended by a signal: 128 plus the signal's number
SHOWN_CHARACTERS = 200

_UNSEEN = re.compile(r"\x1b\[[0-9;]*[A-Za-z]|\ufeff")  # colour codes, and the byte order mark
_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)(e[+-]?\d+)?|[+-]?(inf|infinity|nan)", re.IGNORECASE | re.ASCII)
# Malformed rewards, such as `0,5`, `50%`, `[0.5]`, `True`, `tensor(0.5)` and `reward: 0.5`. The last lines of pytest,
# unittest, `go test`, `cargo test` and make must not match.
_FIGURE = r"[+-]?(\d+([.,_]\d+)*|[.,]\d+)(e[+-]?\d+)?"
_VALUE = (
    rf"[\"'(\[]*{_FIGURE}\s*(%|/\s*{_FIGURE})?[\"')\],]*|true|false|none|null|[a-z_][\w.]*\([\"'\[]*{_FIGURE}\b.*\)"
)
TRACEBACK = "Traceback (most recent call last):\n"
_FRAME = re.compile(r'^  File "(.*)", line \d+', re.MULTILINE)
_EXCEPTION = re.compile(r"(?!AssertionError\b)[A-Za-z_][\w.]*(: .*)?")
_NEARLY = re.compile(
    rf"(\W*(\w+ ){{0,2}}(reward|score)\W{{1,4}}(is )?)?({_VALUE})\W?|\{{.*[\"'](reward|score)[\"']\s*:.*\}}",
    re.IGNORECASE,
)


class Judgement(msgspec.Struct, frozen=True):
    """The result of a reward command. If the command failed and the reward is 0, `complaint` is the last line of the
    command's errors.

    `parts` are the named rewards in a `reward.json`, or empty if there is none.
    """

    reward: float
    complaint: str = ""
    parts: Mapping[str, float] = {}


def judgement_of(exit_code: int, output: str, errors: str, raised: bool = False) -> Judgement:
    """Return a reward command's result. Raises `InfraError` as `reward_of` does, adding the last line of the command's
    errors."""
    lines = errors.strip().splitlines()
    said = lines[-1] if lines else ""
    try:
        reward = reward_of(exit_code, output, raised)
    except InfraError as error:
        raise InfraError(f"{error}: {said}" if said else str(error)) from error
    return Judgement(reward, said if exit_code and not reward else "")


def reward_of(exit_code: int, output: str, raised: bool = False) -> float:
    """Return the reward: the last line of the output if it is a number, otherwise 1 for exit code 0 and 0 for any
    other.

    Raises `InfraError` if the command did not judge: a signal ended it, its program has `raised` an exception (see
    `has_raised`) or could not start, one of the last two lines looks like a malformed reward, or the hive does not
    accept the number.
    """
    check_signal(exit_code)
    lines = [line.strip() for line in _UNSEEN.sub("", output).splitlines() if line.strip()]
    last = lines[-1] if lines else ""
    if not _NUMBER.fullmatch(last):
        _check_intended(lines[-2:])
        if exit_code and raised:
            raise InfraError("the reward command raised an exception: let it print 0 for work that it finds wrong")
        return _reward_of_code(exit_code)
    if not is_reward(float(last)):
        raise InfraError(f"the reward command's last line is {last}, but must be at most {REWARD_MAX:.0e} in magnitude")
    return float(last)


def has_raised(errors: str, words: Sequence[str], workspace: Path) -> bool:
    """Return whether a command's errors end with an exception in its own Python program, which is among its `words`.

    A failed `assert` is a verdict. An exception is the agent's, not the command's, if it comes from a program that the
    command runs, or has a frame in the workspace, in a relative path, or in code that was executed from a string.
    """
    _, _, traced = errors.rstrip().rpartition(TRACEBACK)
    works = (str(workspace), str(workspace.resolve()))
    for file in _FRAME.findall(errors):
        if file.startswith(works) or not (os.path.isabs(file) or file.startswith("<frozen ")):
            return False
    first, last = _FRAME.match(traced), traced.rpartition("\n")[2]
    return first is not None and first[1] in words and _EXCEPTION.fullmatch(last) is not None


def is_reward(number: float) -> bool:
    """Return whether the hive accepts this number as a reward: it must be finite, with a magnitude of at most
    `REWARD_MAX`."""
    return abs(number) <= REWARD_MAX


def check_signal(exit_code: int) -> None:
    """Raise `InfraError` if a signal ended the command: a number that the command printed earlier cannot be trusted."""
    if exit_code < 0:
        raise InfraError(f"the reward command was ended by signal {-exit_code}")
    if exit_code in SIGNALLED:
        raise InfraError(f"a program that the reward command ran was ended by signal {exit_code - 128}")


def _check_intended(last_lines: Sequence[str]) -> None:
    """Raise `InfraError` if one of the last two lines seems to be the intended reward, because the exit code then
    cannot be the reward."""
    for where, line in zip(("last line", "last line but one"), reversed(last_lines), strict=False):
        if _NUMBER.fullmatch(line) or _NEARLY.fullmatch(line):
            raise InfraError(
                f"the reward command's {where} is {line[:SHOWN_CHARACTERS]!r}: print the reward alone on the last "
                "line, as a number such as 0.25, or print nothing (>/dev/null) if the exit code is the reward"
            )


def _reward_of_code(exit_code: int) -> float:
    if exit_code in CANNOT_START:
        raise InfraError(f"the reward command could not start (exit code {exit_code})")
    return 1.0 if exit_code == 0 else 0.0
