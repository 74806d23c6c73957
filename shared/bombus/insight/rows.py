"""Folds the events of a log into the rows of its tables."""

import gc
from collections import Counter
from collections.abc import Callable, Collection
from contextlib import aclosing
from typing import Any

import msgspec

from bombus.bus.follow import read_event
from bombus.figures import seconds_between
from bombus.hive import events as ev
from bombus.hive.bounded import trim
from bombus.hive.checkpoints import where_begun
from bombus.hive.events import EpisodeType, kind_of
from bombus.hive.records import CallStatus
from bombus.hive.rewards import have_signal
from bombus.hive.state import Hive
from bombus.insight.metrics import evaluation_metrics, step_metrics
from bombus.insight.runs import Runs
from bombus.insight.tables import OF_EVENTS, TableRow, Write, batch_of
from bombus.replay.audit.audit import CALLS_KEPT
from bombus.replay.logged_run import is_trained_elsewhere
from bombus.replay.source import Source

ROWS_AT_ONCE = 32_768  # rows that are kept as Python objects before they become an Arrow batch


class EpisodeOfLog(msgspec.Struct, gc=False):
    """A row of `episodes`, whose columns these are, in order."""

    run: str
    episode: str
    type: str = EpisodeType.TRAIN
    client: str = ""
    owner: str = ""
    task: str = ""
    data_set: str = ""
    state: str = "open"
    reason: str | None = None
    failure: str | None = None
    detail: str | None = None
    claimed: int | None = None
    ended: int | None = None
    seconds: float | None = None
    reward: float | None = None
    is_success: bool | None = None
    version: int | None = None
    oldest: int | None = None
    calls: int = 0
    completion_tokens: int = 0
    step: int | None = None
    fates: list[tuple[str, int]] | None = None
    reported: list[tuple[str, float]] | None = None
    call_rewards: tuple[float, ...] | None = None
    metadata: str | None = None

    def end(self, at_ns: int) -> None:
        self.ended = at_ns
        if self.claimed:
            self.seconds = seconds_between(self.claimed, at_ns)


