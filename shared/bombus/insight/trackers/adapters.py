"""The adapters of experiment trackers. Each opens a run in its tracker: `with open_...(run, folder) as (last, write)`.

`last` is the last step that the tracker has, or 0 if the run begins anew, and `write` writes a row. When the block
ends, everything written is complete. One thread uses an opened run, and the package may raise whatever it likes.
`folder` is for this run and tracker alone; what several runs share is in the folder two above it.
"""

import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec

from bombus.config.job import Tracker
from bombus.insight.trackers.rows import VERSION, Row, ShownSample, TrackedRun, plain_metrics

Opened = tuple[int, Callable[[Row], None]]
# The variables that hold trackers' keys. Only the process that writes to trackers gets them.
KEY_VARIABLES = ("WANDB_API_KEY", "MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN")
_TENSORBOARD_FILES = "events.out.tfevents."
_COLUMNS = [*ShownSample.__struct_fields__]  # of a table of samples
_MLFLOW_ID, _MLFLOW_LAST = "bombus.id", "bombus.last_step"
_MLFLOW_PARAM_MAX = 500  # characters of a setting; some servers refuse more
_MLFLOW_PARAMS_AT_ONCE = 100
_MAKING_MLFLOW = threading.Lock()
_ONE_SWANLAB = threading.Lock()  # a process can have one run of SwanLab


def is_installed(tracker: Tracker) -> bool:
    return find_spec(tracker) is not None


def continues(tracker: Tracker) -> bool:
    """Return whether a tracker continues a run that another process began. Any other begins it anew each time, because
    what a killed process had not written yet (up to 32 KiB) is lost."""
    return tracker != Tracker.SWANLAB and (tracker != Tracker.WANDB or _wandb_mode() == "online")


@contextmanager
def open_tensorboard(run: TrackedRun, folder: Path) -> Iterator[Opened]:
    """Open event files. Each step is one record, which has a checksum: a step is there as a whole or not at all.

    A process never continues the file of another, whose last record may be incomplete: a reader goes on with the next
    file, in the order of their names.
    """
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.text.summary_v2 import text_pb
    from tensorboard.summary.writer.record_writer import RecordWriter

    files = sorted(folder.glob(f"{_TENSORBOARD_FILES}*"))
    last = max((event.step for path in files for event in EventFileLoader(str(path)).Load()), default=0)
    newest = int(files[-1].name.removeprefix(_TENSORBOARD_FILES)[:10]) if files else 0
    number = max(int(time.time()), newest + 1)  # one second apart, where processes die that fast
    with closing(RecordWriter((folder / f"{_TENSORBOARD_FILES}{number:010d}.bombus.{run.id}").open("xb"))) as file:

        def put(**fields: Any) -> None:
            file.write(Event(**fields).SerializeToString())
            file.flush()

        def write(row: Row) -> None:
            values = [Summary.Value(tag=name, simple_value=y) for name, y in plain_metrics(row.metrics).items()]
            for place, each in enumerate(row.samples):
                values.append(text_pb(f"samples/{place}", _code(each.text)).value[0])
            put(wall_time=row.at_ns / 1e9, step=row.step, summary=Summary(value=values))

        put(wall_time=float(number), file_version="brain.Event:2")
        if not last:
            put(wall_time=float(number), summary=text_pb("config", _code(json.dumps(run.settings, indent=4))))
        yield last, write


def _code(text: str) -> str:
    """Return text as a block of code in Markdown, whatever it has in it."""
    return "\n".join(f"    {line}" for line in text.splitlines())


@contextmanager
def open_trackio(run: TrackedRun, folder: Path) -> Iterator[Opened]:
    """Open the local SQLite storage, which `trackio show` draws and `trackio sync` uploads.

    `trackio.log` would queue in memory, number the rows at random, and only warn if they are lost; the storage keeps
    one row for each `log_id`, and finds a run by its id.
    """
    os.environ.setdefault("TRACKIO_DIR", str(folder.parents[1] / "trackio"))  # read when the package is imported
    from trackio.sqlite_storage import SQLiteStorage
    from trackio.table import Table

    project = run.project
    try:
        SQLiteStorage.validate_project_name(project)
    except ValueError:  # its name would end like that of another file of Trackio's
        project += "-runs"

    def write(row: Row) -> None:
        values: dict[str, object] = {**plain_metrics(row.metrics)}
        if row.samples:
            table = Table(columns=_COLUMNS, data=[[*msgspec.structs.astuple(each)] for each in row.samples])
            values["samples"] = table._to_dict(project=project, run=run.name, step=row.step)
        SQLiteStorage.bulk_log(
            project=project,
            run=run.name,
            run_id=run.id,
            metrics_list=[values],
            steps=[row.step],
            timestamps=[datetime.fromtimestamp(row.at_ns / 1e9, UTC).isoformat()],
            config=run.settings,
            log_ids=[f"{run.id}-{row.step}"],
        )

    yield SQLiteStorage.get_last_step(project, run_id=run.id) or 0, write


