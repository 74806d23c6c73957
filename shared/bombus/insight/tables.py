"""The tables of a log: what `bombus sql` queries and notebooks show, folded from events and read from stored calls."""

import gc
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, NamedTuple

import msgspec
import pyarrow as pa

from bombus.bus.follow import read_event
from bombus.cli import REPLAY, load
from bombus.datums.call_sequences import is_learnt, learnt_tokens
from bombus.errors import LogCorrupted
from bombus.figures import counted, seconds_between
from bombus.hive import events as ev
from bombus.hive.bounded import trim
from bombus.hive.checkpoints import where_begun
from bombus.hive.events import EpisodeType, kind_of
from bombus.hive.records import CallRecord, CallRef, CallStatus, Choice, decode_record, unpack_logprobs
from bombus.hive.rewards import have_signal
from bombus.hive.state import Hive
from bombus.insight.metrics import evaluation_metrics, step_metrics
from bombus.insight.runs import Runs
from bombus.replay.audit.audit import CALLS_KEPT
from bombus.replay.logged_run import is_trained_elsewhere, read_run
from bombus.replay.source import RECORDS_AT_ONCE, Source
from bombus.terminal import complain

ROWS_AT_ONCE = 32_768  # rows that are kept as Python objects before they become an Arrow batch
TIME = pa.timestamp("us")  # in UTC
TYPES = {
    "text": pa.string(),
    "int": pa.int64(),
    "real": pa.float64(),
    "flag": pa.bool_(),
    "bytes": pa.binary(),
    "time": TIME,
    "ints": pa.list_(pa.int64()),
    "reals": pa.list_(pa.float64()),
    "counts": pa.map_(pa.string(), pa.int64()),
    "numbers": pa.map_(pa.string(), pa.float64()),
}
_NS = pa.timestamp("ns")

Write = Callable[[str, pa.RecordBatch], None]
Row = tuple[Any, ...]


class TableOfLog(NamedTuple):
    """A table: its `columns` with their types (`text` if none is given), and `notes` on some of them.

    `stored` says that its rows are read from stored calls, which takes far longer than events.
    """

    about: str
    columns: str
    notes: Mapping[str, str] = {}
    stored: bool = False

    def types(self) -> dict[str, str]:
        """Return the type of each column, by name."""
        parts = (column.split() for column in self.columns.split(", "))
        return {name: kind[0] if kind else "text" for name, *kind in parts}


