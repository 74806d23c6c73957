"""What trackers have of a run, by their own readers: (step, figures) in the order in which they were written."""

import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

Read = list[tuple[int, dict[str, float]]]


def read_tensorboard(folder: Path) -> Read:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    everything = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0, "tensors": 0})
    everything.Reload()
    return _by_step(
        [(point.step, tag, point.value) for tag in everything.Tags()["scalars"] for point in everything.Scalars(tag)]
    )


def read_trackio(folder: Path) -> Read:
    """In a process of its own: the package reads the place of its files once."""
    run = json.loads((folder / "run.json").read_text())
    script = "import json, sys; from trackio.sqlite_storage import SQLiteStorage as storage; "
    script += "print(json.dumps(storage.get_logs(sys.argv[1], run_id=sys.argv[2]), default=str))"
    environment = {**os.environ, "TRACKIO_DIR": str(folder.parent / "trackio")}
    words = [sys.executable, "-c", script, run["project"], run["id"]]
    rows = json.loads(subprocess.run(words, env=environment, stdout=subprocess.PIPE, check=True).stdout)
    return [(row["step"], {name: value for name, value in row.items() if "/" in name}) for row in rows]


def read_mlflow(folder: Path) -> Read:
    from mlflow import MlflowClient

    run = json.loads((folder / "run.json").read_text())
    client = MlflowClient(f"sqlite:///{folder.parent / 'mlflow.db'}")
    experiment = client.get_experiment_by_name(run["project"])
    (found,) = client.search_runs([experiment.experiment_id], f"tags.`bombus.id` = '{run['id']}'")
    points = [
        (point.step, name.replace("_at_", "@"), point.value)
        for name in found.data.metrics
        for point in client.get_metric_history(found.info.run_id, name)
    ]
    return _by_step(points)


def read_wandb(folder: Path) -> Read:
    """Only `wandb-core` reads these files, and gives nothing back: SwanLab's importer does, with the messages
    of wandb."""
    from swanlab.converter.wb.wbdatastore import WBDataStoreReader
    from wandb.proto.wandb_internal_pb2 import Record

    (path,) = (folder / "wandb" / "wandb").glob("offline-run-*/*.wandb")
    found: Read = []
    with WBDataStoreReader() as reader:
        reader.open(path)
        while (data := reader.scan()) is not None:
            record = Record()
            record.ParseFromString(data)
            if record.WhichOneof("record_type") == "history":
                items = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
                figures = {name: float(value) for name, value in items.items() if "/" in name and "samples" not in name}
                found.append((int(json.loads(items["_step"])), figures))
    return found


def read_swanlab(folder: Path) -> Read:
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record
    from swanlab.sdk.internal.core_python.store import DataStoreReader

    (path,) = (folder / "swanlab" / "swanlab").glob("run-*/*.swanlab")
    reader = DataStoreReader()
    reader.open(path)
    points: list[tuple[int, str, float]] = []
    for data in reader:
        record = Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "scalar":
            points.append((record.scalar.step, record.scalar.key, record.scalar.value.number))
    return _by_step(points)


def _by_step(points: list[tuple[int, str, float]]) -> Read:
    """Return single figures as rows: as many for a step as it has values of one figure."""
    steps: dict[int, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for step, name, value in points:
        steps[step][name].append(value)
    rows: Read = []
    for step, figures in sorted(steps.items()):
        for number in range(max(map(len, figures.values()))):
            rows.append((step, {name: values[number] for name, values in figures.items() if len(values) > number}))
    return rows


READERS = {
    "tensorboard": read_tensorboard,
    "trackio": read_trackio,
    "wandb": read_wandb,
    "mlflow": read_mlflow,
    "swanlab": read_swanlab,
}
