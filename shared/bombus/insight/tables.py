"""The tables of a log: their columns, and batches of their rows as Arrow. Pure."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import pyarrow as pa

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
TableRow = tuple[Any, ...]


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
