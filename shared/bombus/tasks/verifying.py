"""Scores answers to reasoning-gym's questions in a separate process.

Some verifiers evaluate an answer as Python, with `eval` or through SymPy, so an answer can call anything and may never
end. Each answer is therefore judged in a child of that process, which is killed after a time limit. If the kernel
allows it, the process runs in namespaces, and each child has its own PID and user namespaces, in which it sees no other
answer and leaves no process behind.
"""

import atexit
import contextlib
import ctypes
import functools
import gc
import logging
import os
import pickle
import platform
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from bombus.environments.kinds import EnvironmentLost
from bombus.errors import in_one_line
from bombus.hive.failures import FailureKind
from bombus.tasks.entries import HASH_SEED, dataset_of
from bombus.tasks.isolation import HOME, import_path, isolated, why_no_isolation

START_S = 45.0  # time to import reasoning-gym, which takes some seconds
VERIFY_S = 10.0  # time limit for a verdict; the slowest verifier takes less than a second
AT_ONCE = 16
NAME_BYTES = 64
LOOK_S = 1.0
MEMORY_BYTES_MAX = 2 << 30
FILE_BYTES_MAX = 1 << 20
PROGRAM = ("-P", "-s", "-m", "bombus.tasks.verifying")
PACKAGES = ("reasoning_gym", "sympy", "numpy", "msgspec", "pydantic", "httpx")
_BEGUN, _NOTHING = b"b", b"-"
_END = b"\n"  # end of a verdict, which may be sent twice
_CLONE_NEWUSER, _CLONE_NEWPID = 0x10000000, 0x20000000
_SYS_CLONE = {"x86_64": 56, "aarch64": 220}

log = logging.getLogger("bombus")


class AnswerJudge:
    """Judges answers in a separate process, which starts with the first answer and ends when our own process does.

    Threads may share it. `verify_s` is the time limit for one answer.
    """

    def __init__(self, verify_s: float = VERIFY_S) -> None:
        self._verify_s = verify_s
        self._one = threading.Lock()
        self._slots = threading.BoundedSemaphore(AT_ONCE)
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._is_ready = False
        self._is_over = False
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def score(self, generator: str, answer: str, entry: Mapping[str, Any]) -> float | None:
        """Return the verifier's score for an answer, or None if the score is not a number or does not arrive in time.

        Raises `EnvironmentLost` if the judging process is not available.
        """
        request = pickle.dumps((answer, dict(entry)))
        why = ""
        with self._slots:
            for _ in range(2):  # retry once if the process ends, so that only an answer that ends each process is lost
                ours, theirs = socket.socketpair()
                with ours:
                    with theirs:
                        self._hand_over(generator, theirs)
                    try:
                        _ask(ours, request)
                        return _judged(ours, self._verify_s)
                    except OSError as error:
                        why = in_one_line(error)
        raise EnvironmentLost(f"an answer was not judged: {why}", FailureKind.GRADER)

    def start(self) -> None:
        """Start the process without waiting for it, so that the first answer does not have to wait for its imports."""
        with self._one:
            self._running()

    def close(self) -> None:
        """End the process. The next answer starts a new one."""
        with self._one:
            self._end()

    def end(self) -> None:
        """End the process for good at the program's exit, so that threads still running cannot start another one."""
        with self._one:
            self._is_over = True
            self._end()

    def _hand_over(self, generator: str, theirs: socket.socket) -> None:
        """Send one end of a connection to the process. Raises `EnvironmentLost`."""
        name = generator.encode().ljust(NAME_BYTES)
        with self._one:
            try:
                for _ in range(2):  # the first process may have ended since the last answer
                    channel = self._ready()
                    try:
                        socket.send_fds(channel, [name], [theirs.fileno()])
                        return
                    except OSError:
                        self._end()
            except OSError as error:
                self._end()
                raise EnvironmentLost(f"answers cannot be judged: {error}", FailureKind.GRADER) from error
        why = "answers cannot be judged: the process that judges them keeps ending immediately"
        raise EnvironmentLost(why, FailureKind.GRADER)

    def _ready(self) -> socket.socket:
        """Return the channel of a process that is ready to receive answers."""
        channel = self._running()
        if self._is_ready:
            return channel
        if not _has_begun(channel):
            if self._folder is None:
                raise ConnectionError("the process that judges them did not start")
            self._end()
            _warn("the kernel allows none")
            channel = self._started(isolate=False)
            if not _has_begun(channel):
                raise ConnectionError("the process that judges them did not start")
        self._is_ready = True
        self._clean_up()  # a process that is ready no longer needs the folder
        return channel

    def _running(self) -> socket.socket:
        if self._channel is None:
            why = why_no_isolation()
            if why:
                _warn(why)
            return self._started(isolate=not why)
        return self._channel

    def _started(self, *, isolate: bool) -> socket.socket:
        if self._is_over:
            raise ConnectionError("the program is ending")
        self._channel, theirs = socket.socketpair()
        with theirs:
            words = (*PROGRAM, str(theirs.fileno()), str(self._verify_s))
            command, home = [sys.executable, *words], tempfile.gettempdir()
            if isolate:
                self._folder = tempfile.TemporaryDirectory(prefix="bombus-judge-", ignore_cleanup_errors=True)
                root = Path(self._folder.name) / "root"
                root.mkdir()
                command, home = isolated(root, Path(os.devnull), words, PACKAGES), HOME
            self._process = subprocess.Popen(
                command,
                env=_variables(home),
                cwd="/",
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is meant for our program, which ends this process
            )
        return self._channel

    def _end(self) -> None:
        channel, self._channel = self._channel, None
        process, self._process = self._process, None
        self._is_ready = False
        if channel is not None:
            channel.close()
        if process is not None:
            process.kill()
            process.wait()
        self._clean_up()

    def _clean_up(self) -> None:
        """Remove the folder that was mounted as the root of the process."""
        folder, self._folder = self._folder, None
        if folder is not None:
            folder.cleanup()


