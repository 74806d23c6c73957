"""A nats-server with the configuration that `bombus init` makes."""

import re
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from bombus.bus.server import HOST, find_server
from bombus.commands.init import SERVER_CONFIG, make_credentials
from bombus.commands.init_tls import make_certificate
from bombus.machine.process import free_port

READY, RELOADED = "Server is ready", "Reloaded server configuration"


class GuardedServer:
    """A running server. Its folder has the credentials."""

    def __init__(self, folder: Path, process: subprocess.Popen[bytes]) -> None:
        self.folder = folder
        self._process = process
        self._wait_for(READY, 1)

    def reload(self) -> None:
        """Have the server read its configuration again, and wait until it has."""
        before = self._said(RELOADED)
        self._process.send_signal(signal.SIGHUP)
        self._wait_for(RELOADED, before + 1)

    def _said(self, line: str) -> int:
        return (self.folder / "server.log").read_text().count(line)

    def _wait_for(self, line: str, times: int) -> None:
        deadline = time.monotonic() + 20
        while self._said(line) < times:
            assert time.monotonic() < deadline, (self.folder / "server.log").read_text()[-2000:]
            time.sleep(0.01)


@contextmanager
def guarded_server(
    folder: Path, *hives: str, started_in: Path | None = None, tls: Sequence[str] = ()
) -> Iterator[GuardedServer]:
    """Run a server for these hives for the length of the block, with a certificate for the names `tls` if any."""
    port = free_port()
    if tls:
        make_certificate(folder, tls)
    for hive in hives:
        make_credentials(folder, hive, f"nats://{HOST}:{port}")
    config = folder / SERVER_CONFIG
    config.write_text(re.sub(r"^port: .*", f'port: {port}\nhost: "{HOST}"', config.read_text(), flags=re.MULTILINE))
    command = [str(find_server()), "--config", str(config)]
    with (
        (folder / "server.log").open("wb") as log,
        subprocess.Popen(command, cwd=started_in or folder, stderr=log) as server,
    ):
        try:
            yield GuardedServer(folder, server)
        finally:
            server.terminate()
