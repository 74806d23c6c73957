"""Fills trackers from the ledger of a run: each row once, whatever is killed, and whatever a tracker does."""

import logging
import threading
from importlib.util import find_spec

from bombus.cli import NotInstalled
from bombus.config.job import Tracker
from bombus.errors import in_one_line
from bombus.insight.trackers.adapters import ADAPTERS, continues
from bombus.insight.trackers.ledger import Ledger
from bombus.private import private_folder, write_private

log = logging.getLogger(__name__)

# The variables that hold trackers' keys. Only the process that writes to trackers gets them.
KEY_VARIABLES = ("WANDB_API_KEY", "MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN")
COMPLETE = "complete"  # a file with the last step that a tracker had when it was closed
RETRY_S, RETRY_S_MAX = 1.0, 300.0


def is_any_installed() -> bool:
    """Return whether this environment has the package of a tracker."""
    return any(find_spec(tracker) is not None for tracker in ADAPTERS)


def fill(ledger: Ledger, tracker: Tracker, ask: bool = False) -> int:
    """Give a tracker the rows that it lacks, until the ledger ends. Return how many were written.

    A tracker that was closed with all rows is left alone; with `ask`, one that continues runs is asked all the same.
    Raises `NotInstalled`, or whatever the tracker's package raises.
    """
    if find_spec(tracker) is None:
        raise NotInstalled(tracker, "trackers")
    folder = private_folder(ledger.folder / tracker)
    complete = folder / COMPLETE
    had = int(complete.read_text()) if complete.is_file() and not (ask and continues(tracker)) else 0
    if not any(row.step > had for row in ledger.rows()):
        return 0
    complete.unlink(missing_ok=True)
    written = 0
    with ADAPTERS[tracker](ledger.run, folder) as (last, write):
        for row in ledger.rows():
            if row.step > last:
                write(row)
                written += 1
    write_private(complete, str(ledger.last))
    return written


def keep_filled(ledger: Ledger, tracker: Tracker, stopping: threading.Event) -> None:
    """Fill a tracker until the ledger ends. One that fails is tried again, after longer and longer pauses, until
    `stopping` is set: then the next process to read the log gives it the rest. Nothing else waits."""
    pause_s, told = RETRY_S, ""
    while True:
        try:
            fill(ledger, tracker)
            return
        except Exception as error:  # packages of others raise what they like, and a run must not suffer from it
            why = str(error) if isinstance(error, NotInstalled) else in_one_line(error)
        level = logging.DEBUG if why == told else logging.WARNING
        log.log(level, "run %s is not written to %s now, and is not affected: %s", ledger.run.name, tracker, why)
        told = why
        if stopping.wait(pause_s):
            return
        pause_s = min(2 * pause_s, RETRY_S_MAX)