def _has_begun(channel: socket.socket) -> bool:
    channel.settimeout(START_S)
    try:
        return channel.recv(1) == _BEGUN
    except OSError:  # nothing was received in time, or the process has ended
        return False


def _ask(connection: socket.socket, request: bytes) -> None:
    connection.settimeout(START_S)
    connection.sendall(len(request).to_bytes(8) + request)


def _judged(connection: socket.socket, verify_s: float) -> float | None:
    """Return the score received on an answer's connection. Raises `OSError` if no score arrives."""
    if connection.recv(1) != _BEGUN:
        raise ConnectionError("its verifier could not be made")
    connection.settimeout(verify_s + START_S)  # the child is killed before this
    said = connection.recv(64)
    if not said:
        raise ConnectionError("the process that judges has ended")
    try:
        return float(said.partition(_END)[0])  # never unpickled, because it derives from text that a model has written
    except ValueError:
        return None


def _variables(home: str) -> dict[str, str]:
    """Return all of the process's environment variables.

    Nothing is inherited from our own process, whose variables may contain keys.
    """
    return {
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "PYTHONPATH": import_path(PACKAGES),
        "PYTHONHASHSEED": HASH_SEED,
        "LANG": "C.UTF-8",
        "HOME": home,
        "TMPDIR": home,
        "OPENBLAS_NUM_THREADS": "1",
    }


@functools.cache
def _warn(why: str) -> None:
    log.warning(
        "answers to reasoning-gym's questions are judged without namespaces (%s): some verifiers evaluate them as "
        "Python, and what a model writes could then reach this machine's files and network",
        why,
    )


# ---- in the judging process ----


class _Child(NamedTuple):
    """The process that judges one answer.

    If it ends without sending a verdict, one is sent in its place, so that the caller does not wait.
    """

    connection: socket.socket
    until: float


