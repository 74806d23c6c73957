"""A nats-server as a child process, with its data in one folder. It ends when this process ends."""

import contextlib
import fcntl
import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO, Self

from bombus.bus.syncer import Sync, Syncer
from bombus.config.streams import PAYLOAD_BYTES, POWER_NAME
from bombus.errors import BusUnavailable
from bombus.private import private_folder, write_private

HOST = "127.0.0.1"
USER = "bombus"
PASSWORD = re.compile(r"[A-Za-z0-9_-]{16,128}")  # characters that are valid both in a URL and in a configuration
MAX_PENDING_BYTES = 64 << 20
MEMORY_LIMIT = "512MiB"  # limit above which Go collects garbage more often
SYNC_S = 1
SYNC_S_POWER = 120  # the server's default, since the syncer has already done the work
_POLL_S = 0.02
# A stream that failed to write stays broken until the server is restarted, even when there is room again.
ROOM_BYTES = 16 << 20  # free space required before a restart: twice the largest message
AGAIN_S_MAX = 60.0  # the longest pause before a server that keeps breaking is restarted
LOG_BYTES_MAX, LOGS_KEPT = 16 << 20, 4
# What nats-server 2.15 logs when it cannot write, and when it switches JetStream off for that reason.
_BROKEN = (b"critical write error", b"failed to store a msg", b"disabling jetstream", b"will be disabled")

# This runs in the child before it becomes the server, so that Linux kills the server when its parent dies. A preexec_fn
# could do the same but is unsafe in a process with threads. Checking the parent afterwards closes a race.
_TRAMPOLINE = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() != int(sys.argv[1]):
    sys.exit("the parent died")
