import asyncio
import socket
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest

from bombus.environments.backends import process
from bombus.environments.backends.listening import listens
from bombus.environments.backends.process import HOST, SimulatorProcess
from bombus.environments.kinds import EnvironmentLost

LISTENING = """
import socket, sys
found = socket.socket()
found.bind(("127.0.0.1", 0))
found.listen()
print(found.getsockname()[1], flush=True)
sys.stdin.read()
"""
PARENT = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"


class Healthy(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@pytest.mark.parametrize("words", [(LISTENING,), (PARENT, LISTENING)], ids=["itself", "a child"])
async def test_a_process_listens_at_a_port_if_it_or_a_child_of_it_does(words: tuple[str, ...]) -> None:
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", *words, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    assert child.stdout is not None
    assert child.stdin is not None
    port = int(await child.stdout.readline())
    with socket.create_server((HOST, 0)) as other:
        assert listens(child.pid, port)
        assert not listens(child.pid, other.getsockname()[1]), "it is this process that listens there"
    child.stdin.close()
    await child.wait()
    assert not listens(child.pid, port)


async def test_a_simulator_whose_port_another_program_has_taken_meanwhile_does_not_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with ThreadingHTTPServer((HOST, 0), Healthy) as other:
        Thread(target=other.serve_forever).start()
        monkeypatch.setattr(process, "free_port", lambda: other.server_port)
        late = "import time; time.sleep(0.5); raise SystemExit(4)"
        simulator = SimulatorProcess(
            [sys.executable, "-c", late], health="/health", reset="/reset", port=0, port_variable="PORT"
        )
        with pytest.raises(EnvironmentLost, match="exited with code 4 while starting"):
            await simulator.start()
        await simulator.stop()
        other.shutdown()