class LogRows:
    """Folds the events of a log into the rows of the `wanted` tables of `OF_EVENTS`, and hands them to `write`."""

    def __init__(self, hive: Hive, wanted: Collection[str], write: Write) -> None:
        self.runs = Runs(hive)
        self._figures = "metrics" in wanted
        self._write = write
        self._rows: dict[str, list[TableRow]] = {name: [] for name in OF_EVENTS}
        self._wanted = wanted
        self._events = self._rows["events"] if "events" in wanted else None
        self._handlers = _HANDLERS if {*wanted} - {"events", "metrics"} else {}
        self._json = msgspec.json.Encoder().encode
        self._configured: dict[str, ev.EngineConfigured] = {}
        self._begun: dict[str, dict[str, Any]] = {}  # rows of `runs`
        self._current: dict[str, str] = {}  # the newest run of each engine
        self._episodes: dict[str, EpisodeOfLog] = {}  # those that may still change
        self._sealed: dict[str, tuple[ev.BatchReady, int]] = {}
        self._calls: dict[str, None] = {}  # ids of the newest calls: a message may be repeated
        for state in hive.engines.values():
            if (config := state.active or state.configured) is not None:
                self._configured[state.name] = config
            if state.started is not None:
                self._start(state.name, 0, state.started)

    def note(self, seq: int, event: ev.AnyEvent) -> None:
        kind, number = type(event), getattr(event, "run", None)
        run = f"{event.engine}-{number}" if number else None
        if self._events is not None:
            self._events.append((seq, event.at_ns, event.engine, run, _KINDS[kind], self._json(event)))
            if len(self._events) >= ROWS_AT_ONCE:
                self._flush()
        if self._figures:
            self.runs.note(seq, event)
        if (handle := self._handlers.get(kind)) is not None:
            handle(self, run or "", seq, event)

    def finish(self) -> None:
        """Write the rows that are left: of what has not ended yet, of runs, and the figures of their steps."""
        for run, (batch, seq) in self._sealed.items():
            self._add_step(run, batch, seq, None, 0)
        for name in [*self._episodes]:
            self._close(name)
        self._rows["runs"] += (tuple(row.values()) for row in self._begun.values())
        for series in self.runs.series.values():
            figures = [(row.step, step_metrics(row)) for row in series.steps]
            figures += evaluation_metrics(series.evaluated).items()
            self._rows["metrics"] += [(series.name, step, *each) for step, found in figures for each in found.items()]
        self._flush()

    def _flush(self) -> None:
        for name, rows in self._rows.items():
            if rows and name in self._wanted:
                self._write(name, batch_of(name, zip(*rows)))
            rows.clear()

    # ---- runs -----------------------------------------------------------------------------------------------------

    def _configure(self, run: str, seq: int, event: ev.EngineConfigured) -> None:
        self._configured[event.engine] = event

    def _start(self, run: str, seq: int, event: ev.EngineStarted) -> None:
        before = self._begun.get(self._current.get(event.engine, ""))
        if before is not None and before["ended"] is None:
            before |= {"state": "over", "ended": event.at_ns}
        run = self._current[event.engine] = f"{event.engine}-{event.run}"
        config, kind = self._configured.get(event.engine), "job"
        if is_trained_elsewhere(event):
            config, kind = None, "outside"
        elif event.base:
            config, kind = None, "operations"
        self._begun[run] = {
            "run": run,
            "engine": event.engine,
            "number": event.run,
            "kind": kind,
            "model": event.base or None if config is None else config.model,
            "state": "running",
            "reason": None,
            "started": event.at_ns or None,
            "ended": None,
            "begun": where_begun(event) or None,
            "config": None if config is None else config.config,
        }

    def _change(self, run: str, seq: int, event: ev.AnyEvent) -> None:
        if (row := self._begun.get(run)) is not None:
            state = _STATES[type(event)]
            is_over = state in ("stopped", "failed")
            row |= {"state": state, "reason": getattr(event, "reason", None), "ended": event.at_ns if is_over else None}

    # ---- episodes and calls ---------------------------------------------------------------------------------------

    def _episode(self, run: str, name: str) -> EpisodeOfLog:
        found = self._episodes.get(name)
        if found is None:  # its claim was compacted
            found = self._episodes[name] = EpisodeOfLog(run, name)
        return found

    def _close(self, name: str) -> None:
        """Move a row that no event will change to those that are written."""
        if (row := self._episodes.pop(name, None)) is not None:
            self._rows["episodes"].append(msgspec.structs.astuple(row))
            if len(self._rows["episodes"]) >= ROWS_AT_ONCE:
                self._flush()

    def _claim(self, run: str, seq: int, event: ev.EpisodeClaimed) -> None:
        for name in event.episodes:
            row = EpisodeOfLog(run, name, event.type, event.client, event.owner, event.task_hint)
            row.claimed, row.version = event.at_ns, event.version
            self._episodes[name] = row

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
            rows.append(
                (
                    seq, event.at_ns, run, call.episode, ref.id, outcome, call.prompt_tokens, call.completion_tokens,
                    call.oldest, call.newest, call.merged, call.incomplete, call.bytes, call.sampler, ref.seq,
                    ref.digest,
                )
            )  # fmt: skip
        trim(self._calls, CALLS_KEPT)
        if len(rows) >= ROWS_AT_ONCE:
            self._flush()

    def _end(self, run: str, seq: int, event: ev.EpisodeEnded) -> None:
        for outcome in event.outcomes:
            row = self._episode(run, outcome.episode)
            row.end(event.at_ns)
            row.state, row.type, row.client = "ended", event.type, event.client
            row.task, row.data_set, row.failure = outcome.task, outcome.data_set, outcome.failure
            row.reward, row.is_success, row.call_rewards = outcome.reward, outcome.is_success, outcome.call_rewards
            row.oldest, row.completion_tokens = outcome.oldest, outcome.completion_tokens or row.completion_tokens
            if outcome.log_metrics:
                row.reported = list(outcome.log_metrics.items())
            if outcome.metadata:
                row.metadata = self._json(outcome.metadata).decode()
            if event.type == EpisodeType.EVAL:
                self._close(outcome.episode)

    def _abort(self, run: str, seq: int, event: ev.EpisodeAborted) -> None:
        for name in event.episodes:
            row = self._episode(run, name)
            row.end(event.at_ns)
            row.state, row.reason, row.failure, row.detail = "aborted", event.reason, event.failed_by, event.detail
            self._close(name)

    def _leave(self, run: str, seq: int, event: ev.GroupDropped | ev.EpisodesTaken | ev.GroupsPushed) -> None:
        for name in event.episodes:
            row = self._episode(run, name)
            row.state, row.reason = _STATES[type(event)], getattr(event, "reason", None)
            self._close(name)

    def _clear(self, run: str, seq: int, event: ev.PoolCleared) -> None:
        pooled = [row for row in self._episodes.values() if (row.run, row.state, row.step) == (run, "ended", None)]
        for row in pooled:
            row.state, row.reason = "dropped", event.reason
            self._close(row.episode)

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
                signal = have_signal(rewards, [each.call_rewards for each in members], [each.calls for each in members])
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
                row.fates = [(fate, count) for fate, count in counts if count]
            self._close(each.episode)

    def _add_step(self, run: str, batch: ev.BatchReady, seq: int, done: ev.StepCompleted | None, done_seq: int) -> None:
        given = None if done is None else done.tokens
        totals: Counter[str] = Counter()
        if given is not None:
            for counts in given.episodes.values():
                for fate, count in zip(given.fates, counts):
                    totals[fate] += count
        row = (
            run,
            batch.step,
            seq or None,
            batch.at_ns if seq else None,
            done_seq or None,
            None if done is None else done.at_ns,
            len(batch.groups) or len(batch.taken),
            sum(len(group.episodes) for group in batch.groups),
            None if given is None else [*totals.items()],
            None if given is None else len(given.left_out),
            None if done is None else done.checkpoint,
        )
        self._rows["steps"].append(row)


_KINDS = {each: kind_of(each) for each in ev.AnyEvent.__args__}
_STATES: dict[type, str] = {
    ev.EngineStopped: "stopped",
    ev.EngineFailed: "failed",
    ev.EngineSuspended: "suspended",
    ev.EngineResumed: "running",
    ev.GroupDropped: "dropped",
    ev.EpisodesTaken: "taken",
    ev.GroupsPushed: "grouped",
}
_HANDLERS: dict[type, Callable[..., None]] = {
    ev.EngineConfigured: LogRows._configure,
    ev.EngineStarted: LogRows._start,
    ev.EngineStopped: LogRows._change,
    ev.EngineFailed: LogRows._change,
    ev.EngineSuspended: LogRows._change,
    ev.EngineResumed: LogRows._change,
    ev.EpisodeClaimed: LogRows._claim,
    ev.CallsNoted: LogRows._call,
    ev.EpisodeEnded: LogRows._end,
    ev.EpisodeAborted: LogRows._abort,
    ev.GroupDropped: LogRows._leave,
    ev.EpisodesTaken: LogRows._leave,
    ev.GroupsPushed: LogRows._leave,
    ev.PoolCleared: LogRows._clear,
    ev.BatchReady: LogRows._seal,
    ev.StepCompleted: LogRows._complete,
}


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
