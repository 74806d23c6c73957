"""Renders plain Kubernetes manifests and a kustomization, for overlays that change what differs between clusters."""

from collections.abc import Iterable, Mapping
from typing import Any

from bombus.commands.init import ROUTE_PORT
from bombus.config.cluster import Cluster, Jobs
from bombus.config.groups import Tree, bad_config
from bombus.deploy import nats
from bombus.deploy.containers import (
    CLUSTER,
    CONFIG_FOLDER,
    DATA,
    GRACE_S,
    USER,
    Container,
    containers,
    start_file,
    starter,
)
from bombus.deploy.nodes import HEAD, dumped

PART = "app.kubernetes.io/component"
NAME, INSTANCE = "app.kubernetes.io/name", "app.kubernetes.io/instance"
SCRAPES = {"bombus/scrapes": "true"}  # the label of the namespace in which Prometheus runs
KEYS = "bombus-keys"  # the secret with the keys of `api_key_env`, which is made beforehand
HOSTS = [f"nats-{number}.nats" for number in range(nats.SERVERS)]
CALLS_IN_FLIGHT = "bombus_gateway_calls_in_flight"
DRAIN_S = 5  # a gateway that stops still gets requests until its endpoint is gone everywhere
POD_NAME = "POD_NAME"
OWN_NAME = {"name": POD_NAME, "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}


def render(cluster: Cluster, jobs: Jobs) -> Mapping[str, str]:
    """Return the manifests and their kustomization, by their names.

    Raises `Refused(BAD_CONFIG)` for a name that ends with a dash, which Kubernetes refuses.
    """
    for name in (cluster.hive, *cluster.engines):
        if name.endswith("-"):
            raise bad_config(f"the name {name} ends with a dash, which Kubernetes refuses: choose another")
    found = containers(cluster)
    files: dict[str, list[Tree]] = {}
    if not cluster.nats:
        files["nats.yaml"] = _nats(cluster)
    files["data.yaml"] = [_data(cluster, shared=sum(each.count for each in found if each.reads or each.writes) > 1)]
    for container in found:
        files[f"{container.name}.yaml"] = list(_service(cluster, container))
    files["network.yaml"] = list(_network(cluster, found))
    if jobs:
        files["start.yaml"] = [_start(cluster)]
    generated = [{"name": "bombus-cluster", "files": [CLUSTER]}] if jobs else []
    logins = {container.login for container in (*found, *([starter(cluster)] if jobs else []))}
    secrets: list[Tree] = [{"name": _login(name), "envs": [nats.login(cluster, name)]} for name in sorted(logins)]
    if not cluster.nats:
        configured = [f"{_key(path)}={nats.SECRETS}/{path}" for path in nats.configuration(cluster)]
        secrets.append({"name": "bombus-nats", "files": configured})
    kustomization = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": list(files),
        **({"configMapGenerator": generated} if generated else {}),
        "secretGenerator": secrets,
    }
    written = {name: HEAD + "---\n".join(map(dumped, documents)) for name, documents in files.items()}
    written["kustomization.yaml"] = HEAD + dumped(kustomization)
    return written | ({CLUSTER: start_file(cluster, jobs)} if jobs else {})


def _labels(cluster: Cluster, part: str = "") -> Tree:
    """Return the labels of all pods of a hive, or of one part."""
    return {NAME: "bombus", INSTANCE: cluster.hive, **({PART: part} if part else {})}


def _object(api: str, kind: str, name: str, **more: Any) -> Tree:
    return {"apiVersion": api, "kind": kind, "metadata": {"name": name}, **more}


