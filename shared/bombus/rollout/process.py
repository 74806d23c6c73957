"""Runs one program in its own process group, with a time limit, and leaves none of its processes behind."""

import asyncio
import os
import signal
import time
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec

from bombus.errors import BombusError
from bombus.hive.failures import FailureKind
from bombus.machine.process import die_with_this_process

GRACE_S = 5.0  # time between asking a program to end and killing it
LOOK_S = 1.0  # time between checks of how much a program has printed
OUTPUT_BYTES_MAX = 256 << 20
TAIL_BYTES = 4000


class CannotStart(BombusError):
    """Raised if the program does not exist, or may not be run."""


class StopReason(StrEnum):
    """Why an agent was stopped before it ended by itself."""

    TIMEOUT = "timeout"
    TURNS = "turns"
    TOKENS = "tokens"
    OUTPUT = "output"
    OVER = "over"  # the hive has taken the episode back

    @property
    def failure(self) -> FailureKind:
        """Return the kind of failure of an episode whose agent was stopped. Too much printed output counts as too many
        tokens."""
        match self:
            case StopReason.TIMEOUT:
                return FailureKind.TIME
            case StopReason.TURNS:
                return FailureKind.TURNS
            case StopReason.TOKENS | StopReason.OUTPUT:
                return FailureKind.TOKENS
            case StopReason.OVER:
                return FailureKind.HIVE


class OutputFile:
    """A new file for a program's output.

    The output is read back through the descriptor that created the file, so the program cannot interfere by replacing
    the file, for example with a link to another file or with a pipe that has no writer.
    """

    def __init__(self, path: Path) -> None:
        path.unlink(missing_ok=True)
        self.path = path
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_APPEND, 0o600)

    def __enter__(self) -> "OutputFile":
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    def fileno(self) -> int:
        return self._descriptor

    def size(self) -> int:
        return os.fstat(self._descriptor).st_size

    def tail(self, bytes_max: int = TAIL_BYTES) -> str:
        """Return the end of the file as text."""
        return os.pread(self._descriptor, bytes_max, max(0, self.size() - bytes_max)).decode(errors="replace")


class Program(msgspec.Struct, frozen=True, kw_only=True):
    """A program to run. Its standard output goes to `output`, and its standard error to `errors` or, if that is None,
    to `output` as well."""

    words: Sequence[str]
    folder: Path
    variables: Mapping[str, str]
    output: OutputFile
    errors: OutputFile | None = None

    def printed_bytes(self) -> int:
        return sum(file.size() for file in (self.output, self.errors) if file is not None)


class EndedProgram(msgspec.Struct, frozen=True):
    """The outcome of running a program. If a signal ended the program, `exit_code` is minus the signal's number."""

    exit_code: int
    seconds: float
    stopped: StopReason | None = None


async def run_program(
    program: Program, timeout_s: float, stop: "asyncio.Future[StopReason] | None" = None
) -> EndedProgram:
    """Run a program until it ends, a limit is reached or `stop` has a result, then end all processes in its group.

    Raises `CannotStart` if the program cannot be run.
    """
    began = time.monotonic()
    process = await _started(program)
    ending = asyncio.ensure_future(process.wait())
    waited: set[asyncio.Future[Any]] = {ending} if stop is None else {ending, stop}
    try:
        over = await _over(waited, began + timeout_s, program)
        stopped = None if ending.done() else over or (stop.result() if stop is not None else None)
    finally:
        await _end(process, ending)
    return EndedProgram(ending.result(), time.monotonic() - began, stopped)


async def _started(program: Program) -> asyncio.subprocess.Process:
    """Start a program. If cancelled, end the program and every process that it has started so far."""
    starting = asyncio.ensure_future(_start(program))
    try:
        return await asyncio.shield(starting)
    except asyncio.CancelledError:
        process = await starting
        await _end(process, asyncio.ensure_future(process.wait()))
        raise


async def _over(waited: "set[asyncio.Future[Any]]", deadline: float, program: Program) -> StopReason | None:
    """Wait until one of `waited` is done or a limit is reached. Return the limit that was reached, or None."""
    while True:
        left = deadline - time.monotonic()
        done, _ = await asyncio.wait(waited, timeout=min(max(left, 0.0), LOOK_S), return_when=asyncio.FIRST_COMPLETED)
        if done:
            return None
        if time.monotonic() >= deadline:
            return StopReason.TIMEOUT
        if program.printed_bytes() > OUTPUT_BYTES_MAX:
            return StopReason.OUTPUT


async def _start(program: Program) -> asyncio.subprocess.Process:
    try:
        return await asyncio.create_subprocess_exec(
            *program.words,
            cwd=program.folder,
            env=dict(program.variables),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=program.output.fileno(),
            stderr=(program.errors or program.output).fileno(),
            start_new_session=True,
            preexec_fn=die_with_this_process(),
        )
    except OSError as error:
        raise CannotStart(f"{program.words[0]} cannot be started: {error.strerror or error}") from error


async def _end(process: asyncio.subprocess.Process, ending: "asyncio.Future[int]") -> None:
    """Ask the process group to end, and kill the processes that are left after `GRACE_S`."""
    try:
        if not ending.done():
            _signal_group(process.pid, signal.SIGTERM)
            await asyncio.wait({ending}, timeout=GRACE_S)
    finally:  # even if a second Ctrl-C interrupts the wait
        _signal_group(process.pid, signal.SIGKILL)
    await ending


def _signal_group(group: int, number: signal.Signals) -> None:
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        pass  # the group has ended, or its remaining processes belong to another user
