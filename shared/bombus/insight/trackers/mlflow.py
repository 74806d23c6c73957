"""MLflow: the server of $MLFLOW_TRACKING_URI, or else a database in the folder of trackers."""

import os
import threading
from pathlib import Path
from typing import Any, ClassVar

from bombus.insight.trackers.rows import COLUMNS, Row, TrackedRun, plain_metrics, table_of

LAST = "bombus.last_step"
PARAM_MAX = 500  # characters of a setting; some servers refuse more
PARAMS_AT_ONCE = 100
ID = "bombus.id"
_MAKING = threading.Lock()


class Mlflow:
    """Continues the run that has our id as a tag.

    The last step is a tag that is written after the step's figures. A step that was written before a crash, but not
    its tag, is written again: MLflow keeps one of equal figures, and time, step and value are those of the log.
    """

    package: ClassVar[str] = "mlflow"
    continues = True

    def open(self, run: TrackedRun, folder: Path) -> int:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")  # it would try for minutes, and we try again
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param, RunTag

        self._metric, self._tag = Metric, RunTag
        shared = folder.parents[1]
        uri = os.environ.get("MLFLOW_TRACKING_URI", "")
        self._client = client = MlflowClient(uri or _database(shared / "mlflow.db", folder / "draft.db"))
        found = client.get_experiment_by_name(run.project)
        place = None if uri else (shared / "mlflow-artifacts").absolute().as_uri()
        experiment = found.experiment_id if found else client.create_experiment(run.project, artifact_location=place)
        runs = client.search_runs([experiment], f"tags.`{ID}` = '{run.id}'", max_results=1)
        if runs:
            self._id = runs[0].info.run_id
            client.update_run(self._id, status="RUNNING")
            return int(runs[0].data.tags.get(LAST, "0"))
        tags = {f"bombus.{name}": value for name, value in run.tags.items()}
        self._id = client.create_run(experiment, run_name=run.name, tags=tags).info.run_id
        params = [Param(name, str(value)[:PARAM_MAX]) for name, value in run.config.items()]
        for start in range(0, len(params), PARAMS_AT_ONCE):
            client.log_batch(self._id, params=params[start : start + PARAMS_AT_ONCE])
        return 0

    def write(self, row: Row) -> None:
        at_ms = row.at_ns // 1_000_000
        metrics: list[Any] = [
            self._metric(name, value, at_ms, row.step) for name, value in plain_metrics(row.metrics, "_at_").items()
        ]
        if row.samples:
            rows = [dict(zip(COLUMNS, each, strict=True)) for each in table_of(row.samples)]
            self._client.log_dict(self._id, {"step": row.step, "samples": rows}, f"samples/{row.step:06d}.json")
        self._client.log_batch(self._id, metrics=metrics)
        self._client.set_tag(self._id, LAST, str(row.step))

    def close(self) -> None:
        self._client.set_terminated(self._id)


def _database(path: Path, draft: Path) -> str:
    """Return the address of a database, which is made if it does not exist.

    MLflow cannot open one any more that was being made when its process was killed, so it appears once it is complete.
    """
    from mlflow import MlflowClient

    with _MAKING:
        if not path.exists():
            draft.unlink(missing_ok=True)
            MlflowClient(f"sqlite:///{draft}").search_experiments(max_results=1)
            try:
                os.link(draft, path)  # fails if another process was first
            except FileExistsError:
                pass
            draft.unlink()
    return f"sqlite:///{path}"