TABLES = {
    "runs": TableOfLog(
        "the runs of all engines",
        "run, engine, number int, kind, model, state, reason, started time, ended time, begun, config",
        {
            "run": "such as `main-2`: run 2 of engine main, here and in all tables",
            "kind": "job, operations (for training clients), or outside (an outside trainer)",
            "state": "running, suspended, stopped, failed, or over (a later run has begun)",
            "reason": "why it was suspended or has failed",
            "begun": "the checkpoint at which it began",
            "config": "the job as JSON",
        },
    ),
    "events": TableOfLog(
        "every event of the log",
        "seq int, time time, engine, run, kind, json",
        {
            "seq": "the position in the log",
            "time": "in UTC, as all times",
            "run": "NULL for an event that belongs to no run",
            "kind": "such as `episode.ended`: see docs/log.md",
            "json": "the whole event: `json ->> '$.field'`",
        },
    ),
    "episodes": TableOfLog(
        "every episode, with its end and what became of it",
        "run, episode, type, client, owner, task, data_set, state, reason, failure, detail, claimed time, "
        "ended time, seconds real, reward real, is_success flag, version int, oldest int, calls int, "
        "completion_tokens int, step int, fates counts, reported numbers, call_rewards reals, metadata",
        {
            "type": "train or eval",
            "owner": "the name of the client's key",
            "state": "open, ended, aborted, trained (by a completed step), dropped, taken, or grouped",
            "reason": "why it was aborted or dropped",
            "failure": "what made it fail, or the budget that it used up",
            "detail": "what the client said when it aborted the episode",
            "ended": "when it ended or was aborted",
            "seconds": "from claim to end",
            "version": "the policy version at its claim",
            "oldest": "the oldest version among its tokens",
            "calls": "complete calls, without auxiliary ones",
            "completion_tokens": "of its complete calls",
            "step": "the step whose batch it was in",
            "fates": "tokens by what the step did with them, such as `trained`: as `bombus audit`",
            "reported": "the metrics that the client reported: `reported['format']`",
            "metadata": "the client's metadata as JSON",
        },
    ),
    "calls": TableOfLog(
        "every recorded call, without its tokens",
        "seq int, time time, run, episode, call, outcome, prompt_tokens int, completion_tokens int, oldest int, "
        "newest int, merged flag, incomplete flag, bytes int, sampler, place int, digest bytes",
        {
            "seq": "the event that noted it",
            "episode": "'' for recorded samples of a training client",
            "call": "its id",
            "outcome": "complete, cut off, late (after its episode), or auxiliary (not trained on)",
            "oldest": "the oldest policy version among its tokens",
            "newest": "the newest",
            "merged": "it extended an earlier call token for token",
            "incomplete": "part of its conversation is missing from its prompt",
            "bytes": "the size of its record",
            "sampler": "the address of the adapter that sampled it",
            "place": "the number of its record in the stream of calls",
            "digest": "of its record",
        },
    ),
    "groups": TableOfLog(
        "the groups of each step's batch of episodes",
        "run, step int, group int, task, data_set, episodes int, reward real, lowest real, highest real, "
        "has_signal flag",
        {
            "group": "its place in the batch, from 0",
            "reward": "the mean",
            "has_signal": "its rewards differ; NULL for a group of one",
        },
    ),
    "steps": TableOfLog(
        "the steps whose batches were sealed, complete or not; `metrics` has their figures",
        "run, step int, sealed_seq int, sealed time, done_seq int, done time, groups int, episodes int, fates "
        "counts, left_out int, checkpoint",
        {
            "sealed_seq": "the event that sealed its batch",
            "done_seq": "the event that completed it",
            "fates": "the tokens of its batch by what it did with them",
            "left_out": "episodes of the batch that it left out",
        },
    ),
    "metrics": TableOfLog(
        "the figures of each step of a job, as on the page and in reports; figures of evaluations are `held_out/...`",
        "run, step int, name, value real",
        {
            "step": "of an evaluation: the policy version",
        },
    ),
    "answers": TableOfLog(
        "the sampled answers: one for each choice of each call",
        "run, episode, call, choice int, tokens int, reasoning_tokens int, finish, cut_by, text, temperature "
        "real, received time, first_token_s real, seconds real, replica",
        {
            "finish": "stop, length or tool_calls",
            "cut_by": "the limit that cut it: turn, episode, job, context, replica, or request (its own)",
            "text": "its content, without tool calls and reasoning",
            "received": "when the gateway received the call",
            "first_token_s": "seconds from then to the first token",
            "seconds": "and to the last",
        },
        stored=True,
    ),
    "tokens": TableOfLog(
        "every sampled token, exactly as it was recorded",
        "run, episode, call, choice int, position int, id int, logprob real, version int, trained flag",
        {
            "position": "in its answer, from 0",
            "logprob": "the sampler's",
            "version": "the policy version that sampled it",
            "trained": "NULL if the step masked some tokens of the episode and the log does not say which",
        },
        stored=True,
    ),
    "samples": TableOfLog(
        "the sequences that each step trained on, as `bombus replay batch` writes them (needs the extra `trainer`)",
        "run, step int, sample int, group int, task, episode, branch int, reward real, status, prompt, response, "
        "tokens ints, loss_mask ints, logprobs reals, advantages reals, versions ints",
        {
            "sample": "its place in the batch",
            "status": "completed or truncated",
            "response": "from the first trained token on",
            "tokens": "of prompt and response",
            "loss_mask": "of the response, as the rest",
            "versions": "-1 for tokens that were not sampled",
        },
        stored=True,
    ),
}
SCHEMAS = {
    name: pa.schema([(column, TYPES[kind]) for column, kind in table.types().items()]) for name, table in TABLES.items()
}
OF_EVENTS = frozenset(name for name, table in TABLES.items() if not table.stored)


