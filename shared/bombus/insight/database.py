"""The tables of a log in DuckDB, loaded when a query names them. Queries reach no file and no network."""

import os
import re
import signal
import socket
import tempfile
import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

import duckdb
import msgspec
import pyarrow as pa

from bombus.cli import REPLAY, load
from bombus.datums.call_sequences import is_learnt
from bombus.errors import BombusError, LogCorrupted
from bombus.figures import counted, seconds_between
from bombus.hive.records import CallRecord, CallRef, Choice, decode_record, unpack_logprobs
from bombus.insight.rows import read_rows
from bombus.insight.runs import Runs
from bombus.insight.tables import OF_EVENTS, TABLES, TableRow, Write
from bombus.private import private_folder
from bombus.replay.logged_run import read_run
from bombus.replay.source import RECORDS_AT_ONCE, Source
from bombus.terminal import complain

MEMORY_MB_MAX = 8192  # what needs more is written to the temporary folder
THREADS_MAX = 4
_UNREAD = """
    SELECT place, call, digest, outcome = 'complete' FROM calls
    WHERE ($episode IS NULL OR episode = $episode) AND call NOT IN (SELECT call FROM answers)
    ORDER BY run, episode, place
"""
_TOKENS = """
    CREATE VIEW tokens AS
    WITH sampled AS (
        SELECT run, episode, call, choice, tokens - learnable AS unlearnt, unnest(range(tokens)) AS position,
            unnest(ids) AS id, unnest(logprobs) AS logprob, unnest(versions) AS version
        FROM answers
    ), played AS (
        SELECT run, episode, sum(learnable) AS learnable,
            any_value(CASE WHEN fates IS NOT NULL THEN coalesce(fates['trained'], 0) END) AS trained,
            bool_or(state = 'trained') AS done
        FROM answers a LEFT JOIN episodes e USING (run, episode)
        GROUP BY ALL
    )
    SELECT run, episode, call, choice, position, id, logprob, version, CASE
        WHEN position < unlearnt OR NOT coalesce(done, false) OR trained = 0 THEN false
        WHEN trained = learnable THEN true
    END AS trained
    FROM sampled JOIN played USING (run, episode)
"""


class QueryRefused(BombusError):
    """A query cannot be run. The message says why."""


