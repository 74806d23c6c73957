"""Weights & Biases: its server if $WANDB_API_KEY is set, or else files that `wandb sync` uploads."""

import os
import shutil
from pathlib import Path
from typing import ClassVar

from bombus.insight.trackers.rows import COLUMNS, VERSION, Row, TrackedRun, plain_metrics, table_of


class Wandb:
    """With a server, the run is continued by its id after the last step that the server has.

    Without one, nothing can be continued: a new process begins a new folder, and what a killed one had not written yet
    (up to 32 KiB) is lost. So the earlier folder is removed, and the run written anew from its first step.
    """

    package: ClassVar[str] = "wandb"

    def __init__(self) -> None:
        self._mode = os.environ.get("WANDB_MODE") or ("online" if os.environ.get("WANDB_API_KEY") else "offline")
        self.continues = self._mode == "online"

    def open(self, run: TrackedRun, folder: Path) -> int:
        import wandb

        self._table = wandb.Table
        if not self.continues:
            shutil.rmtree(folder / "wandb", ignore_errors=True)
        quiet = wandb.Settings(
            console="off",
            disable_git=True,
            save_code=False,
            silent=True,
            x_disable_meta=True,
            x_disable_stats=True,
            x_save_requirements=False,
        )
        self._run = wandb.init(
            project=run.project,
            name=run.name,
            id=run.id,
            dir=str(folder),
            config={**run.config, **run.tags},
            tags=[f"{name}={value}"[:64] for name, value in run.tags.items()],
            mode=self._mode,
            resume="allow" if self.continues else None,
            reinit="create_new",
            settings=quiet,
        )
        self._run.define_metric(VERSION)
        self._run.define_metric("held_out/*", step_metric=VERSION)
        return max(0, self._run.step - 1) if self.continues else 0

    def write(self, row: Row) -> None:
        values = dict[str, object](plain_metrics(row.metrics))
        values["_timestamp"] = row.at_ns / 1e9
        if row.samples:
            values["samples"] = self._table(columns=COLUMNS, data=table_of(row.samples))
        self._run.log(values, step=row.step, commit=True)

    def close(self) -> None:
        self._run.finish()
