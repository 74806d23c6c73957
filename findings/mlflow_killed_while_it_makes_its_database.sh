#!/usr/bin/env bash
# Asked:     what is left of MLflow's default store, `sqlite:///mlflow.db`, where the process dies while the store is made?
# One would  guess nothing, or a database that the next process completes: its tables are made by one call, then migrated.
# In truth   SQLite's statements that make tables and columns are committed one by one, the revision after each migration. A process
#            that dies between them leaves a migration that is done in part: the next process begins it again, finds what it would
#            make, and fails; so does each later one, until somebody removes the file. The window is the first second of a first run.
# Version:   mlflow 3.17.2 (3.18.0 does not resolve: there is no mlflow-skinny 3.18.0), sqlalchemy 2.0
# Source:    mlflow/store/db/utils.py, `_initialize_tables`
# Seen:      killed after 40 statements: (sqlite3.OperationalError) duplicate column name: step
#            killed after 120 statements: opened
#            killed after 160 statements: (sqlite3.OperationalError) table model_version_tags already exists
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet mlflow==3.17.2
cat > "$folder/open.py" <<'PYTHON'
import os
import signal
import sys

from mlflow import MlflowClient
from sqlalchemy import event
from sqlalchemy.engine import Engine

left = int(sys.argv[1])


@event.listens_for(Engine, "after_cursor_execute")
def count(*_):
    global left
    left -= 1
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)


try:
    MlflowClient(f"sqlite:///{os.environ['FOLDER']}/mlflow.db").search_experiments()
    print("opened")
except Exception as error:
    print(str(error).partition("\n")[0])
PYTHON
cd "$folder"
export FOLDER="$folder" MLFLOW_DISABLE_TELEMETRY=true
for statements in 40 120 160; do
  rm -f mlflow.db
  venv/bin/python open.py "$statements" > /dev/null 2>&1 || true
  second=$(venv/bin/python open.py 0 2> /dev/null)
  third=$(venv/bin/python open.py 0 2> /dev/null)
  echo "killed after $statements statements: $second"
  [[ "$second" == "$third" && ("$statements" == 120 || "$second" == *OperationalError*) ]]
done
