"""Trackio: its local SQLite storage, which `trackio show` draws and `trackio sync` uploads."""

import os
from datetime import UTC, datetime
from pathlib import Path
from typing import ClassVar

from bombus.insight.trackers.rows import COLUMNS, Row, TrackedRun, plain_metrics, table_of


class Trackio:
    """Writes to the storage itself. `trackio.log` would queue in memory, number the rows at random, and only warn if
    they are lost; the storage keeps one row for each `log_id`, and a run is found by its id."""

    package: ClassVar[str] = "trackio"
    continues = True

    def open(self, run: TrackedRun, folder: Path) -> int:
        os.environ.setdefault("TRACKIO_DIR", str(folder.parents[1] / "trackio"))  # read when the package is imported
        from trackio.sqlite_storage import SQLiteStorage
        from trackio.table import Table

        self._storage, self._table, self._run, self._project = SQLiteStorage, Table, run, run.project
        try:
            SQLiteStorage.validate_project_name(run.project)
        except ValueError:  # its name would end like that of another file of Trackio's
            self._project = f"{run.project}-runs"
        return SQLiteStorage.get_last_step(self._project, run_id=run.id) or 0

    def write(self, row: Row) -> None:
        values = dict[str, object](plain_metrics(row.metrics))
        if row.samples:
            table = self._table(columns=COLUMNS, data=table_of(row.samples))
            values["samples"] = table._to_dict(project=self._project, run=self._run.name, step=row.step)
        self._storage.bulk_log(
            project=self._project,
            run=self._run.name,
            run_id=self._run.id,
            metrics_list=[values],
            steps=[row.step],
            timestamps=[datetime.fromtimestamp(row.at_ns / 1e9, UTC).isoformat()],
            config={**self._run.config, **self._run.tags},
            log_ids=[f"{self._run.id}-{row.step}"],
        )

    def close(self) -> None:
        pass  # every row is committed