def batch_of(name: str, columns: Iterable[Sequence[Any]]) -> pa.RecordBatch:
    """Return a batch of a table's rows. Times are given in nanoseconds since the epoch."""
    schema = SCHEMAS[name]
    arrays = [
        pa.array(values, _NS).cast(TIME, safe=False) if field.type == TIME else pa.array(values, field.type)
        for field, values in zip(schema, columns, strict=True)
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


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
        self._rows: dict[str, list[Row]] = {name: [] for name in OF_EVENTS}
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


class StoredCall(NamedTuple):
    """A call whose record is read.

    `learnt` says that the call is complete and not auxiliary. `done` says that a completed step had its episode in its
    batch, and `trained` how many tokens of the episode that step trained on, or None if it did not report that.
    """

    run: str
    episode: str
    ref: CallRef
    learnt: bool
    done: bool
    trained: int | None


async def read_stored_calls(source: Source, episodes: Iterable[Sequence[StoredCall]], write: Write) -> None:
    """Read `answers` and `tokens` of these episodes. Calls that are no longer kept are counted in a warning."""
    lost = 0
    for part in _parts(episodes):
        records = iter(await _records(source, [call.ref for calls in part for call in calls]))
        answers: list[Row] = []
        tokens: list[list[Any]] = [[] for _ in SCHEMAS["tokens"]]
        for calls in part:
            found = [next(records) for _ in calls]
            trained = _is_trained(calls, found)
            for call, record in zip(calls, found):
                if record is None:
                    continue
                for number, choice in enumerate(record.choices):
                    place = (call.run, call.episode, call.ref.id, number)
                    answers.append((*place, *_answer(record, choice)))
                    _add_tokens(tokens, place, record, choice, trained if call.learnt else False)
            lost += found.count(None)
        if answers:
            write("answers", batch_of("answers", zip(*answers)))
            write("tokens", batch_of("tokens", tokens))
    if lost:
        complain(
            f"{counted(lost, 'call')} can no longer be read from {source.title}: these tables lack what they sampled"
        )


def _parts(episodes: Iterable[Sequence[StoredCall]]) -> Iterator[list[Sequence[StoredCall]]]:
    part: list[Sequence[StoredCall]] = []
    for calls in episodes:
        part.append(calls)
        if sum(map(len, part)) >= RECORDS_AT_ONCE:
            yield part
            part = []
    if part:
        yield part


async def _records(source: Source, refs: Sequence[CallRef]) -> list[CallRecord | None]:
    """Return the records of these calls, with None for each that is lost or damaged."""
    found: list[CallRecord | None] = []
    for ref, body in zip(refs, await source.bodies(refs), strict=True):
        try:
            found.append(None if body is None else decode_record(body, ref))
        except LogCorrupted:
            found.append(None)
    return found


def _is_trained(calls: Sequence[StoredCall], records: Sequence[CallRecord | None]) -> bool | None:
    """Return whether a step trained on the tokens of an episode that can be learnt, or None if only on some of them,
    since the log does not say on which."""
    first = calls[0]
    if not first.done or first.trained == 0:
        return False
    known = [learnt_tokens(record) for call, record in zip(calls, records) if call.learnt and record is not None]
    return True if first.trained == sum(known) else None


def _answer(record: CallRecord, choice: Choice) -> Row:
    timings = record.timings
    return (
        len(choice.tokens) // 4,
        choice.reasoning_tokens,
        choice.finish,
        choice.limit or None,
        _content(choice),
        record.sampling.temperature,
        timings.received_ns or None,
        seconds_between(timings.received_ns, timings.first_token_ns) if timings.first_token_ns else None,
        seconds_between(timings.received_ns, timings.finished_ns),
        record.replica,
    )


def _content(choice: Choice) -> str | None:
    content = None if choice.message is None else choice.message.get("content")
    return content if content is None or isinstance(content, str) else msgspec.json.encode(content).decode()


def _add_tokens(columns: list[list[Any]], place: Row, record: CallRecord, choice: Choice, trained: bool | None) -> None:
    ids = choice.token_ids()
    versions: list[int | None] = [None] * len(ids)
    for span in choice.spans:
        versions[span.start : span.end] = [span.version] * (span.end - span.start)
    verdicts = [trained if is_learnt(record) else False] * len(ids)
    if ids and not record.prompt_tokens:
        verdicts[0] = False  # nothing comes before it that could predict it
    repeated = ([each] * len(ids) for each in place)
    logprobs = unpack_logprobs(choice.logprobs)
    for column, values in zip(columns, (*repeated, range(len(ids)), ids, logprobs, versions, verdicts), strict=True):
        column.extend(values)


async def read_samples(source: Source, run: str, steps: Collection[int] = ()) -> list[pa.RecordBatch]:
    """Return the samples of a run's steps (default: of all whose calls are kept), a batch for each step.

    Raises `NotInstalled` without the trainer, and `NotOnLog` if the run is not a job's or has no such step.
    """
    command = REPLAY["batch"]
    batch_samples = load(command.module, command.extra).batch_samples
    engine, _, number = run.rpartition("-")
    logged = await read_run(source, engine, int(number))
    found = []
    for step in steps or logged.steps:
        try:
            samples = await batch_samples(source, logged, step)
        except LogCorrupted as error:
            complain(f"step {step} of {run} is left out: {error}")
            continue
        found.append(batch_of("samples", zip(*(_sample(run, step, sample) for sample in samples))))
    return found


def _sample(run: str, step: int, sample: Any) -> Row:
    ours = sample.metadata["bombus"]
    place = (run, step, sample.index, sample.group_index, ours["task"], ours["episode"], ours["branch"])
    texts = (sample.reward, str(sample.status), sample.prompt, sample.response)
    lists = (sample.tokens, sample.loss_mask, sample.rollout_log_probs, ours.get("advantages"), ours["versions"])
    return (*place, *texts, *lists)