os.execv(sys.argv[2], sys.argv[2:])
"""


class EmbeddedServer:
    """A nats-server: call `start`, then use `url`.

    Clients need the password in `url`, because every process on this machine can reach the port, even an agent in a
    sandbox that shares the machine's network. The password is created with the folder and stays the same.

    A supervisor calls `wait` and, when that returns, `start` again: the port and the data stay the same. With `port` 0,
    the server takes a free port and keeps it. `store_bytes_max` bounds the sum of all streams' limits; by default the
    server takes three quarters of the free disk space. All methods block: from asyncio, call them in a thread.

    It listens on loopback or, if `host_name` gives the name by which other machines reach this one, at every address.

    With `power`, which needs Linux, clients' acknowledgements wait until this process has synced the server's files, by
    calling `sync` for each file. After a failure, which `sync_failure` explains, nothing is acknowledged any more.
    """

    def __init__(  # noqa: PLR0913 - each is independent of the others
        self,
        data_dir: Path,
        port: int = 0,
        *,
        host_name: str = "",
        store_bytes_max: int | None = None,
        power: bool = False,
        sync: Sync = os.fsync,
    ) -> None:
        self.data_dir = data_dir.resolve()
        self.port = port
        self._host_name = host_name
        self.log_path = self.data_dir / "nats-server.log"
        self._power = power
        self._sync = sync
        self._syncer: Syncer | None = None
        self._name = f"{POWER_NAME if power else 'bombus-'}{secrets.token_hex(8)}"
        self._store_bytes_max = store_bytes_max
        self._password = ""
        self._process: subprocess.Popen[bytes] | None = None
        self._exited = threading.Event()
        self.broken = ""  # what the server logged when it could not write, or "" while it can
        self._restarts = 0  # number of restarts since the server last worked for long
        self._started_s = self._broken_s = 0.0

    @property
    def url(self) -> str:
        if self.port == 0:
            raise RuntimeError("the server has no port before it is started")
        return f"nats://{USER}:{self._password}@{self._host_name or HOST}:{self.port}"

    @property
    def pid(self) -> int | None:
        """Return the process id of the server, or None if it is not running."""
        process = self._process
        return None if process is None or self._exited.is_set() else process.pid

    @property
    def sync_failure(self) -> str:
        """Return why nothing is acknowledged any more, or "" while syncs succeed."""
        return "" if self._syncer is None else self._syncer.failure

    def start(self, timeout_s: float = 20.0) -> None:
        """Start the server and return when JetStream answers.

        Raises `BusUnavailable` with the end of the server's log if JetStream does not answer within `timeout_s`, or if
        another server is using this folder: two at the same time would corrupt it.
        """
        if self.pid is not None:
            raise RuntimeError("the server is running")
        binary = find_server()
        self.broken, self._started_s = "", time.monotonic()
        private_folder(self.data_dir)
        lock = lock_folder(self.data_dir)
        self._password = _password_in(self.data_dir)
        config = self.data_dir / "nats-server.conf"
        write_private(config, self._config())
        for stale in self.data_dir.glob("nats-server_*.ports"):  # left over from a server that was killed
            stale.unlink()
        deadline = time.monotonic() + timeout_s
        self._spawn([str(binary), "--config", str(config)], lock)
        try:
            while not self._ready(deadline):
                if self._exited.is_set():
                    raise BusUnavailable(f"nats-server did not start; its log ends: {self._log_end()}")
                if time.monotonic() > deadline:
                    raise BusUnavailable(
                        f"nats-server was not ready within {timeout_s:g} s; its log ends: {self._log_end()}"
                    )
                self._exited.wait(_POLL_S)
        except BaseException:
            self.stop()
            raise
        if self._power:
            self._start_syncer()

    def _start_syncer(self) -> None:
        try:
            self._syncer = Syncer(self._store, self.url, self._exited, self._sync)
        except OSError as error:
            self.stop()
            raise BusUnavailable(
                f"--durability power needs to watch the files of nats-server, and cannot: {error}"
            ) from error
        self._syncer.start()

    @property
    def _store(self) -> Path:
        return self.data_dir / "jetstream"

    def needs_restart(self) -> bool:
        """Return whether the server failed to write (see `broken`), for whatever reason, and could write now.

        If it breaks again soon after a restart, the pause before the next restart doubles, up to a minute.
        """
        if not self.broken:
            return False
        if self._broken_s - self._started_s > AGAIN_S_MAX:
            self._restarts = 0
        pause_s = min(2.0**self._restarts - 1, AGAIN_S_MAX)
        if time.monotonic() - self._broken_s < pause_s or not _has_room(self.data_dir):
            return False
        self._restarts += 1
        return True

    def _note(self, line: bytes) -> None:
        """Set `broken` if a line of the server's log says that the server cannot write."""
        if not self.broken and any(symptom in line.lower() for symptom in _BROKEN):
            self._broken_s = time.monotonic()
            self.broken = line.decode(errors="replace").strip()

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Wait until the server has exited. Return its exit code, or None if it is still running after `timeout_s`."""
        if self._process is None:
            raise RuntimeError("the server was not started")
        if not self._exited.wait(timeout_s):
            return None
        return self._process.returncode

    def stop(self, timeout_s: float = 10.0) -> None:
        """Tell the server to exit, and kill it if that takes longer than `timeout_s`. Do nothing if it is not
        running."""
        process = self._process
        if process is None:
            return
        if not self._exited.is_set():
            process.send_signal(signal.SIGTERM)
        if not self._exited.wait(timeout_s):
            process.kill()
            self._exited.wait()

    def _spawn(self, command: list[str], lock: IO[bytes]) -> None:
        """Start the child from a thread that lives as long as the child does, because Linux treats that thread as its
        parent.

        The child holds the folder's `lock` from then on.
        """
        if sys.platform == "linux":
            command = [sys.executable, "-I", "-S", "-c", _TRAMPOLINE, str(os.getpid()), *command]
        self._process = None
        self._exited = exited = threading.Event()
        spawned = threading.Event()
        failures: list[OSError] = []

        def keep() -> None:
            try:
                self._process = process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,  # read by this process even if the disk is too full for a log
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # Ctrl-C reaches the services first; the server is stopped after them
                    env=os.environ | {"GOMEMLIMIT": MEMORY_LIMIT},
                    pass_fds=(lock.fileno(),),
                )
            except OSError as error:
                failures.append(error)
                return
            finally:
                lock.close()
                spawned.set()
            assert process.stdout is not None
            with _ServerLog(self.log_path) as log, process.stdout as said:
                for line in said:
                    log.write(line)
                    self._note(line)
            process.wait()
            exited.set()

        threading.Thread(target=keep, name="nats-server", daemon=True).start()
        spawned.wait()
        if failures:
            raise BusUnavailable(f"nats-server cannot be run: {failures[0]}") from failures[0]

    def _config(self) -> str:
        store = f"  max_file_store: {self._store_bytes_max}\n" if self._store_bytes_max is not None else ""
        return f"""# Written by bombus at each start.
