"""What the adapter of a tracker does."""

from pathlib import Path
from typing import ClassVar, Protocol

from bombus.insight.trackers.rows import Row, TrackedRun


class TrackerAdapter(Protocol):
    """Writes one run to one tracker. All methods are called by one thread, and may raise whatever its package raises.

    A tracker that `continues` finds by itself what it has of a run. Any other begins the run anew each time.
    """

    package: ClassVar[str]
    continues: bool

    def open(self, run: TrackedRun, folder: Path) -> int:
        """Begin or continue the run, and return the last step that the tracker has, or 0. `folder` is for this run and
        tracker alone; what several runs share is in the folder two above it."""

    def write(self, row: Row) -> None:
        """Write a row, and its samples as a table."""

    def close(self) -> None:
        """End the run. Everything written is then complete."""
