"""Folds the events of a log into the rows of its tables."""

import gc
from collections import Counter
from collections.abc import Callable, Collection
from contextlib import aclosing
from operator import attrgetter
from typing import Any

import msgspec

from bombus.bus.follow import read_event
from bombus.figures import seconds_between
from bombus.hive import events as ev
from bombus.hive.bounded import trim
from bombus.hive.events import EpisodeType, kind_of
from bombus.hive.records import CallStatus
from bombus.hive.rewards import have_signal
from bombus.hive.state import Hive
from bombus.insight.metrics import evaluation_metrics, step_metrics
from bombus.insight.runs import OF_RUNS, Runs
from bombus.insight.tables import OF_EVENTS, TABLES, TableRow, Write
from bombus.replay.audit.audit import CALLS_KEPT
from bombus.replay.source import Source

EVENTS_AT_ONCE = 4_096  # whose rows are Python objects before they become an Arrow batch: more leave the CPU's caches


_KINDS = {each: kind_of(each) for each in ev.AnyEvent.__args__}


class LogRows:
    """Folds the events of a log into the rows of the `wanted` tables of `OF_EVENTS`, and hands them to `write`."""

    def __init__(self, hive: Hive, wanted: Collection[str], write: Write) -> None:
        self.runs = Runs(hive)
        self._figures = "metrics" in wanted
        self._write = write
        self._rows: dict[str, list[TableRow]] = {name: [] for name in OF_EVENTS}
        self._wanted = wanted
        self._events = self._rows["events"] if "events" in wanted else None
        self._handlers = _HANDLERS if {*wanted} - {"events", "metrics", "runs"} else {}
        self._json = msgspec.json.Encoder().encode
        self._episodes: dict[str, Any] = {}  # rows that may still change
        self._sealed: dict[str, tuple[ev.BatchReady, int]] = {}
        self._calls: dict[str, None] = {}  # ids of the newest calls: a message may be repeated

    def note(self, seq: int, event: ev.AnyEvent) -> None:
        kind, number = type(event), getattr(event, "run", None)
        run = f"{event.engine}-{number}" if number else None
        if self._events is not None:
            self._events.append((seq, event.at_ns, event.engine, run, _KINDS[kind], self._json(event)))
        if self._figures or kind in OF_RUNS:
            self.runs.note(seq, event)
        if (handle := self._handlers.get(kind)) is not None:
            handle(self, run or "", seq, event)
        if seq % EVENTS_AT_ONCE == 0:
            self._flush()

    def finish(self) -> None:
        """Write the rows that are left: of what has not ended yet, of runs, and the figures of their steps."""
        for run, (batch, seq) in self._sealed.items():
            self._add_step(run, batch, seq, None, 0)
        for name in [*self._episodes]:
            self._close(name)
        self._rows["runs"] += self.runs.rows.values()
        for series in self.runs.series.values():
            figures = [(row.step, step_metrics(row)) for row in series.steps]
            figures += evaluation_metrics(series.evaluated).items()
            self._rows["metrics"] += [(series.name, step, *each) for step, found in figures for each in found.items()]
        self._flush()

    def _flush(self) -> None:
        for name, rows in self._rows.items():
            if rows and name in self._wanted:
                self._write(name, rows)
            rows.clear()

    # ---- episodes and calls ---------------------------------------------------------------------------------------

    def _episode(self, run: str, name: str) -> Any:
        found = self._episodes.get(name)
        if found is None:  # its claim was compacted
            found = self._episodes[name] = _EpisodeRow(run, name)
        return found

    def _close(self, name: str) -> None:
        """Move a row that no event will change to those that are written."""
        if (row := self._episodes.pop(name, None)) is not None:
            self._rows["episodes"].append(msgspec.structs.astuple(row))

    def _claim(self, run: str, seq: int, event: ev.EpisodeClaimed) -> None:
        for name in event.episodes:
            row = self._episodes[name] = _EpisodeRow(run, name, event.type, event.client, event.owner, event.task_hint)
            row.claimed, row.version = event.at_ns, event.version

    def _call(self, run: str, seq: int, event: ev.CallsNoted) -> None:
        rows = self._rows["calls"]
        for call in event.calls:
            ref = call.ref
            if ref.id in self._calls:
                continue  # its message was repeated: its tokens were not sampled again
            self._calls[ref.id] = None
            outcome = "complete"
            if call.late:
                outcome = "late"
            elif call.status != CallStatus.COMPLETE:
                outcome = "cut off"
            elif call.episode:
                row = self._episode(run, call.episode)
                row.completion_tokens += call.completion_tokens
                if call.masked:
                    outcome = "auxiliary"
                else:
                    row.calls += 1
            rows.append((seq, event.at_ns, run, call.episode, ref.id, outcome, *_of_call(call), ref.seq, ref.digest))
        trim(self._calls, CALLS_KEPT)

    def _end(self, run: str, seq: int, event: ev.EpisodeEnded) -> None:
        for outcome in event.outcomes:
            row = self._episode(run, outcome.episode)
            row.state, row.type, row.client = "ended", event.type, event.client
            row.task, row.data_set, row.failure = outcome.task, outcome.data_set, outcome.failure
            row.reward, row.is_success, row.call_rewards = outcome.reward, outcome.is_success, outcome.call_rewards
            row.oldest, row.completion_tokens = outcome.oldest, outcome.completion_tokens or row.completion_tokens
            row.reported = outcome.log_metrics or None
            _end(row, event.at_ns)
            if outcome.metadata:
                row.metadata = self._json(outcome.metadata)
            if event.type == EpisodeType.EVAL:
                self._close(outcome.episode)

    def _abort(self, run: str, seq: int, event: ev.EpisodeAborted) -> None:
        for name in event.episodes:
            row = self._episode(run, name)
            row.state, row.reason, row.failure, row.detail = "aborted", event.reason, event.failed_by, event.detail
            _end(row, event.at_ns)
            self._close(name)

    def _leave(self, run: str, seq: int, event: ev.GroupDropped | ev.EpisodesTaken | ev.GroupsPushed) -> None:
        for name in event.episodes:
            row = self._episode(run, name)
            row.state, row.reason = _LEFT[type(event)], getattr(event, "reason", None)
            self._close(name)

    def _clear(self, run: str, seq: int, event: ev.PoolCleared) -> None:
        for name, row in [*self._episodes.items()]:
            if (row.run, row.state, row.step) == (run, "ended", None):
                row.state, row.reason = "dropped", event.reason
                self._close(name)

    # ---- steps ----------------------------------------------------------------------------------------------------

    def _seal(self, run: str, seq: int, event: ev.BatchReady) -> None:
        self._sealed[run] = event, seq
        for number, group in enumerate(event.groups):
            rewards = [each.reward for each in group.episodes]
            members = [self._episode(run, each.episode) for each in group.episodes]
            for member in members:
                member.step = event.step
            signal = None
            if len(rewards) > 1:
                calls = [each.calls for each in members]
                signal = have_signal(rewards, [each.call_rewards for each in members], calls)
            count, data_set = len(rewards), members[0].data_set if members else ""
            mean = sum(rewards) / max(count, 1)
            row = (run, event.step, number, group.task, data_set, count, mean, min(rewards), max(rewards), signal)
            self._rows["groups"].append(row)

    def _complete(self, run: str, seq: int, event: ev.StepCompleted) -> None:
        batch, sealed_seq = self._sealed.pop(run, (None, 0))
        if batch is None or batch.step != event.step:
            batch, sealed_seq = ev.BatchReady(run=event.run, step=event.step, groups=(), config_digest=""), 0
        given = event.tokens
        self._add_step(run, batch, sealed_seq, event, seq)
        for each in (each for group in batch.groups for each in group.episodes):
            row = self._episode(run, each.episode)
            row.state = "trained"
            if given is not None and each.episode in given.left_out:
                row.state, row.reason = "dropped", given.left_out[each.episode].removeprefix("dropped: ")
            elif given is not None:
                counts = zip(given.fates, given.episodes.get(each.episode, ()))
                row.fates = {fate: count for fate, count in counts if count}
            self._close(each.episode)

    def _add_step(self, run: str, batch: ev.BatchReady, seq: int, done: ev.StepCompleted | None, done_seq: int) -> None:
        row: dict[str, Any] = {"run": run, "step": batch.step, "groups": len(batch.groups) or len(batch.taken)}
        row["episodes"] = sum(len(group.episodes) for group in batch.groups)
        if seq:
            row |= {"sealed_seq": seq, "sealed": batch.at_ns}
        if done is not None:
            row |= {"done_seq": done_seq, "done": done.at_ns, "checkpoint": done.checkpoint}
        if done is not None and (given := done.tokens) is not None:
            totals: Counter[str] = Counter()
            for counts in given.episodes.values():
                totals.update(dict(zip(given.fates, counts)))
            row |= {"fates": totals, "left_out": len(given.left_out)}
        self._rows["steps"].append(row)