@contextmanager
def open_wandb(run: TrackedRun, folder: Path) -> Iterator[Opened]:
    """Open W&B's server if $WANDB_API_KEY is set, or else files that `wandb sync` uploads.

    With a server, the run is continued by its id after the last step that the server has.
    """
    import wandb

    mode, is_online = _wandb_mode(), continues(Tracker.WANDB)
    quiet = dict.fromkeys(("silent", "disable_git", "x_disable_meta", "x_disable_stats"), True)
    if not is_online:
        shutil.rmtree(folder / "wandb", ignore_errors=True)
    live = wandb.init(
        project=run.project,
        name=run.name,
        id=run.id,
        dir=str(folder),
        config=run.settings,
        tags=[f"{name}={value}"[:64] for name, value in run.tags.items()],
        mode=mode,
        resume="allow" if is_online else None,
        reinit="create_new",
        settings=wandb.Settings(console="off", save_code=False, x_save_requirements=False, **quiet),
    )

    def write(row: Row) -> None:
        values: dict[str, object] = {**plain_metrics(row.metrics), "_timestamp": row.at_ns / 1e9}
        if row.samples:
            rows = [[*msgspec.structs.astuple(each)] for each in row.samples]
            values["samples"] = wandb.Table(columns=_COLUMNS, data=rows)
        live.log(values, step=row.step, commit=True)

    try:
        live.define_metric(VERSION)
        live.define_metric("held_out/*", step_metric=VERSION)
        yield max(0, live.step - 1) if is_online else 0, write
    finally:
        live.finish()


def _wandb_mode() -> str:
    return os.environ.get("WANDB_MODE") or ("online" if os.environ.get("WANDB_API_KEY") else "offline")


@contextmanager
def open_mlflow(run: TrackedRun, folder: Path) -> Iterator[Opened]:
    """Open the server of $MLFLOW_TRACKING_URI, or else a database in the folder of trackers.

    The run that has our id as a tag is continued. The last step is a tag that is written after the step's figures. A
    step that was written before a crash, but not its tag, is written again: MLflow keeps one of equal figures, and
    time, step and value are those of the log.
    """
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")  # it would try for minutes, and we try again
    from mlflow import MlflowClient
    from mlflow.entities import Metric, Param

    shared, uri = folder.parents[1], os.environ.get("MLFLOW_TRACKING_URI", "")
    client = MlflowClient(uri or _mlflow_database(shared / "mlflow.db", folder / "draft.db"))
    known = client.get_experiment_by_name(run.project)
    place = None if uri else (shared / "mlflow-artifacts").absolute().as_uri()
    experiment = known.experiment_id if known else client.create_experiment(run.project, artifact_location=place)
    for found in client.search_runs([experiment], f"tags.`{_MLFLOW_ID}` = '{run.id}'", max_results=1):
        client.update_run(found.info.run_id, status="RUNNING")
        break
    else:
        tags = {f"bombus.{name}": value for name, value in run.tags.items()}
        found = client.create_run(experiment, run_name=run.name, tags=tags)
    its_id, last = found.info.run_id, int(found.data.tags.get(_MLFLOW_LAST, "0"))
    lacking = run.config.keys() - found.data.params.keys()  # of a run whose process was killed when it was made, too
    params = [Param(name, str(run.config[name])[:_MLFLOW_PARAM_MAX]) for name in sorted(lacking)]
    for start in range(0, len(params), _MLFLOW_PARAMS_AT_ONCE):
        client.log_batch(its_id, params=params[start : start + _MLFLOW_PARAMS_AT_ONCE])

    def write(row: Row) -> None:
        figures = plain_metrics(row.metrics, at="_at_")
        if row.samples:
            shown = {"step": row.step, "samples": msgspec.to_builtins(row.samples)}
            client.log_dict(its_id, shown, f"samples/{row.step:06d}.json")
        at_ms = row.at_ns // 1_000_000
        client.log_batch(its_id, metrics=[Metric(name, value, at_ms, row.step) for name, value in figures.items()])
        client.set_tag(its_id, _MLFLOW_LAST, str(row.step))

    try:
        yield last, write
    finally:
        client.set_terminated(its_id)


def _mlflow_database(path: Path, draft: Path) -> str:
    """Return the address of a database, which is made if it does not exist.

    MLflow cannot open one any more that was being made when its process was killed, so it appears once it is complete.
    """
    from mlflow import MlflowClient

    with _MAKING_MLFLOW:
        if not path.exists():
            draft.unlink(missing_ok=True)
            MlflowClient(f"sqlite:///{draft}").search_experiments(max_results=1)
            try:
                os.link(draft, path)  # fails if another process was first
            except FileExistsError:
                pass
            draft.unlink()
    return f"sqlite:///{path}"


@contextmanager
def open_swanlab(run: TrackedRun, folder: Path) -> Iterator[Opened]:
    """Open files of SwanLab's mode `offline`, which `swanlab sync` uploads."""
    import swanlab

    nothing = dict.fromkeys(("hardware", "runtime", "requirements", "git", "monitor"), False)

    def write(row: Row) -> None:
        values: dict[str, object] = {**plain_metrics(row.metrics)}
        if row.samples:
            values["samples"] = [swanlab.Text(each.text) for each in row.samples]
        swanlab.log(values, step=row.step)

    with _ONE_SWANLAB:
        shutil.rmtree(folder / "swanlab", ignore_errors=True)
        (folder / "swanlab").mkdir()
        swanlab.init(
            project=run.project,
            name=run.name,
            mode="offline",
            log_dir=str(folder / "swanlab"),
            config=run.settings,
            tags=[f"{name}={value}"[:50] for name, value in run.tags.items()],
            settings=swanlab.Settings(interactive=False, probe=nothing, terminal={"proxy_type": "none"}),
        )
        try:
            yield 0, write
        finally:
            swanlab.finish()


ADAPTERS: Mapping[Tracker, Callable[[TrackedRun, Path], AbstractContextManager[Opened]]] = {
    Tracker.TENSORBOARD: open_tensorboard,
    Tracker.TRACKIO: open_trackio,
    Tracker.WANDB: open_wandb,
    Tracker.MLFLOW: open_mlflow,
    Tracker.SWANLAB: open_swanlab,
}  # each is also the name of a package; the tracker `jsonl` is the ledger itself
