"""Renders a batch script of Slurm, which starts a `bombus up` on each node of its job."""

import shlex
from collections.abc import Mapping
from pathlib import Path

from bombus.bus_address import VARIABLE
from bombus.cli import URL_FILE
from bombus.config.cluster import Cluster, Jobs
from bombus.deploy.nodes import HEAD, cluster_file, gpus_of, node_file, nodes_of

STOP_S = 120  # how long before the end of the job's time the hive is stopped: `bombus up` needs a minute at most
SCRIPT = "bombus.sbatch"
ADDRESS = r"""address=$(scontrol show node -o "$SLURMD_NODENAME" | sed -n "s/.* NodeAddr=\([^ ]*\) .*/\1/p")"""


def render(cluster: Cluster, jobs: Jobs) -> Mapping[str, str]:
    """Return the batch script and the cluster file of each node, by their names."""
    nodes = nodes_of(cluster)
    name = f"bombus-{cluster.hive}"
    gpus = max(map(gpus_of, nodes))
    options = [
        f"--job-name={name}",
        f"--output={name}-%j.log",
        "--open-mode=append",
        f"--nodes={len(nodes)}",
        "--ntasks-per-node=1",
        "--exclusive",
        *([f"--gpus-per-node={gpus}"] if gpus else []),
        "--requeue",
        f"--signal=B:USR1@{STOP_S}",
    ]
    url_file = shlex.quote(str(Path(cluster.data_dir) / URL_FILE.name))
    on_node = _on_node(len(nodes), url_file, own_bus=not cluster.nats)
    script = f"""\
#!/bin/bash
{HEAD}# Submit it in this folder, which all nodes share, with `bombus` on PATH. Options of sbatch win over these.
{"".join(f"#SBATCH {option}{chr(10)}" for option in options)}\
set -euo pipefail

rm -f {url_file} # a hive that was killed has left it
# If one node ends, for whatever reason, Slurm ends the others: no survivor holds the allocation.
srun --kill-on-bad-exit=1 --wait=60 bash -c {shlex.quote(on_node)} &
running=$!

# Slurm itself tells every process of a job that is cancelled or requeued. When the job's time is nearly over, it tells
# this script alone: the hive stops in order, and its log goes on when the job has time again.
again=""
trap : TERM
trap 'again=yes; scancel --signal=TERM "$SLURM_JOB_ID"' USR1
code=0
while kill -0 "$running" 2>/dev/null; do
    code=0
    wait "$running" || code=$?
done
if [ -n "$again" ]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit "$code"
"""
    files = {node_file(number): cluster_file(node, jobs) for number, node in enumerate(nodes)}
    return {SCRIPT: script, **files}


def _on_node(nodes: int, url_file: str, *, own_bus: bool) -> str:
    """Return the shell commands that run on each node."""
    if nodes == 1:
        return f"exec bombus up --config {node_file(0)}"
    started = f'exec bombus up --config "{node_file("$SLURM_NODEID")}" --replica-host "$address"'
    if not own_bus:
        return f"\n{ADDRESS}\n{started}\n"
    return f"""
{ADDRESS}
if [ "$SLURM_NODEID" = 0 ]; then
    exec bombus up --config {node_file(0)} --nats-host "$address"
fi
until [ -s {url_file} ]; do sleep 1; done # the address of the bus on node 0, with its password
{VARIABLE}=$(cat {url_file})
export {VARIABLE}
{started}
"""