_of_call = attrgetter(*[*TABLES["calls"].columns][6:-2])
_OPEN = {"client": "", "owner": "", "task": "", "data_set": "", "state": "open", "calls": 0, "completion_tokens": 0}
_OPEN["type"] = EpisodeType.TRAIN
# A row of `episodes` that may still change: a struct takes half the time of a dict.
_EpisodeRow: Any = msgspec.defstruct(
    "_EpisodeRow", [(name, Any, _OPEN.get(name)) for name in TABLES["episodes"].columns], gc=False
)
_LEFT: dict[type, str] = {ev.GroupDropped: "dropped", ev.EpisodesTaken: "taken", ev.GroupsPushed: "grouped"}
_HANDLERS: dict[type, Callable[..., None]] = {
    ev.EpisodeClaimed: LogRows._claim,
    ev.CallsNoted: LogRows._call,
    ev.EpisodeEnded: LogRows._end,
    ev.EpisodeAborted: LogRows._abort,
    **dict.fromkeys(_LEFT, LogRows._leave),
    ev.PoolCleared: LogRows._clear,
    ev.BatchReady: LogRows._seal,
    ev.StepCompleted: LogRows._complete,
}


def _end(row: Any, at_ns: int) -> None:
    row.ended = at_ns
    if row.claimed:
        row.seconds = seconds_between(row.claimed, at_ns)


async def read_rows(source: Source, wanted: Collection[str], write: Write) -> Runs:
    """Read the `wanted` tables of `OF_EVENTS` from a log. Return its runs, which have figures if `metrics` is
    wanted."""
    hive, position = await source.base()
    rows = LogRows(hive, wanted, write)
    collects = gc.isenabled()
    gc.disable()  # events and rows have no cycles, and looking for some would take a quarter of the time
    try:
        async with aclosing(source.in_order(position)) as messages:
            async for stored in messages:
                rows.note(stored.seq, read_event(stored))
        rows.finish()
    finally:
        if collects:
            gc.enable()
    return rows.runs
