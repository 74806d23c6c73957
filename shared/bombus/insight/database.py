"""The tables of a log in DuckDB, loaded when a query names them. Queries reach no file and no network."""

import os
import re
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any, Self

import duckdb
import msgspec
import pyarrow as pa

from bombus.errors import BombusError
from bombus.hive.records import CallRef
from bombus.insight.rows import read_rows
from bombus.insight.runs import Runs
from bombus.insight.stored import StoredCall, read_samples, read_stored_calls
from bombus.insight.tables import OF_EVENTS, SCHEMAS, TABLES
from bombus.private import private_folder
from bombus.replay.source import Source

MEMORY_MB_MAX = 8192  # what needs more is written to the temporary folder
THREADS_MAX = 4
ROWS_AT_ONCE = 32_768
_WORD = re.compile(r"\w+")
_STORED_CALLS = """
    SELECT c.run, c.episode, place, call, digest, c.outcome = 'complete', coalesce(e.state = 'trained', false),
        CASE WHEN e.fates IS NOT NULL THEN coalesce(e.fates['trained'], 0) END
    FROM calls c LEFT JOIN episodes e USING (episode)
    WHERE $episode IS NULL OR c.episode = $episode
    ORDER BY c.run, c.episode, place
"""


class QueryRefused(BombusError):
    """A query cannot be run. The message says why."""


class LogDatabase:
    """The tables of one log. `load` what a query needs before it is run with `query`. `runs` are those of the log, once
    `metrics` are loaded.

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
        self._loaded: set[str] = set()
        self._batches: dict[str, list[pa.RecordBatch]] = {}  # of tables that are not copied
        self._connection.execute("SET enable_external_access = false")
        self._connection.execute("SET lock_configuration = true")
        for name, schema in SCHEMAS.items():
            if path is None and name in OF_EVENTS:
                self._batches[name] = []
                self._connection.register(name, schema.empty_table())
            else:
                self._connection.register("_rows", schema.empty_table())
                self._connection.execute(f"CREATE TABLE {name} AS FROM _rows")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()
        self._spill.cleanup()

    async def load(self, source: Source, wanted: Collection[str]) -> None:
        """Load those of the wanted tables that are not loaded yet."""
        stored = {"answers", "tokens"} & set(wanted) - self._loaded
        needed = {*wanted} | ({"calls", "episodes"} if stored else set()) | ({"runs"} if "samples" in wanted else set())
        if folded := needed & OF_EVENTS - self._loaded:
            runs = await read_rows(source, folded, self._write)
            self.runs = runs if "metrics" in folded else self.runs
            self._loaded |= folded
            for name in folded & self._batches.keys():
                rows = pa.Table.from_batches(self._batches[name], SCHEMAS[name])
                self._connection.register(name, rows)
        if stored:
            self._loaded |= {"answers", "tokens"}
            await read_stored_calls(source, self.stored_calls(), self._write)
        if "samples" in wanted and "samples" not in self._loaded:
            self._loaded.add("samples")
            for (run,) in self._connection.execute("SELECT run FROM runs WHERE kind = 'job'").fetchall():
                for batch in await read_samples(source, run):
                    self._write("samples", batch)

    def stored_calls(self, episode: str | None = None) -> list[list[StoredCall]]:
        """Return the calls of each episode, or of one, in the order in which they were stored. It needs the tables
        `calls` and `episodes`."""
        rows = self._connection.execute(_STORED_CALLS, {"episode": episode}).fetchall()
        calls = (
            StoredCall(run, episode, CallRef(place, call, digest), learnt, done, trained)
            for run, episode, place, call, digest, learnt, done, trained in rows
        )
        return [[*each] for _, each in groupby(calls, key=lambda call: (call.run, call.episode))]

    def _write(self, name: str, rows: pa.RecordBatch) -> None:
        if name in self._batches:
            self._batches[name].append(rows)
            return
        self._connection.register("_rows", pa.Table.from_batches([rows]))
        self._connection.execute(f"INSERT INTO {name} FROM _rows")

    def tables_in(self, text: str) -> set[str]:
        """Return the tables that a query may read: those whose names it has, unless only as names of its columns."""
        named = SCHEMAS.keys() & set(_WORD.findall(text.lower()))
        if any(TABLES[name].stored for name in named):  # the others are loaded quickly
            with _refusing():
                ((tree,),) = self._connection.execute("SELECT json_serialize_sql($text)", {"text": text}).fetchall()
            parsed = msgspec.json.decode(tree)
            if not parsed["error"]:  # only SELECT can be serialized
                named &= {word for value in _texts(parsed["statements"]) for word in _WORD.findall(value.lower())}
        return named

    def query(self, text: str) -> duckdb.DuckDBPyConnection:
        """Run a query, and return its result, from which rows are fetched. Raises `QueryRefused`."""
        with _refusing():
            return self._connection.execute(text)

    def arrow(self, text: str, parameters: dict[str, Any] | None = None) -> Iterator[pa.RecordBatch]:
        """Run a query, and yield its rows: at least one batch, which may be empty. Raises `QueryRefused`."""
        with _refusing():
            found = self._connection.sql(text, params=parameters)
            if found is not None:
                reader = found.to_arrow_reader(ROWS_AT_ONCE)
                yield pa.RecordBatch.from_pylist([], reader.schema)
                yield from reader


@contextmanager
def _refusing() -> Iterator[None]:
    """Turn an error of DuckDB's into one sentence."""
    try:
        yield
    except duckdb.PermissionException as error:
        raise QueryRefused("a query can neither read nor write files, or load extensions: use --out") from error
    except (duckdb.CatalogException, duckdb.BinderException) as error:
        raise QueryRefused(f"{_sentence(error)}; `bombus sql --tables` describes the tables") from error
    except (duckdb.Error, OSError) as error:  # an Arrow reader raises OSError
        raise QueryRefused(_sentence(error)) from error


def _sentence(error: Exception) -> str:
    return " ".join(str(error).partition("\n\nLINE")[0].split())


def _texts(tree: Any) -> Iterator[str]:
    """Yield the texts in a parsed query, except for names of columns."""
    if isinstance(tree, str):
        yield tree
    elif isinstance(tree, dict):
        for key, part in tree.items():
            if key not in ("alias", "column_names"):
                yield from _texts(part)
    elif isinstance(tree, list):
        for part in tree:
            yield from _texts(part)
