"""Renders a SkyPilot task, which starts a `bombus up` from our image on a machine of any cloud."""

from collections.abc import Mapping

from bombus.config.cluster import Cluster, Jobs
from bombus.config.groups import bad_config
from bombus.deploy.containers import image_of
from bombus.deploy.nodes import HEAD, cluster_file, dumped, gpus_of, node_file

FOLDER = "/etc/bombus"


def render(cluster: Cluster, jobs: Jobs) -> Mapping[str, str]:
    """Return the task and the cluster file that it mounts, by their names.

    Raises `Refused(BAD_CONFIG)` for several nodes, because they would have to share a folder, and for credentials.
    """
    if cluster.credentials:
        raise bad_config(
            "credentials is a folder that the machine of a cloud does not have: leave it out with --to skypilot, and "
            "give its variables as `sky launch --env-file`"
        )
    if cluster.deploy.nodes > 1:
        raise bad_config("deploy.nodes must be 1 with --to skypilot: nodes of a cloud share no folder for weights")
    gpus = gpus_of(cluster)
    resources = {
        "image_id": f"docker:{image_of(cluster, 'all')}",
        "ports": [cluster.gateway.port] if cluster.gateway.host not in ("127.0.0.1", "localhost") else [],
        **({"accelerators": f"{cluster.deploy.accelerator}:{gpus}"} if gpus else {"cpus": "4+"}),
    }
    task = {
        "name": f"bombus-{cluster.hive}",
        "resources": {key: value for key, value in resources.items() if value},
        "num_nodes": 1,
        "file_mounts": {f"{FOLDER}/{node_file(0)}": f"./{node_file(0)}"},
        "run": f"exec bombus up --config {FOLDER}/{node_file(0)}\n",
    }
    return {"bombus.sky.yaml": HEAD + dumped(task), node_file(0): cluster_file(cluster, jobs)}
