"""The tables of a log: their columns, and batches of their rows as Arrow. Pure."""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pyarrow as pa

TYPES = {
    "text": pa.string(),
    "int": pa.int64(),
    "real": pa.float64(),
    "flag": pa.bool_(),
    "bytes": pa.binary(),
    "time": pa.timestamp("us"),  # in UTC
    "ints": pa.list_(pa.int64()),
    "reals": pa.list_(pa.float64()),
    "counts": pa.map_(pa.string(), pa.int64()),
    "numbers": pa.map_(pa.string(), pa.float64()),
}
_GIVEN = TYPES | {"time": pa.timestamp("ns")}
STORED = ", read from stored calls"
# The columns of each table, with their types (text if none is given) and notes. What is read from stored calls takes
# far longer than events.
DECLARED = """
runs: the runs of all engines
  run: such as `main-2`: run 2 of engine main, here and in all tables
  engine, number int
  kind: job, operations (for training clients), or outside (an outside trainer)
  model
  state: running, suspended, stopped, failed, or over (a later run has begun)
  reason: why it was suspended or has failed
  started time, ended time
  begun: the checkpoint at which it began
  config: the job as JSON
events: every event of the log
  seq int: the position in the log
  time time: in UTC, as all times
  engine
  run: NULL for an event that belongs to no run
  kind: such as `episode.ended`: see docs/log.md
  json: the whole event: `json ->> '$.field'`
episodes: every episode, with its end and what became of it
  run, episode
  type: train or eval
  client
  owner: the name of the client's key
  task, data_set
  state: open, ended, aborted, trained (by a completed step), dropped, taken, or grouped
  reason: why it was aborted or dropped
  failure: what made it fail, or the budget that it used up
  detail: what the client said when it aborted the episode
  claimed time
  ended time: when it ended or was aborted
  seconds real: from claim to end
  reward real, is_success flag
  version int: the policy version at its claim
  oldest int: the oldest version among its tokens
  calls int: complete calls, without auxiliary ones
  completion_tokens int: of its complete calls
  step int: the step whose batch it was in
  fates counts: tokens by what the step did with them, such as `trained`: as `bombus audit`
  reported numbers: the metrics that the client reported: `reported['format']`
  call_rewards reals
  metadata: the client's metadata as JSON
calls: every recorded call, without its tokens
  seq int: the event that noted it
  time time, run
  episode: '' for recorded samples of a training client
  call: its id
  outcome: complete, cut off, late (after its episode), or auxiliary (not trained on)
  prompt_tokens int, completion_tokens int
  oldest int: the oldest policy version among its tokens
  newest int: the newest
  merged flag: it extended an earlier call token for token
  incomplete flag: part of its conversation is missing from its prompt
  bytes int: the size of its record
  sampler: the address of the adapter that sampled it
  place int: the number of its record in the stream of calls
  digest bytes: of its record
groups: the groups of each step's batch of episodes
  run, step int
  group int: its place in the batch, from 0
  task, data_set, episodes int
  reward real: the mean
  lowest real, highest real
  has_signal flag: its rewards differ; NULL for a group of one
steps: the steps whose batches were sealed, complete or not; `metrics` has their figures
  run, step int
  sealed_seq int: the event that sealed its batch
  sealed time
  done_seq int: the event that completed it
  done time, groups int, episodes int
  fates counts: the tokens of its batch by what it did with them
  left_out int: episodes of the batch that it left out
  checkpoint
metrics: the figures of each step of a job, as on the page and in reports; figures of evaluations are `held_out/...`
  run
  step int: of an evaluation: the policy version
  name, value real
answers, read from stored calls: the sampled answers: one for each choice of each call
  run, episode, call, choice int, tokens int, reasoning_tokens int
  ids ints: its tokens
  logprobs reals: the sampler's
  versions ints: the policy versions that sampled its tokens
  learnable int: how many of its tokens a step can train on
  finish: stop, length or tool_calls
  cut_by: the limit that cut it: turn, episode, job, context, replica, or request (its own)
  text: its content, without tool calls and reasoning
  temperature real
  received time: when the gateway received the call
  first_token_s real: seconds from then to the first token
  seconds real: and to the last
  replica
tokens, read from stored calls: every sampled token, exactly as it was recorded
  run, episode, call, choice int
  position int: in its answer, from 0
  id int
  logprob real: the sampler's
  version int: the policy version that sampled it
  trained flag: NULL if the step masked some tokens of the episode and the log does not say which
samples, read from stored calls: the sequences that steps trained on, as in `bombus replay batch` (extra `trainer`)
  run, step int
  sample int: its place in the batch
  group int, task, episode, branch int, reward real
  status: completed or truncated
  prompt
  response: from the first trained token on
  tokens ints: of prompt and response
  loss_mask ints: of the response, as the rest
  logprobs reals, advantages reals
  versions ints: -1 for tokens that were not sampled
"""

TableRow = dict[str, Any] | tuple[Any, ...]
Write = Callable[[str, Sequence[TableRow]], None]


class TableOfLog(msgspec.Struct):
    """A table: what its rows are, and its `columns`, each with its type and a note."""

    about: str
    is_stored: bool
    columns: dict[str, tuple[str, str]] = {}

    @property
    def schema(self) -> pa.Schema:
        return pa.schema([(name, TYPES[kind]) for name, (kind, _) in self.columns.items()])

    def batch(self, rows: Sequence[TableRow]) -> pa.RecordBatch:
        """Return a batch of rows, which have values by column or for all in order, and times in nanoseconds since the
        epoch."""
        given = pa.struct([(name, _GIVEN[kind]) for name, (kind, _) in self.columns.items()])
        return pa.RecordBatch.from_struct_array(pa.array(rows, given)).cast(self.schema, safe=False)


TABLES: dict[str, TableOfLog] = {}
for line in DECLARED.strip().splitlines():
    declared, _, note = line.partition(": ")
    if not line.startswith(" "):
        table = TABLES[declared.removesuffix(STORED)] = TableOfLog(note, declared.endswith(STORED))
        continue
    for name, _, kind in (each.strip().partition(" ") for each in declared.split(", ")):
        table.columns[name] = (kind or "text", note)
OF_EVENTS = frozenset(name for name, table in TABLES.items() if not table.is_stored)
