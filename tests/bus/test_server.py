import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bombus.bus import Bus, EmbeddedServer
from bombus.bus.server import HOST, find_server
from bombus.bus_address import without_login
from bombus.errors import BusUnavailable
from tests.conftest import SMALL_STREAMS, kill


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EmbeddedServer]:
    server = EmbeddedServer(tmp_path / "nats")
    server.start()
    yield server
    server.stop()


def accepts(port: int) -> bool:
    try:
        socket.create_connection((HOST, port), timeout=1).close()
    except OSError:
        return False
    return True


def wait_until_closed(port: int) -> None:
    deadline = time.monotonic() + 10
    while accepts(port):
        assert time.monotonic() < deadline, "the server still listens"
        time.sleep(0.01)


def test_a_stopped_server_leaves_no_process_behind(server: EmbeddedServer) -> None:
    pid = server.pid
    assert pid is not None
    assert accepts(server.port)
    server.stop()
    assert server.wait() is not None
    assert server.pid is None
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    server.stop()


async def test_a_process_that_does_not_know_the_password_of_a_server_has_no_part_in_it(server: EmbeddedServer) -> None:
    password = server.url.partition("@")[0].rpartition(":")[2]
    for stranger in (without_login(server.url), server.url.replace(password, password[:-1])):
        with pytest.raises(BusUnavailable, match="are the user and password right"):
            await Bus.connect(stranger, "main", timeout_s=1)
    kept = [path for path in server.data_dir.rglob("*") if path.is_file() and password in path.read_text("latin-1")]
    assert {path.name: path.stat().st_mode & 0o777 for path in kept} == {"password": 0o600, "nats-server.conf": 0o600}


async def test_the_password_of_a_server_stays_when_it_is_started_again(server: EmbeddedServer) -> None:
    before = server.url
    kill(server)
    again = EmbeddedServer(server.data_dir, server.port)
    again.start()
    try:
        assert again.url == before
        async with await Bus.connect(before, "main"):
            pass
    finally:
        again.stop()


@pytest.mark.parametrize("damaged", ["", "short", 'a"b' * 8, "\ufffd" * 16])
def test_a_server_whose_password_was_damaged_does_not_start_and_lets_nobody_in(tmp_path: Path, damaged: str) -> None:
    (tmp_path / "password").write_text(damaged)
    server = EmbeddedServer(tmp_path)
    with pytest.raises(BusUnavailable, match="password contains no password: delete it"):
        server.start()
    (tmp_path / "password").write_text("own-password-of-somebody\n")
    server.start()
    server.stop()
    assert ":own-password-of-somebody@" in server.url


def test_two_servers_cannot_use_one_folder(server: EmbeddedServer) -> None:
    second = EmbeddedServer(server.data_dir)
    with pytest.raises(BusUnavailable, match="another nats-server is running"):
        second.start()
    assert second.pid is None
    kill(server)
    second.start()
    with pytest.raises(BusUnavailable, match="another nats-server is running"):
        server.start()
    second.stop()
    server.start()
    assert accepts(server.port)


async def test_a_killed_server_starts_again_on_the_same_port_with_the_same_data(server: EmbeddedServer) -> None:
    url = server.url
    async with await Bus.connect(url, "h") as bus:
        await bus.ensure_streams(SMALL_STREAMS)
        ack = await bus.publisher.publish(bus.subjects.inbox("x"), b"kept", msg_id="1")
        kill(server)
        assert server.wait(timeout_s=5) == -signal.SIGKILL
        server.start()
        assert server.url == url
        assert (await bus.get(bus.subjects.inbox_stream, ack.seq)).data == b"kept"


def test_a_server_does_not_outlive_a_parent_that_is_killed(tmp_path: Path) -> None:
    program = (
        "import sys, pathlib, threading\n"
        "from bombus.bus import EmbeddedServer\n"
        "server = EmbeddedServer(pathlib.Path(sys.argv[1]))\n"
        # Started from a thread that ends: Linux must not take this as the end of the parent.
        "starter = threading.Thread(target=server.start); starter.start(); starter.join()\n"
        "print(server.port, flush=True)\n"
        "sys.stdin.read()\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert parent.stdout is not None
    port = int(parent.stdout.readline())
    assert accepts(port)
    parent.kill()
    parent.wait()
    wait_until_closed(port)
    assert parent.stdin is not None
    parent.stdin.close()
    parent.stdout.close()


def test_a_port_in_use_is_reported_and_leaves_nothing_running(server: EmbeddedServer, tmp_path: Path) -> None:
    second = EmbeddedServer(tmp_path / "second", port=server.port)
    with pytest.raises(BusUnavailable, match="address already in use"):
        second.start()
    assert second.pid is None


def test_without_a_nats_server_the_error_says_how_to_install_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BusUnavailable, match="pip install"):
        find_server()


def test_a_terminal_s_interrupt_does_not_reach_the_server(server: EmbeddedServer) -> None:
    assert server.pid is not None
    assert os.getpgid(server.pid) != os.getpgid(0)


BLOCK = "/nats/jetstream/$G/streams/BOMBUS_main_calls/msgs/2.blk"
NO_MORE_WRITTEN = [  # as in filestore.go, stream.go, jetstream.go and raft.go of nats-server 2.15
    f"[ERR] Filestore [BOMBUS_main_calls] Critical write error: write {BLOCK}: disk quota exceeded",
    f"[ERR] Filestore [BOMBUS_main_calls] Critical write error: sync {BLOCK}: input/output error",
    f"[ERR] JetStream stream '$G > BOMBUS_main_calls' critical write error: open {BLOCK}: too many open files",
    f"[ERR] JetStream failed to store a msg on stream '$G > BOMBUS_main_calls': write {BLOCK}: file too large",
    f"[WRN] Filesystem permission denied while writing msg, disabling JetStream: open {BLOCK}: operation not permitted",
    f"[WRN] File system permission denied when flushing stream state, disabling JetStream: open {BLOCK}",
    "[ERR] File system permission denied while writing, disabling JetStream",
    "[ERR] JetStream out of space, will be DISABLED",
    "[ERR] JetStream out of File resources, will be DISABLED",
]
HARMLESS = [f"[WRN] Filestore [BOMBUS_main_calls] Resource not found: open {BLOCK}", "[INF] JetStream Shutdown"]


@pytest.mark.parametrize("said", [*NO_MORE_WRITTEN, *HARMLESS])
def test_a_server_that_says_that_it_writes_no_more_is_broken(tmp_path: Path, said: str) -> None:
    server = EmbeddedServer(tmp_path)
    server._note(f"[7] 2026/11/29 05:21:29.385042 {said}\n".encode())
    assert server.broken.partition(" [")[2] == (said[1:] if said in NO_MORE_WRITTEN else "")
