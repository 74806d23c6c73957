"""The configuration of a cluster of three NATS servers, which is the same for Compose and Kubernetes.

What differs between the servers, and the password, comes from the environment.
"""

from bombus.bus.server import MAX_PENDING_BYTES
from bombus.bus_address import VARIABLE
from bombus.config.cluster import Cluster
from bombus.config.streams import PAYLOAD_BYTES, disk_needed

SERVERS = 3
PORT, ROUTE_PORT, MONITOR_PORT = 4222, 6222, 8222
USER, ROUTE_USER = "bombus", "route"
PASSWORD, NAME = "NATS_PASSWORD", "NATS_NAME"
CONFIG = "nats.conf"
FOLDER = "/etc/nats"
STORE = "/data"
_GIB = 1 << 30


def configuration(cluster: Cluster) -> str:
    """Return the servers' configuration. `$NAME` is replaced by the server itself, with what `variables` gives it."""
    routes = ", ".join(f"${_route(number)}" for number in range(SERVERS))
    return f"""\
server_name: ${NAME}
port: {PORT}
http: {MONITOR_PORT}
authorization {{ user: {USER}, password: ${_quoted(PASSWORD)} }}
cluster {{
  name: bombus-{cluster.hive}
  port: {ROUTE_PORT}
  authorization {{ user: {ROUTE_USER}, password: ${_quoted(PASSWORD)} }}
  routes: [{routes}]
}}
max_payload: {PAYLOAD_BYTES}
max_pending: {MAX_PENDING_BYTES}
max_connections: 4096
write_deadline: "10s"
jetstream {{ store_dir: "{STORE}" }}
"""


def variables(password: str, name: str, hosts: list[str]) -> dict[str, str]:
    """Return a server's variables. `password` is how a manifest refers to the password."""
    # Quotes keep the server from reading a text as a number or a size.
    routes = {
        _route(number): f'"nats://{ROUTE_USER}:{password}@{host}:{ROUTE_PORT}"' for number, host in enumerate(hosts)
    }
    return {NAME: name, _quoted(PASSWORD): f'"{password}"', **routes}


def address(password: str, hosts: list[str]) -> dict[str, str]:
    """Return the variable that tells a service where the bus is."""
    return {VARIABLE: ",".join(f"nats://{USER}:{password}@{host}:{PORT}" for host in hosts)}


def health(host: str = "127.0.0.1") -> str:
    """Return the URL that answers with 200 once a server has read its streams and reaches the others."""
    return f"http://{host}:{MONITOR_PORT}/healthz"


def disk_gib(cluster: Cluster) -> int:
    """Return the size of each server's disk in GiB."""
    return -(-disk_needed(cluster.streams) // _GIB)


def _route(number: int) -> str:
    return f"ROUTE_{number}"


def _quoted(name: str) -> str:
    return f"{name}_QUOTED"
