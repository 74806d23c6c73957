"""Cluster files whose manifests have everything in them that any manifest has."""

from pathlib import Path

import yaml

from bombus.commands.deployment import cluster_in
from bombus.config.cluster import Cluster, Jobs

# That of tests/deploy/program.py.
JOB = {
    "bombus": {
        "model": {"path": "tiny"},
        "rollout": {"num_repeat": 8, "max_model_len": 2048},
        "collection": {"batch_size": 4},
        "trainer": {"lr": 3e-3},
    }
}
SMALL = {"hive": "demo", "engines": {"main": {"job": JOB, "trainer": {"threads": 1}, "inference": [{"threads": 1}]}}}
LARGE = {
    "hive": "large",
    "nats": "$BOMBUS_NATS",
    "data_dir": "runs/data",
    "metrics_port": 9470,
    "gateway": {"count": 3, "port": 8080, "host": "0.0.0.0", "host_names": ["hive.example"], "record_samples": True},
    "coordinator": {"count": 2, "archive": "archive"},
    "streams": {"replicas": 3, "calls_bytes_max": "16GiB"},
    "deploy": {"image": "registry.example/bombus/{target}:1", "gateways_max": 20, "gateway_calls": 64},
    "engines": {
        "big": {
            "trainer": {"devices": [0, 1, 2, 3], "weights_by": "objects", "allow_download": True},
            "inference": [
                {"backend": "vllm", "count": 2, "devices": [4, 5, 6, 7], "tensor_parallel": 2, "eager": True},
                {"backend": "openai", "url": "http://elsewhere:8000", "api_key_env": "ELSEWHERE_KEY"},
            ],
        },
        "small": {"job": JOB, "trainer": {}, "inference": [{"count": 2, "dtype": "float32"}]},
    },
}


def read(tree: object, folder: Path) -> tuple[Cluster, Jobs]:
    """Return the cluster and the jobs of a cluster file."""
    path = folder / "cluster.yaml"
    path.write_text(yaml.safe_dump(tree))
    return cluster_in(path)