def _secret(name: str, secret: str, key: str) -> Tree:
    return {"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}}


def _login(name: str) -> str:
    """Return the name of the secret with a login."""
    return f"bombus-{name}"


def _key(path: str) -> str:
    """Return the key of a file in a secret, where a key has no slash."""
    return path.replace("/", "--")


def _variables(given: Mapping[str, str]) -> list[Tree]:
    return [{"name": name, "value": value} for name, value in given.items()]


# ---- NATS -----------------------------------------------------------------------------------------------------------


def _nats(cluster: Cluster) -> list[Tree]:
    labels = _labels(cluster, "nats")
    ports = {"client": nats.PORT, "route": ROUTE_PORT, "monitor": nats.MONITOR_PORT}
    probe = {"httpGet": {"path": "/healthz", "port": "monitor"}}
    container = {
        "name": "nats",
        "image": cluster.deploy.nats_image,
        "args": nats.arguments(f"$({POD_NAME})"),
        "env": [OWN_NAME],
        "ports": [{"name": name, "containerPort": port} for name, port in ports.items()],
        # A server that is alone reads its streams and waits: only one whose JetStream has failed is restarted.
        **_watched({"httpGet": {"path": "/healthz?js-server-only=true", "port": "monitor"}}),
        "readinessProbe": probe,
        "securityContext": _confined(),
        "volumeMounts": [{"name": "config", "mountPath": nats.FOLDER}, {"name": "store", "mountPath": nats.STORE}],
    }
    claim = {
        "metadata": {"name": "store"},
        "spec": {
            "accessModes": ["ReadWriteOnce"],
            "resources": {"requests": {"storage": f"{nats.disk_gib(cluster)}Gi"}},
        },
    }
    pod = {
        **_pod([container], grace_s=60),
        "topologySpreadConstraints": [_spread(labels)],
        "volumes": [
            {
                "name": "config",
                "secret": {
                    "secretName": "bombus-nats",
                    "items": [{"key": _key(path), "path": path} for path in nats.configuration(cluster)],
                },
            }
        ],
    }
    return [
        _object(
            "v1",
            "Service",
            "nats",
            # Servers have to find each other before they are ready.
            spec={
                "clusterIP": "None",
                "publishNotReadyAddresses": True,
                "selector": labels,
                "ports": [{"name": name, "port": port} for name, port in ports.items()],
            },
        ),
        _object(
            "apps/v1",
            "StatefulSet",
            "nats",
            spec={
                "serviceName": "nats",
                "replicas": nats.SERVERS,
                "podManagementPolicy": "Parallel",
                "selector": {"matchLabels": labels},
                "template": {"metadata": {"labels": labels}, "spec": pod},
                "volumeClaimTemplates": [claim],
            },
        ),
        _budget("nats", labels),
    ]


# ---- our own services -----------------------------------------------------------------------------------------------


def _service(cluster: Cluster, container: Container) -> Iterable[Tree]:
    labels = _labels(cluster, container.name)
    strategy = {"type": "Recreate"} if container.kind == "trainer" else {"type": "RollingUpdate"}
    pod = _pod([_container(cluster, container)], grace_s=GRACE_S + DRAIN_S)
    pod["volumes"] = [{"name": "tmp", "emptyDir": {}}]
    if container.gpus > 1:  # ranks on several GPUs exchange data through shared memory
        pod["volumes"].append({"name": "shm", "emptyDir": {"medium": "Memory"}})
        pod["containers"][0]["volumeMounts"].append({"name": "shm", "mountPath": "/dev/shm"})
    if container.writes or container.reads:
        pod["volumes"].append({"name": "data", "persistentVolumeClaim": {"claimName": "bombus-data"}})
    if container.count > 1:
        pod["topologySpreadConstraints"] = [_spread(labels)]
    spec = {
        # The autoscaler decides how many gateways there are.
        **({} if container.kind == "gateway" else {"replicas": container.count}),
        "strategy": strategy,
        "selector": {"matchLabels": labels},
        "template": {"metadata": {"labels": labels, "annotations": _scraped(container)}, "spec": pod},
    }
    yield _object("apps/v1", "Deployment", container.name, spec=spec)
    if container.kind in ("gateway", "web"):
        ports = [{"name": "http", "port": container.port, "targetPort": "http"}]
        yield _object("v1", "Service", container.name, spec={"selector": labels, "ports": ports})
    if container.kind == "gateway":
        yield _autoscaler(cluster, container)
    if container.kind == "gateway" or container.count > 1:
        yield _budget(container.name, labels)


def _container(cluster: Cluster, container: Container) -> Tree:
    named = ["--name", f"$({POD_NAME})"] if container.kind == "coordinator" else []
    mounts: list[Tree] = [{"name": "tmp", "mountPath": "/tmp"}]
    if container.writes or container.reads:
        mounts.append({"name": "data", "mountPath": DATA, **({} if container.writes else {"readOnly": True})})
    found: Tree = {
        "name": container.kind,
        "image": container.image,
        **({"command": list(container.program)} if container.program else {}),
        "args": [*(_literal(word) for word in container.arguments), *named],
        "env": [
            *([OWN_NAME] if named else []),
            *_variables(container.environment),
            *(_secret(name, KEYS, name) for name in container.secrets),
        ],
        "envFrom": [{"secretRef": {"name": _login(container.login)}}],
        "securityContext": _confined(),
        "volumeMounts": mounts,
    }
    if container.port:
        found["ports"] = [{"name": "http", "containerPort": container.port}]
        found |= _probes(container)
    if container.gpus:
        found["resources"] = {"limits": {"nvidia.com/gpu": container.gpus}}
    if container.kind == "gateway":
        found["lifecycle"] = {"preStop": {"sleep": {"seconds": DRAIN_S}}}
    return found


def _probes(container: Container) -> Tree:
    """Return the probes. A replica's `/health` is 503 until the first weights are there, which is no failure."""

    def answers(path: str) -> Tree:
        return {"httpGet": {"path": path, "port": "http"}, "timeoutSeconds": 10}

    match container.kind:
        case "gateway":
            return {**_watched(answers("/health")), "readinessProbe": answers("/ready")}
        case "inference":
            return {**_watched({"tcpSocket": {"port": "http"}}), "readinessProbe": answers("/health")}
        case "web":  # which asks for a key
            return _watched({"tcpSocket": {"port": "http"}})
    return _watched(answers("/health"))


def _watched(alive: Tree) -> Tree:
    """Return the probes that restart a container which does not answer, with more time while it starts."""
    return {"startupProbe": {**alive, "failureThreshold": 60}, "livenessProbe": {**alive, "failureThreshold": 6}}


def _pod(containers: list[Tree], grace_s: int) -> Tree:
    return {
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": grace_s,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": containers,
    }


def _confined() -> Tree:
    return {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def _scraped(container: Container) -> Tree:
    return {"prometheus.io/scrape": "true", "prometheus.io/port": str(container.port)}


def _spread(labels: Tree) -> Tree:
    return {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": labels},
    }


def _budget(name: str, labels: Tree) -> Tree:
    return _object(
        "policy/v1", "PodDisruptionBudget", name, spec={"maxUnavailable": 1, "selector": {"matchLabels": labels}}
    )


def _autoscaler(cluster: Cluster, container: Container) -> Tree:
    target = {"type": "AverageValue", "averageValue": str(cluster.deploy.gateway_calls)}
    spec = {
        "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": container.name},
        "minReplicas": container.count,
        "maxReplicas": max(container.count, cluster.deploy.gateways_max),
        "metrics": [{"type": "Pods", "pods": {"metric": {"name": CALLS_IN_FLIGHT}, "target": target}}],
        # An episode's calls may go on for minutes: gateways are taken away slowly.
        "behavior": {"scaleDown": {"stabilizationWindowSeconds": 600}},
    }
    return _object("autoscaling/v2", "HorizontalPodAutoscaler", container.name, spec=spec)


def _data(cluster: Cluster, *, shared: bool) -> Tree:
    """Return the volume of checkpoints and weights, which replicas read unless weights come by the object store."""
    modes = ["ReadWriteMany" if shared else "ReadWriteOnce"]
    storage = {"requests": {"storage": cluster.deploy.data_size}}
    return _object("v1", "PersistentVolumeClaim", "bombus-data", spec={"accessModes": modes, "resources": storage})


def _start(cluster: Cluster) -> Tree:
    container = _container(cluster, starter(cluster))
    container["volumeMounts"].append({"name": "cluster", "mountPath": CONFIG_FOLDER})
    pod = {
        **_pod([container], grace_s=GRACE_S),
        "restartPolicy": "OnFailure",
        "volumes": [{"name": "tmp", "emptyDir": {}}, {"name": "cluster", "configMap": {"name": "bombus-cluster"}}],
    }
    return _object(
        "batch/v1", "Job", "start", spec={"template": {"metadata": {"labels": _labels(cluster, "start")}, "spec": pod}}
    )


# ---- who may talk to whom -------------------------------------------------------------------------------------------


def _network(cluster: Cluster, found: list[Container]) -> Iterable[Tree]:
    """Yield the network policies. What is not allowed is refused; agents reach the gateways alone."""
    own = _labels(cluster)
    yield _policy("bombus-refuse", own, [])
    if not cluster.nats:
        servers = _labels(cluster, "nats")
        yield _policy("nats", servers, [_allowed([_pods(own)], nats.PORT), _allowed([_pods(servers)], ROUTE_PORT)])
    gateways = [_pods(_labels(cluster, each.name)) for each in found if each.kind == "gateway"]
    prometheus = {"namespaceSelector": {"matchLabels": SCRAPES}}
    for container in found:
        sources = [*(gateways if container.kind == "inference" else []), prometheus]
        allowed = _allowed([] if container.kind == "gateway" else sources, container.port)
        yield _policy(container.name, _labels(cluster, container.name), [allowed])


def _policy(name: str, labels: Tree, ingress: list[Tree]) -> Tree:
    spec = {"podSelector": {"matchLabels": labels}, "policyTypes": ["Ingress"], "ingress": ingress}
    return _object("networking.k8s.io/v1", "NetworkPolicy", name, spec=spec)


def _allowed(sources: list[Tree], port: int) -> Tree:
    return {**({"from": sources} if sources else {}), "ports": [{"port": port, "protocol": "TCP"}]}


def _pods(labels: Tree) -> Tree:
    return {"podSelector": {"matchLabels": labels}}


def _literal(word: str) -> str:
    """Return a word in which Kubernetes replaces nothing."""
    return word.replace("$(", "$$(")
