"""Runs the containers of FOLDER/compose.yaml as processes, and trains through their gateway.

    unshare --net --mount --pid --fork --kill-child --mount-proc python -m tests.deploy.alone FOLDER

Each container has a name and an address in the network of this namespace. Half way one of the NATS servers and a
coordinator are killed. The mean reward of each step is printed as JSON. All that was started ends with this process,
which is the first of its namespace.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import yaml

from bombus.bus.server import find_server
from bombus.commands.init import make_credentials
from bombus.machine.hive_keys import ADMIN_VARIABLE
from tests.deploy.program import train
from tests.patience import wait_until

SERVERS = range(3)
READY_S = 150.0
STEPS = 4


def main(folder: Path) -> None:
    servers = [f"nats-{number}" for number in SERVERS]
    make_credentials(folder / "secrets", "demo", ",".join(servers), store=Path("/data"))
    services: dict[str, dict[str, Any]] = yaml.safe_load((folder / "compose.yaml").read_text())["services"]
    addresses = {name: f"10.9.8.{number}" for number, name in enumerate(services, 2)}
    network(folder, addresses)
    running: dict[str, list[subprocess.Popen[bytes]]] = {}
    for name, service in services.items():
        command = nats(folder, name, addresses[name], service["command"]) if name in servers else ours(folder, service)
        environment = dict(service.get("environment", {}))
        for file in service.get("env_file", ()):
            environment |= variables(folder / file)
        count = service.get("deploy", {}).get("replicas", 1)
        running[name] = [start(folder / f"{name}-{number}.log", command, environment) for number in range(count)]
    gateway = services["gateway"]["healthcheck"]["test"][-1].removesuffix("/health")
    wait_until(lambda: is_ready(gateway), READY_S)
    assert running["start"][0].wait(60) == 0
    os.environ[ADMIN_VARIABLE] = variables(folder / "secrets/demo/operator.env")[ADMIN_VARIABLE]
    rewards = train(gateway, STEPS)
    assert_page_shows(services["web"], os.environ[ADMIN_VARIABLE])
    running["nats-1"][0].kill()
    running["coordinator"][0].kill()
    rewards += train(gateway, STEPS)
    sys.stdout.write(json.dumps(rewards))


def assert_page_shows(service: Mapping[str, Any], key: str) -> None:
    page = service["healthcheck"]["test"][-1].removesuffix("/health")
    assert httpx.get(page).status_code == httpx.codes.UNAUTHORIZED
    wait_until(lambda: "main-1" in httpx.get(page, headers={"Authorization": f"Bearer {key}"}).text, READY_S)


def network(folder: Path, addresses: Mapping[str, str]) -> None:
    """Give this namespace a network of its own, in which each container has a name and an address."""
    run("ip", "link", "set", "lo", "up")
    for address in addresses.values():
        run("ip", "address", "add", f"{address}/32", "dev", "lo")
    (folder / "hosts").write_text("127.0.0.1 localhost\n" + "".join(f"{at} {name}\n" for name, at in addresses.items()))
    run("mount", "--bind", str(folder / "hosts"), "/etc/hosts")


def nats(folder: Path, name: str, address: str, command: Sequence[str]) -> list[str]:
    """Return the command of a NATS server, which listens at its own address, since all are in one network."""
    own = folder / f"{name}-secrets"
    shutil.copytree(folder / "secrets", own)
    routes = (own / "cluster.conf").read_text().replace("port: 6222", f'listen: "{address}:{own_port(name)}"')
    for number in SERVERS:
        routes = routes.replace(f"@nats-{number}:6222", f"@nats-{number}:{own_port(f'nats-{number}')}")
    (own / "cluster.conf").write_text(routes)
    text = (own / "nats-server.conf").read_text().replace('"/data"', json.dumps(str(folder / name)))
    (own / "nats-server.conf").write_text(text)
    words = [word.replace("/etc/nats/", f"{own}/") for word in command]
    return [str(find_server()), *words, "--addr", address]


def own_port(name: str) -> str:
    """Return a port for routes. A server takes a route to the same port of an address that this machine has for one to
    itself."""
    return f"622{name[-1]}"


def ours(folder: Path, service: Mapping[str, Any]) -> list[str]:
    words = [word.replace("$$", "$").replace("/data/", f"{folder}/data/") for word in service["command"]]
    return [sys.executable, "-m", "bombus", *(word.replace("/etc/bombus/", f"{folder}/") for word in words)]


def variables(file: Path) -> dict[str, str]:
    """Return the variables of a file as Compose reads it."""
    pairs = (line.partition("=") for line in file.read_text().splitlines())
    return {name: value for name, _, value in pairs}


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