def serve(descriptor: int, verify_s: float) -> None:
    """Judge the answers that arrive on the channel, each in a child of this process, until the channel is closed."""
    import reasoning_gym  # noqa: F401 - so that each child inherits it

    gc.freeze()  # so that garbage collection in a child does not copy memory pages
    channel = socket.socket(fileno=descriptor)
    channel.sendall(_BEGUN)
    channel.settimeout(LOOK_S)
    children: dict[int, _Child] = {}
    try:
        while True:
            try:
                name, given, _, _ = socket.recv_fds(channel, NAME_BYTES, 1)
            except TimeoutError:
                _end_late(children)
                continue
            if not name:
                return
            _end_late(children)
            for each in given:
                connection = socket.socket(fileno=each)
                if child := _begun(name.strip().decode(), connection):
                    children[child] = _Child(connection, time.monotonic() + verify_s)
                else:
                    connection.close()
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)


def _begun(generator: str, connection: socket.socket) -> int:
    """Return the PID of a child that judges the answer on a connection, or 0 if there is no verifier."""
    try:
        verifier = dataset_of(generator, seed=0, size=1)  # the verifier depends on neither seed nor size
    except Exception:  # raised by the generator's own code: closing the connection tells the caller
        return 0
    if child := _forked():
        return child
    try:
        os.closerange(3, connection.fileno())  # closes, for example, the connections of other answers
        os.closerange(connection.fileno() + 1, os.sysconf("SC_OPEN_MAX"))
        _judge(verifier, connection)
    finally:
        os._exit(0)


def _judge(verifier: Any, connection: socket.socket) -> None:
    connection.settimeout(None)
    with connection.makefile("rb") as asked:
        answer, entry = pickle.loads(asked.read(int.from_bytes(asked.read(8))))  # sent by the requesting program
    _limit()
    connection.sendall(_BEGUN)
    try:
        said = repr(float(verifier.score_answer(answer, entry))).encode()
    except Exception:  # the verifier's own code cannot read the answer
        said = _NOTHING
    connection.sendall(said + _END)


def _forked() -> int:
    """Fork as `os.fork` does, into new PID and user namespaces if the kernel allows it.

    In these namespaces, the child can neither signal other answers' processes nor read their memory, and any process
    that it starts ends with it.
    """
    if sys.platform == "linux" and (clone := _SYS_CLONE.get(platform.machine())):
        here = ctypes.PyDLL(None)  # keeps the GIL, as `os.fork` does
        here.PyOS_BeforeFork()
        child: int = here.syscall(clone, _CLONE_NEWUSER | _CLONE_NEWPID | signal.SIGCHLD, 0, 0, 0, 0)
        if child == 0:
            here.PyOS_AfterFork_Child()
        else:
            here.PyOS_AfterFork_Parent()
        if child >= 0:
            return child
    return os.fork()


def _limit() -> None:
    """Limit the resources of the process that judges one answer. Unless it runs as root, it cannot start another
    process."""
    if sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES_MAX, MEMORY_BYTES_MAX))
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES_MAX, FILE_BYTES_MAX))
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _end_late(children: dict[int, _Child]) -> None:
    """Reap the children that have ended, and kill those whose time is up."""
    for pid, child in list(children.items()):
        if not os.waitpid(pid, os.WNOHANG)[0]:
            if time.monotonic() < child.until:
                continue
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        del children[pid]
        with child.connection, contextlib.suppress(OSError):  # the caller may already have its answer and be gone
            child.connection.sendall(_NOTHING + _END)


def _make_anew() -> None:
    """Have a forked program start its own process."""
    global judge
    judge = AnswerJudge()


judge = AnswerJudge()
atexit.register(lambda: judge.end())  # the current judge, which a fork may have replaced
os.register_at_fork(after_in_child=_make_anew)

if __name__ == "__main__":
    serve(int(sys.argv[1]), float(sys.argv[2]))
