"""Runs a service as a process: shuts it down cleanly on a signal, ends it with its supervisor, and binds its port."""

import asyncio
import contextlib
import ctypes
import getpass
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

from bombus import task_groups
from bombus.errors import BombusError, Code, Refused
from bombus.machine import open_files
from bombus.machine.watchdog import keep_alive

TERMINATED = 143  # the exit code that a shell reports for a program ended by SIGTERM
PARENT_VARIABLE = "BOMBUS_PARENT"  # pid of the supervisor: if the supervisor dies, this process dies too
THREADS_S = 5.0  # time that threads have to end once the service has ended
_PR_SET_PDEATHSIG = 1

log = logging.getLogger(__name__)


def die_with_parent(number: signal.Signals = signal.SIGTERM) -> None:
    """Request a signal for when the supervisor, if any, dies. Only Linux offers this; on other systems, nothing
    happens."""
    parent = os.environ.get(PARENT_VARIABLE, "")
    if not parent or sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != int(parent):  # the supervisor died before the call above
        sys.exit("the supervisor is gone")


def die_with_this_process(number: signal.Signals = signal.SIGKILL) -> Callable[[], None] | None:
    """Return a function for a child to call before exec, so that the child gets a signal when this process dies.

    Returns None except on Linux, the only system that offers this.
    """
    if sys.platform != "linux":
        return None
    prctl, parent = ctypes.CDLL(None).prctl, os.getpid()

    def ask() -> None:
        prctl(_PR_SET_PDEATHSIG, number)
        if os.getppid() != parent:  # the parent died before the call above
            os._exit(1)

    return ask


def kill(process: asyncio.subprocess.Process) -> None:
    """Kill a child process, unless it has just ended."""
    with contextlib.suppress(ProcessLookupError):
        process.kill()


def is_heeded(number: signal.Signals) -> bool:
    """Return whether a signal is not ignored. `nohup` makes a process ignore SIGHUP, and the process must keep ignoring
    it."""
    return signal.getsignal(number) != signal.SIG_IGN


def cancel_at_signals() -> None:
    """Have SIGTERM and SIGHUP cancel the calling task, so that a command ends cleanly."""
    this = asyncio.current_task()
    assert this is not None
    for ending in (signal.SIGTERM, signal.SIGHUP):
        if is_heeded(ending):
            asyncio.get_running_loop().add_signal_handler(ending, this.cancel)


def run_service(service: Coroutine[Any, Any, None]) -> int:
    """Run a service until it ends or is cancelled by SIGINT or SIGTERM. Returns the process's exit code."""
    die_with_parent()
    failed = False
    threads = set(threading.enumerate())
    try:
        task_groups.run(_until_signal(service), loop_factory())
    except* BombusError as group:
        for error in _leaves(group):
            log.error("%s", error)
        failed = True
    _end_despite_threads(threads, int(failed))
    return int(failed)


def _end_despite_threads(before: set[threading.Thread], code: int) -> None:
    """End the process here if threads that we did not start hang, such as those of `asyncio.to_thread`. Otherwise
    Python would wait for these threads at exit."""
    begun = [thread for thread in threading.enumerate() if thread not in before and not thread.daemon]
    until = time.monotonic() + THREADS_S
    for thread in begun:
        thread.join(max(0.0, until - time.monotonic()))
    if stuck := [thread.name for thread in begun if thread.is_alive()]:
        log.warning("ended although these threads are still running: %s", ", ".join(stuck))
        logging.shutdown()
        sys.stdout.flush()
        os._exit(code)


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return uvloop's factory, or None if uvloop is not installed. uvloop halves the time that a small message
    takes."""
    try:
        import uvloop
    except ModuleNotFoundError:
        return None
    return uvloop.new_event_loop


async def _until_signal(service: Coroutine[Any, Any, None]) -> None:
    task = asyncio.ensure_future(service)
    beside = [asyncio.ensure_future(each) for each in (keep_alive(), open_files.watch())]
    loop = asyncio.get_running_loop()
    stopped: list[signal.Signals] = []

    def stop(number: signal.Signals) -> None:
        # Slurm and other managers signal each process of a job, which then hears of it from its supervisor too.
        if stopped and number == signal.SIGTERM:
            return
        stopped.append(number)
        task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop, number)
    try:
        await task
    except asyncio.CancelledError:
        if not stopped:
            raise
    finally:
        for each in beside:
            each.cancel()


def _leaves(group: BaseExceptionGroup[BaseException]) -> list[BaseException]:
    found: list[BaseException] = []
    for error in group.exceptions:
        found += _leaves(error) if isinstance(error, BaseExceptionGroup) else [error]
    return found


def listen(host: str, port: int, reuse_port: bool = False, option: str = "--port") -> socket.socket:
    """Return a bound socket. Raises `Refused`, which names the option of the port, if it is taken.

    With `reuse_port`, other processes on this machine may bind the same port.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Because the protocol is given, asyncio sets TCP_NODELAY. Otherwise the second part of an answer would be delayed
    # by 40 ms.
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if reuse_port:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        raise Refused(Code.BAD_CONFIG, f"cannot listen at {host}:{port}: {error}; choose another {option}") from error
    return bound


def operator_name() -> str:
    """Return how the log names the user of this process who sends a command over the bus."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # in a container, a user may have no name
        user = str(os.getuid())
    return f"/operator {user}@{socket.gethostname()}"


def free_port() -> int:
    """Return a port of this machine that is currently free."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
