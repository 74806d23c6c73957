"""Fills trackers from the ledger of a run: each row once, whatever is killed, and whatever a tracker does."""

import logging
import threading
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from bombus.cli import NotInstalled
from bombus.config.job import Tracker
from bombus.errors import in_one_line
from bombus.insight.trackers.ledger import Ledger
from bombus.insight.trackers.mlflow import Mlflow
from bombus.insight.trackers.swanlab import SwanLab
from bombus.insight.trackers.tensorboard import TensorBoard
from bombus.insight.trackers.tracker import TrackerAdapter
from bombus.insight.trackers.trackio import Trackio
from bombus.insight.trackers.wandb import Wandb
from bombus.private import private_folder, write_private

log = logging.getLogger(__name__)

ADAPTERS: Mapping[Tracker, type[TrackerAdapter]] = {
    Tracker.TENSORBOARD: TensorBoard,
    Tracker.TRACKIO: Trackio,
    Tracker.WANDB: Wandb,
    Tracker.MLFLOW: Mlflow,
    Tracker.SWANLAB: SwanLab,
}  # the tracker `jsonl` is the ledger itself
# The variables that hold trackers' keys. Only the process that writes to trackers gets them.
KEY_VARIABLES = ("WANDB_API_KEY", "MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN")
COMPLETE = "complete"  # a file with the last step that a tracker had when it was closed
RETRY_S, RETRY_S_MAX = 1.0, 300.0


def is_any_installed() -> bool:
    """Return whether this environment has the package of a tracker."""
    return any(find_spec(adapter.package) is not None for adapter in ADAPTERS.values())


def fill(ledger: Ledger, adapter: TrackerAdapter, ask: bool = False) -> int:
    """Give a tracker the rows that it lacks, until the ledger ends. Return how many were written.

    A tracker that continues is asked what it has. One that cannot continue begins anew. A tracker that was closed with
    all rows is left alone; with `ask`, one that continues is asked all the same. Raises `NotInstalled`, or whatever the
    tracker's package raises.
    """
    folder = private_folder(ledger.folder / adapter.package)
    complete = folder / COMPLETE
    has = int(complete.read_text()) if complete.is_file() and not (ask and adapter.continues) else 0
    offset = written = 0
    is_open = False
    try:
        while ledger.wait(offset):
            for row, after in ledger.rows(offset):
                if row.step > has and not is_open:
                    complete.unlink(missing_ok=True)
                    has, is_open, offset = _opened(adapter, ledger, folder), True, 0
                    break  # from the first row: the tracker may have none
                if row.step > has:
                    adapter.write(row)
                    has, written = row.step, written + 1
                offset = after
    finally:
        if is_open:
            adapter.close()
    if is_open:
        write_private(complete, str(has))
    return written


def _opened(adapter: TrackerAdapter, ledger: Ledger, folder: Path) -> int:
    try:
        return adapter.open(ledger.run, folder)
    except ModuleNotFoundError as error:
        if error.name != adapter.package:
            raise
        raise NotInstalled(adapter.package, "trackers") from error


class Filler(threading.Thread):
    """Keeps a tracker filled until the ledger ends. A tracker that fails is tried again, after longer and longer
    pauses, until `stopping` is set: then the next process to read the log gives it the rest. Nothing else waits."""

    def __init__(self, ledger: Ledger, tracker: Tracker, stopping: threading.Event) -> None:
        super().__init__(name=f"{tracker} {ledger.run.name}", daemon=True)
        self._ledger, self._tracker, self._stopping = ledger, tracker, stopping

    def run(self) -> None:
        pause_s, told = RETRY_S, ""
        while True:
            try:
                fill(self._ledger, ADAPTERS[self._tracker]())
                return
            except Exception as error:  # packages of others raise what they like, and a run must not suffer from it
                why = str(error) if isinstance(error, NotInstalled) else in_one_line(error)
            level = logging.DEBUG if why == told else logging.WARNING
            name, told = self._ledger.run.name, why
            log.log(level, "run %s is not written to %s now, and is not affected: %s", name, self._tracker, why)
            if self._stopping.wait(pause_s):
                return
            pause_s = min(2 * pause_s, RETRY_S_MAX)
