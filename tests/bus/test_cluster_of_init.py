"""Three servers with the configuration that `bombus init` makes are a cluster, with TLS among them or without."""

import asyncio
import re
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import httpx
import pytest

from bombus.bus import Bus
from bombus.bus.server import HOST, find_server
from bombus.bus_address import VARIABLE, BusUser
from bombus.commands.init import CLUSTER_CONFIG, ROUTE_PORT, SERVER_CONFIG, make_credentials
from bombus.commands.init_tls import make_certificate
from bombus.config.streams import StreamLimits
from bombus.host.credentials import read_environment
from tests.bus.nats_cluster import START_S, free_ports
from tests.bus.test_tls import trusting

NAMES = "abc"


@pytest.mark.parametrize("tls", [[], ["localhost"]], ids=["plain", "tls"])
def test_three_servers_with_what_init_makes_are_a_cluster_that_has_caught_up(
    tmp_path: Path, tls: Sequence[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ports = free_ports(3 * len(NAMES))
    clients, monitors, routes = ports[:3], ports[3:6], ports[6:]
    made = tmp_path / "secrets"
    if tls:
        make_certificate(made, tls)
    make_credentials(made, "main", ",".join(f"localhost:{port}" for port in clients), store=Path("store"))
    own_ports = iter(routes)
    of_all = re.sub(
        f"@localhost:{ROUTE_PORT}", lambda _: f"@localhost:{next(own_ports)}", text_of(made, CLUSTER_CONFIG)
    )
    running: list[subprocess.Popen[bytes]] = []
    try:
        for name, client, monitor, route in zip(NAMES, clients, monitors, routes, strict=True):
            own = tmp_path / name
            shutil.copytree(made, own)
            (own / CLUSTER_CONFIG).write_text(of_all.replace(f"port: {ROUTE_PORT}", f"port: {route}"))
            config = re.sub(r'store_dir: "[^"]*"', f'store_dir: "{own / "store"}"', text_of(made, SERVER_CONFIG))
            (own / SERVER_CONFIG).write_text(config.replace("port: 4222", f"port: {client}"))
            words = ["--config", own / SERVER_CONFIG, "--name", name, "--addr", HOST, "--http_port", monitor]
            running.append(subprocess.Popen([str(find_server()), *map(str, words)], stderr=subprocess.DEVNULL))
        for monitor in monitors:
            wait_until_healthy(monitor)
        with httpx.Client(base_url=f"http://{HOST}:{monitors[0]}") as http:
            assert http.get("/varz").json()["max_payload"] == 8 << 20
            assert http.get("/jsz").json()["meta_cluster"]["cluster_size"] == len(NAMES)
            assert len(http.get("/routez").json()["routes"]) >= len(NAMES) - 1
        with trusting(made if tls else None, monkeypatch):
            asyncio.run(make_streams(read_environment(made, "main", BusUser.COORDINATOR)[VARIABLE]))
    finally:
        for process in running:
            process.kill()
        for process in running:
            process.wait()


async def make_streams(url: str) -> None:
    async with await Bus.connect(url, "main") as bus:
        await bus.ensure_streams(StreamLimits(replicas=len(NAMES)))
        await bus.state(bus.subjects.events_stream)


def text_of(folder: Path, name: str) -> str:
    return (folder / name).read_text()


def wait_until_healthy(monitor: int) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        try:
            if httpx.get(f"http://{HOST}:{monitor}/healthz", timeout=5).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.05)
    raise TimeoutError(f"the server with the monitor {monitor} has not caught up within {START_S} s")
