"""The configuration of a NATS cluster in examples/ makes one."""

import subprocess
import time
from pathlib import Path

import httpx

from bombus.bus.server import HOST, find_server
from tests.bus.nats_cluster import START_S, free_ports

EXAMPLE = Path(__file__).parents[2] / "examples" / "server" / "nats-cluster.conf"
NAMES = "abc"


def test_three_servers_of_the_example_are_a_cluster_that_has_caught_up(tmp_path: Path) -> None:
    ports = dict(zip(NAMES, zip(*[iter(free_ports(9))] * 3, strict=True), strict=True))
    running: list[subprocess.Popen[bytes]] = []
    try:
        for name, (client, monitor, routes) in ports.items():
            text = EXAMPLE.read_text().replace("PASSWORD@", "secret@").replace("/var/lib/nats", str(tmp_path / name))
            text = text.replace("0.0.0.0:4222", f"{HOST}:{client}").replace("127.0.0.1:8222", f"{HOST}:{monitor}")
            text = text.replace("0.0.0.0:6222", f"{HOST}:{routes}")
            for other, (_, _, port) in ports.items():
                text = text.replace(f"@{other}:6222", f"@{HOST}:{port}")
            file = tmp_path / f"{name}.conf"
            file.write_text(text)
            given = {"NATS_NAME": name, "NATS_PASSWORD": "secret"}
            running.append(
                subprocess.Popen([str(find_server()), "--config", str(file)], env=given, stderr=subprocess.DEVNULL)
            )
        for _, monitor, _ in ports.values():
            wait_until_healthy(monitor)
        with httpx.Client(base_url=f"http://{HOST}:{ports['a'][1]}") as client:
            assert client.get("/varz").json()["max_payload"] == 8 << 20
            assert client.get("/jsz").json()["meta_cluster"]["cluster_size"] == len(NAMES)
    finally:
        for process in running:
            process.kill()
        for process in running:
            process.wait()


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
