"""TensorBoard: event files, written and read back with its own package."""

import json
import time
from pathlib import Path
from typing import Any, ClassVar

from bombus.insight.trackers.rows import Row, TrackedRun, plain_metrics, text_of

PREFIX = "events.out.tfevents."


class TensorBoard:
    """Writes each step as one record, which has a checksum: a step is there as a whole or not at all.

    A process never continues the file of another, whose last record may be incomplete: a reader goes on with the next
    file, in the order of their names.
    """

    package: ClassVar[str] = "tensorboard"
    continues = True

    def open(self, run: TrackedRun, folder: Path) -> int:
        from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.plugins.text.summary_v2 import text_pb
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._summary, self._text = Event, Summary, text_pb
        files = sorted(folder.glob(f"{PREFIX}*"))
        last = max((event.step for path in files for event in EventFileLoader(str(path)).Load()), default=0)
        newest = int(files[-1].name.removeprefix(PREFIX)[:10]) if files else 0
        number = max(int(time.time()), newest + 1)  # one second apart, where processes die that fast
        self._file = RecordWriter((folder / f"{PREFIX}{number:010d}.bombus.{run.id}").open("xb"))
        self._put(Event(wall_time=float(number), file_version="brain.Event:2"))
        if not last:
            shown = json.dumps({**run.tags, **run.config}, indent=4)
            self._put(Event(wall_time=float(number), summary=text_pb("config", _code(shown))))
        return last

    def write(self, row: Row) -> None:
        values = [self._summary.Value(tag=name, simple_value=y) for name, y in plain_metrics(row.metrics).items()]
        for number, each in enumerate(row.samples):
            values.append(self._text(f"samples/{number}", _code(text_of(each))).value[0])
        self._put(self._event(wall_time=row.at_ns / 1e9, step=row.step, summary=self._summary(value=values)))

    def _put(self, event: Any) -> None:
        self._file.write(event.SerializeToString())
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _code(text: str) -> str:
    """Return text as a block of code in Markdown, whatever it has in it."""
    return "\n".join(f"    {line}" for line in text.splitlines())