host: "{"0.0.0.0" if self._host_name else HOST}"
port: {self.port or -1}
server_name: {self._name}
authorization {{ user: {USER}, password: "{self._password}" }}
ports_file_dir: {json.dumps(str(self.data_dir))}
max_payload: {PAYLOAD_BYTES}
max_pending: {MAX_PENDING_BYTES}
max_connections: 4096
write_deadline: "10s"
jetstream {{
  store_dir: {json.dumps(str(self._store))}
  sync_interval: "{SYNC_S_POWER if self._power else SYNC_S}s"
  max_memory_store: {256 << 20}
{store}}}
"""

    def _ready(self, deadline: float) -> bool:
        if self.port == 0:
            port = self._read_port()
            if port is None:
                return False
            self.port = port
        return _jetstream_answers(self.port, self._name, self._password, max(_POLL_S, deadline - time.monotonic()))

    def _read_port(self) -> int | None:
        process = self._process
        assert process is not None
        path = self.data_dir / f"nats-server_{process.pid}.ports"
        try:
            ports = json.loads(path.read_text())
        except (FileNotFoundError, json.JSONDecodeError):
            return None
        return int(ports["nats"][0].rsplit(":", 1)[1])

    def _log_end(self) -> str:
        try:
            return " | ".join(self.log_path.read_text(errors="replace").splitlines()[-8:])
        except FileNotFoundError:
            return "(it wrote no log)"


class _ServerLog:
    """A server's log file and its predecessors. Lines that do not fit on a full disk are dropped."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[bytes] | None = None

    def write(self, line: bytes) -> None:
        with contextlib.suppress(OSError):
            if self._file is None or self._file.tell() > LOG_BYTES_MAX:
                self._open()
            if self._file is not None:
                self._file.write(line)

    def _open(self) -> None:
        self.close()
        if self._path.exists() and self._path.stat().st_size > LOG_BYTES_MAX:
            for number in range(LOGS_KEPT - 1, 0, -1):
                older = self._path.with_suffix(f".log.{number}")
                if older.exists():
                    older.replace(self._path.with_suffix(f".log.{number + 1}"))
            self._path.replace(self._path.with_suffix(".log.1"))
        self._file = self._path.open("ab", buffering=0)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _has_room(folder: Path) -> bool:
    """Return whether a file of `ROOM_BYTES` can be written: free space, inodes and quota must all suffice."""
    probe = folder / "room"
    try:
        with probe.open("wb") as file:
            file.write(bytes(ROOM_BYTES))
            file.flush()
            os.fsync(file.fileno())
        return True
    except OSError:
        return False
    finally:
        probe.unlink(missing_ok=True)


def lock_folder(folder: Path) -> IO[bytes]:
    """Lock a server's folder until all processes that have the lock file open have ended. Raises `BusUnavailable` if
    another process holds the lock."""
    lock = (folder / "lock").open("wb")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        lock.close()
        raise BusUnavailable(
            f"another nats-server is running in {folder}: stop it, or wait until it has exited; if it is the running "
            "hive's own, it does not answer: its process is stopped, or its disk hangs"
        ) from error
    return lock


def find_server() -> Path:
    """Return the nats-server of this environment, or else the one on PATH. Raises `BusUnavailable` if there is
    neither."""
    beside = Path(sys.executable).parent / "nats-server"
    if os.access(beside, os.X_OK):
        return beside
    found = shutil.which("nats-server")
    if found is None:
        raise BusUnavailable(
            "nats-server was not found: install it with `pip install 'bombus[server]'`, or put one on PATH, or give "
            "the URL of a running one"
        )
    return Path(found)


def _password_in(folder: Path) -> str:
    """Return the password of a folder's server, creating it if it is missing. The caller must hold the folder's
    lock."""
    path = folder / "password"
    if not path.exists():
        write_private(path, secrets.token_urlsafe(24))
    password = path.read_text(errors="replace").strip()
    if not PASSWORD.fullmatch(password):
        raise BusUnavailable(f"{path} contains no password: delete it, and the next start will create one")
    return password


def _jetstream_answers(port: int, name: str, password: str, timeout_s: float) -> bool:
    """Return whether the JetStream of server `name` answers. Uses a bare socket instead of a client."""
    try:
        with socket.create_connection((HOST, port), timeout=min(1.0, timeout_s)) as connection:
            who = {"user": USER, "pass": password, "name": "bombus-ready"}
            options = json.dumps({"verbose": False, "headers": True, "no_responders": True, **who})
            asked = "SUB bombus.ready 1\r\nPUB $JS.API.INFO bombus.ready 0\r\n\r\nPING\r\n"
            connection.sendall(f"CONNECT {options}\r\n{asked}".encode())
            received = b""
            while b"}" not in received.partition(b"MSG ")[2]:
                chunk = connection.recv(65536)
                received += chunk
                if not chunk or b"HMSG bombus.ready 1" in received or len(received) > 1 << 20:
                    return False  # no responders: JetStream is still reading its files
            if f'"server_name":"{name}"'.encode() not in received:
                return False  # another server has this port; our own is about to report that
            return b'"type":"io.nats.jetstream.api.v1.account_info_response"' in received and b'"error"' not in received
    except OSError:
        return False
