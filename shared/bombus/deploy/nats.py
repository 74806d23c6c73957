"""A cluster of three NATS servers, which is the same for Compose and Kubernetes.

`bombus init` makes its configuration and the logins, in a folder beside the manifests.
"""

from pathlib import PurePath

from bombus.commands.init import CLUSTER_CONFIG, SERVER_CONFIG
from bombus.commands.init_tls import TLS_CONFIG
from bombus.config.cluster import Cluster
from bombus.config.streams import disk_needed

SERVERS = 3
PORT, MONITOR_PORT = 4222, 8222
SECRETS = "secrets"  # the folder
FOLDER = "/etc/nats"
STORE = "/data"
_GIB = 1 << 30


def arguments(name: str) -> list[str]:
    """Return the arguments of the server with this name."""
    return ["--config", f"{FOLDER}/{SERVER_CONFIG}", "--name", name, "--http_port", str(MONITOR_PORT)]


def configuration(cluster: Cluster) -> list[str]:
    """Return the paths of a server's configuration in the folder of secrets."""
    return [SERVER_CONFIG, CLUSTER_CONFIG, TLS_CONFIG, "accounts.conf", f"{cluster.hive}/accounts.conf"]


def login(cluster: Cluster, name: str) -> str:
    """Return the path of a file with a login, beside the manifests."""
    return str(PurePath(SECRETS, cluster.hive, f"{name}.env"))


def health(host: str = "127.0.0.1") -> str:
    """Return the URL that answers with 200 once a server has read its streams and reaches the others."""
    return f"http://{host}:{MONITOR_PORT}/healthz"


def disk_gib(cluster: Cluster) -> int:
    """Return the size of each server's disk in GiB."""
    return -(-disk_needed(cluster.streams) // _GIB)


def init_command(cluster: Cluster, hosts: list[str]) -> str:
    """Return the command that makes the folder of secrets."""
    own = f"{','.join(f'{host}:{PORT}' for host in hosts)} --store {STORE}"
    return f"bombus init {SECRETS} --hive {cluster.hive} --nats {'URL' if cluster.nats else own}"