class LogDatabase:
    """The tables of one log. `load` what a query needs before it is run. `loaded` are the tables that are complete, and
    `runs` those of the log, once `metrics` are loaded.

    Without a file, DuckDB reads the tables of events where they are, as Arrow in memory: a copy would take half as long
    as a fold. What is read from stored calls may be larger than memory, so DuckDB has a copy that it can spill.
    """

    def __init__(self, path: Path | None = None) -> None:
        """Make a database in memory, or in a new file. Raises `QueryRefused` if there is such a file."""
        if path is not None:
            if path.exists():
                raise QueryRefused(f"{path} exists already: remove it, or open it with `duckdb {path}`")
            private_folder(path.parent)
        self._spill = tempfile.TemporaryDirectory(prefix="bombus-sql-")
        memory_mb = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // (2 << 20)
        config: dict[str, Any] = {
            "threads": min(THREADS_MAX, os.cpu_count() or 1),
            "memory_limit": f"{min(MEMORY_MB_MAX, memory_mb)}MB",
            "temp_directory": self._spill.name,
        }
        self.runs: Runs | None = None
        self._connection = duckdb.connect(":memory:" if path is None else str(path), config=config)
        self.loaded: set[str] = set()
        self._path = path
        self._batches: dict[str, list[pa.RecordBatch]] = {}  # of tables that are not copied
        self._connection.execute("SET enable_external_access = false; SET lock_configuration = true")
        for name in TABLES.keys() - {"tokens"}:
            self._connection.from_arrow(TABLES[name].schema.empty_table()).create(name)
        self._connection.execute(_TOKENS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()
        self._spill.cleanup()
        if self._path is not None and not self.loaded:  # as when there is no such log
            self._path.unlink(missing_ok=True)

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Let Ctrl-C end queries at once, in the main thread. DuckDB looks for it only between the tasks of its
        thread, of which one may take hours."""
        ears, mouth = socket.socketpair()
        mouth.setblocking(False)

        def listen() -> None:
            if ears.recv(1) == bytes([signal.SIGINT]):
                self._connection.interrupt()

        listening = threading.Thread(target=listen, daemon=True)
        before = signal.set_wakeup_fd(mouth.fileno(), warn_on_full_buffer=False)
        listening.start()
        try:
            yield
        finally:
            signal.set_wakeup_fd(before)
            mouth.close()
            listening.join()
            ears.close()

    async def load(self, source: Source, wanted: Collection[str], episode: str | None = None) -> None:
        """Load those of the wanted tables that are not loaded yet; of answers and tokens, only those of `episode` if it
        is given."""
        with suppress(duckdb.TransactionException):  # there is none
            self._connection.execute("COMMIT")  # else a rollback would undo the load as well
        needed = {*wanted} - self.loaded
        answers = needed & {"answers", "tokens"}
        needed |= ({"calls", "episodes"} if answers else set()) | ({"runs"} if "samples" in needed else set())
        if folded := needed & OF_EVENTS - self.loaded:
            self._batches = {}  # also of a load that was interrupted
            self._connection.begin()  # a commit for each insert would take half as long as a fold
            runs = await read_rows(source, folded, self._write)
            self._connection.commit()
            self.runs = runs if "metrics" in folded else self.runs
            for name, batches in self._batches.items():
                self._connection.execute(f"DROP TABLE {name}")
                self._connection.register(name, pa.Table.from_batches(batches))
            self.loaded |= folded
        if answers:
            unread = self._connection.execute(_UNREAD, {"episode": episode}).fetchall()
            await _read_answers(source, [(CallRef(*ref), learnt) for *ref, learnt in unread], self._write)
            self.loaded |= {"answers", "tokens"} if episode is None else set()
        if "samples" in needed:
            self._connection.execute("DELETE FROM samples")
            for (run,) in self._connection.execute("SELECT run FROM runs WHERE kind = 'job'").fetchall():
                await read_samples(source, run, self._write)
            self.loaded.add("samples")

    def _write(self, name: str, rows: Sequence[TableRow]) -> None:
        batch = TABLES[name].batch(rows)
        if self._path is None and name in OF_EVENTS:
            self._batches.setdefault(name, []).append(batch)
        else:
            self._connection.from_arrow(pa.Table.from_batches([batch])).insert_into(name)

    def tables_in(self, text: str) -> set[str]:
        """Return the tables that a query may read and that may not be loaded yet."""
        try:
            return TABLES.keys() & {name.lower() for name in self._connection.get_table_names(text)}
        except duckdb.Error:  # such as several statements
            return TABLES.keys() & set(re.findall(r"\w+", text.lower()))

    def query(self, text: str) -> duckdb.DuckDBPyConnection:
        """Run a query, and return its result, from which rows are fetched. Raises `QueryRefused`."""
        with refusing():
            found: duckdb.DuckDBPyConnection | None = self._connection.execute(text)
            if found is None:
                raise QueryRefused("the query is empty")
            return found

    def relation(self, text: str, parameters: dict[str, Any] | None = None) -> duckdb.DuckDBPyRelation:
        """Return a query that can be shown and read as Arrow, while `refusing`. Raises `QueryRefused`."""
        with refusing():
            if (found := self._connection.sql(text, params=parameters)) is None:
                raise QueryRefused("the query is empty")
            return found


async def _read_answers(source: Source, calls: Sequence[tuple[CallRef, bool]], write: Write) -> None:
    """Read the answers of these calls, each with whether a step can train on it. Calls that are no longer kept are
    counted in a warning."""
    lost = 0
    for start in range(0, len(calls), RECORDS_AT_ONCE):
        part = calls[start : start + RECORDS_AT_ONCE]
        rows: list[dict[str, Any]] = []
        for (ref, learnt), body in zip(part, await source.bodies([ref for ref, _ in part]), strict=True):
            try:
                record = None if body is None else decode_record(body, ref)
            except LogCorrupted:
                record = None
            if record is None:
                lost += 1
            else:
                rows += (_answer(record, number, each, learnt) for number, each in enumerate(record.choices))
        write("answers", rows)
    if lost:
        complain(
            f"{counted(lost, 'call')} can no longer be read from {source.title}: these tables lack what they sampled"
        )


def _answer(record: CallRecord, number: int, choice: Choice, learnt: bool) -> dict[str, Any]:
    timings, ids = record.timings, choice.token_ids()
    content = None if choice.message is None else choice.message.get("content")
    versions: list[int | None] = [None] * len(ids)
    for span in choice.spans:
        versions[span.start : span.end] = [span.version] * (span.end - span.start)
    return {
        "run": f"{record.engine}-{record.run}",
        "episode": record.episode,
        "call": record.id,
        "choice": number,
        "tokens": len(ids),
        "reasoning_tokens": choice.reasoning_tokens,
        "ids": ids,
        "logprobs": unpack_logprobs(choice.logprobs),
        "versions": versions,
        # Nothing comes before the first token of an empty prompt that could predict it.
        "learnable": max(len(ids) - (not record.prompt_tokens), 0) if learnt and is_learnt(record) else 0,
        "finish": choice.finish,
        "cut_by": choice.limit or None,
        "text": content if content is None or isinstance(content, str) else msgspec.json.encode(content),
        "temperature": record.sampling.temperature,
        "received": timings.received_ns or None,
        "first_token_s": seconds_between(timings.received_ns, timings.first_token_ns)
        if timings.first_token_ns
        else None,
        "seconds": seconds_between(timings.received_ns, timings.finished_ns),
        "replica": record.replica,
    }


async def read_samples(source: Source, run: str, write: Write, steps: Collection[int] = ()) -> None:
    """Read the samples of a run's steps (default: of all whose calls are kept).

    Raises `NotInstalled` without the trainer, and `NotOnLog` if the run is not a job's or has no such step.
    """
    command = REPLAY["batch"]
    batch_samples = load(command.module, command.extra).batch_samples
    engine, _, number = run.rpartition("-")
    logged = await read_run(source, engine, int(number))
    for step in steps or logged.steps:
        try:
            write("samples", [_sample(run, step, sample) for sample in await batch_samples(source, logged, step)])
        except LogCorrupted as error:
            complain(f"step {step} of {run} is left out: {error}")


def _sample(run: str, step: int, sample: Any) -> tuple[Any, ...]:
    ours = sample.metadata["bombus"]
    place = (run, step, sample.index, sample.group_index, ours["task"], ours["episode"], ours["branch"])
    texts = (sample.reward, str(sample.status), sample.prompt, sample.response)
    lists = (sample.tokens, sample.loss_mask, sample.rollout_log_probs, ours.get("advantages"), ours["versions"])
    return (*place, *texts, *lists)


@contextmanager
def refusing() -> Iterator[None]:
    """Turn an error of DuckDB's into one sentence."""
    try:
        yield
    except duckdb.PermissionException as error:
        raise QueryRefused("a query can neither read nor write files, or load extensions: use --out") from error
    except (duckdb.CatalogException, duckdb.BinderException) as error:
        raise QueryRefused(f"{_sentence(error)}; `bombus sql --tables` describes the tables") from error
    except duckdb.InterruptException as error:
        raise KeyboardInterrupt from error
    except BrokenPipeError:  # the reader of our output is gone
        raise
    except (duckdb.Error, pa.ArrowException, OSError) as error:  # an Arrow reader raises OSError
        raise QueryRefused(_sentence(error)) from error
    except RuntimeError as error:
        if "interrupted" in str(error):  # so DuckDB says that Ctrl-C was pressed
            raise KeyboardInterrupt from error
        raise


def _sentence(error: Exception) -> str:
    return " ".join(str(error).partition("\n\nLINE")[0].split())
