"""Runs the containers of FOLDER/compose.yaml as processes, and trains through their gateway.

    unshare --net --mount --pid --fork --kill-child --mount-proc python -m tests.deploy.alone FOLDER

Each container has a name and an address in the network of this namespace. Half way one of the NATS servers and a
coordinator are killed. The mean reward of each step is printed as JSON. All that was started ends with this process,
which is the first of its namespace.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import yaml

from bombus.bus.server import find_server
from bombus.machine.hive_keys import ADMIN_VARIABLE, CLIENT_VARIABLE
from tests.deploy.program import train
from tests.patience import wait_until

SECRETS = {
    name: f"secret-{number}-0123456789"
    for number, name in enumerate(("NATS_PASSWORD", ADMIN_VARIABLE, CLIENT_VARIABLE))
}
READY_S = 150.0
STEPS = 4


def main(folder: Path) -> None:
    services: dict[str, dict[str, Any]] = yaml.safe_load((folder / "compose.yaml").read_text())["services"]
    addresses = {name: f"10.9.8.{number}" for number, name in enumerate(services, 2)}
    network(folder, addresses)
    running: dict[str, list[subprocess.Popen[bytes]]] = {}
    for name, service in services.items():
        command = nats(folder, name, addresses[name]) if name.startswith("nats-") else ours(folder, service)
        environment = {key: filled(value) for key, value in service["environment"].items()}
        count = service.get("deploy", {}).get("replicas", 1)
        running[name] = [start(folder / f"{name}-{number}.log", command, environment) for number in range(count)]
    gateway = services["gateway"]["healthcheck"]["test"][-1].removesuffix("/health")
    wait_until(lambda: is_ready(gateway), READY_S)
    assert running["start"][0].wait(60) == 0
    os.environ[ADMIN_VARIABLE] = SECRETS[ADMIN_VARIABLE]
    rewards = train(gateway, STEPS)
    running["nats-1"][0].kill()
    running["coordinator"][0].kill()
    rewards += train(gateway, STEPS)
    sys.stdout.write(json.dumps(rewards))


def network(folder: Path, addresses: Mapping[str, str]) -> None:
    """Give this namespace a network of its own, in which each container has a name and an address."""
    run("ip", "link", "set", "lo", "up")
    for address in addresses.values():
        run("ip", "address", "add", f"{address}/32", "dev", "lo")
    (folder / "hosts").write_text("127.0.0.1 localhost\n" + "".join(f"{at} {name}\n" for name, at in addresses.items()))
    run("mount", "--bind", str(folder / "hosts"), "/etc/hosts")


def nats(folder: Path, name: str, address: str) -> list[str]:
    """Return the command of a NATS server, which listens at its own address, since all are in one network."""
    text = (folder / "nats.conf").read_text().replace('"/data"', json.dumps(str(folder / name)))
    text = text.replace("port: 4222", f'listen: "{address}:4222"').replace("http: 8222", f'http: "{address}:8222"')
    text = text.replace("port: 6222", f'listen: "{address}:{own_port(name)}"')
    configuration = folder / f"{name}.conf"
    configuration.write_text(text)
    return [str(find_server()), "--config", str(configuration)]


def own_port(name: str) -> str:
    """Return a port for routes. A server takes a route to the same port of an address that this machine has for one to
    itself."""
    return f"622{name[-1]}"


def ours(folder: Path, service: Mapping[str, Any]) -> list[str]:
    words = [word.replace("$$", "$").replace("/data/", f"{folder}/data/") for word in service["command"]]
    return [sys.executable, "-m", "bombus", *(word.replace("/etc/bombus/", f"{folder}/") for word in words)]


def filled(text: str) -> str:
    """Return a value with what Compose would read from `.env`."""
    text = re.sub(r"@(nats-\d):6222", lambda found: f"@{found[1]}:{own_port(found[1])}", text)
    return re.sub(r"\$\{(\w+):\?[^}]*\}", lambda found: SECRETS[found[1]], text)


def start(log: Path, command: list[str], environment: Mapping[str, str]) -> "subprocess.Popen[bytes]":
    with log.open("wb") as out:
        own = {**os.environ, **environment, "BOMBUS_CACHE": str(log.parent / "cache")}
        return subprocess.Popen(command, env=own, stdin=subprocess.DEVNULL, stdout=out, stderr=out)


def is_ready(gateway: str) -> bool:
    try:
        return httpx.get(f"{gateway}/ready", timeout=5).status_code == httpx.codes.OK
    except httpx.TransportError:
        return False


def run(*command: str) -> None:
    subprocess.run(command, check=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
