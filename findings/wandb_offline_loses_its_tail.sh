#!/usr/bin/env bash
# Asked:     what is in the file of an offline run of wandb, or of SwanLab, when its process is killed?
# One would  guess all but the last moment: each `log` goes to a process of its own (wandb-core), which writes a log in records
#            with checksums, made to be read after a crash.
# In truth   wandb-core writes whole blocks of 32 KiB, and what is in the block that it has begun is in its memory until `finish`.
#            It ends when its client dies, without writing it: 50 steps leave only the header of the file, minutes later as well.
#            SwanLab writes through a buffered Python file, in blocks of 4 KiB, that it flushes on `finish` alone. Neither can add
#            to the file later.
# Version:   wandb 0.31.0, swanlab 0.10.3
# Source:    swanlab/sdk/internal/core_python/store/__init__.py says so in a comment; wandb-core's is compiled
# Seen:      50 steps, 10 s before the kill: wandb 7 bytes of 15850, SwanLab 4073 of 4438
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet wandb==0.31.0 swanlab==0.10.3
cat > "$folder/log.py" <<'PYTHON'
import os
import signal
import sys
import time

which, ends, folder = sys.argv[1:]
if which == "wandb":
    import wandb as package

    package.init(project="p", mode="offline", dir=folder, settings=package.Settings(silent=True, console="off"))
else:
    import swanlab as package

    package.init(project="p", mode="offline", log_dir=folder)
for step in range(1, 51):
    package.log({"loss": 1 / step}, step=step)
if ends == "finish":
    package.finish()
else:
    time.sleep(10)
    os.kill(os.getpid(), signal.SIGKILL)
PYTHON
for which in wandb swanlab; do
  for ends in killed finish; do
    mkdir "$folder/$which-$ends"
    "$folder/venv/bin/python" "$folder/log.py" "$which" "$ends" "$folder/$which-$ends" > /dev/null 2>&1 || true
    sleep 3
    size=$(find "$folder/$which-$ends" \( -name '*.wandb' -o -name '*.swanlab' \) -size +0 -printf '%s\n')
    echo "$which, $ends: ${size:-0} bytes"
    eval "${which}_$ends=${size:-0}"
  done
done
((wandb_killed < wandb_finish && swanlab_killed < swanlab_finish))
