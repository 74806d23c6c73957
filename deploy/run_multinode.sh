#!/usr/bin/env bash
# Trains on several machines: this one runs the hive, and every machine runs ranks of one trainer.
#
#   deploy/run_multinode.sh --nnodes 4 --nproc-per-node 8 --master-addr 10.0.0.1 --device cuda --config job.yaml
#
# Run it on node 0. It prints the command for each of the other machines. With --mode connect it prints one for this
# machine too, and runs no rank itself. --data-dir has to be a folder that all machines share.
set -euo pipefail

python=${BOMBUS_PYTHON:-python3}
if ! "$python" -c 'import bombus_trainer' 2>/dev/null; then
    echo "run_multinode.sh: $python has no bombus: activate an environment that has it, or set BOMBUS_PYTHON" >&2
    exit 2
fi
exec "$python" -m bombus_trainer.launcher "$@"
