"""`bombus sql`: query the log of a hive as tables."""

import argparse
import csv
import io
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import duckdb
import msgspec
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet

from bombus.insight.database import ROWS_AT_ONCE, LogDatabase, QueryRefused
from bombus.insight.tables import OF_EVENTS, TABLES
from bombus.private import private_folder
from bombus.replay.opening import add_source_arguments
from bombus.replay.running import BadUsage, run_on_source
from bombus.replay.source import Source
from bombus.terminal import complain, escaped, json_escaped, say

DESCRIPTION = """Queries the log of a hive with SQL (DuckDB's): its runs, steps, episodes, calls, exact tokens and
figures. docs/sql.md has queries for common questions. A query reads no files, and cannot change the hive."""
SHOWN = 200  # the most rows of a printed table
WIDTH = 60  # the widest cell of a printed table
SUFFIXES = (".parquet", ".arrow", ".csv")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = DESCRIPTION
    parser.add_argument("query", nargs="?", default="", metavar="SQL", help="the query (default: read from stdin)")
    add_source_arguments(parser)
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print each row as a JSON object")
    form.add_argument("--csv", action="store_true", help="print the rows as CSV")
    form.add_argument("--out", type=Path, metavar="FILE", help=f"write the rows to a file: {', '.join(SUFFIXES)}")
    form.add_argument("--tables", action="store_true", help="describe the tables and their columns")
    parser.add_argument(
        "--database",
        type=Path,
        metavar="FILE",
        help="keep the tables in a new DuckDB file: those of events, and others if the query names them",
    )


def run(arguments: argparse.Namespace) -> int:
    if arguments.tables:
        say(*_described())
        return 0
    return run_on_source("bombus sql", _query, arguments)


def _described() -> Iterator[str]:
    for name, table in TABLES.items():
        yield f"{name}: {table.about}{' (read from stored calls: slower)' if table.stored else ''}"
        for column, kind in table.types().items():
            yield f"  {column:<18} {kind:<8} {table.notes.get(column, '')}".rstrip()


async def _query(source: Source, arguments: argparse.Namespace) -> None:
    if arguments.out is not None and arguments.out.suffix not in SUFFIXES:
        raise BadUsage(f"--out must be a file ending in {', '.join(SUFFIXES)}")
    text = arguments.query or ("" if arguments.database and sys.stdin.isatty() else sys.stdin.read())
    with LogDatabase(arguments.database) as database:
        await database.load(source, database.tables_in(text) | (OF_EVENTS if arguments.database else set()))
        if not text.strip():
            return
        if arguments.out is not None:
            _write_file(arguments.out, text, database)
        else:
            show = _print_json if arguments.json else _print_csv if arguments.csv else _print_table
            show(database.query(text))


def _rows(result: duckdb.DuckDBPyConnection) -> Iterator[tuple[Any, ...]]:
    while rows := result.fetchmany(ROWS_AT_ONCE):
        yield from rows


def _names(result: duckdb.DuckDBPyConnection) -> list[str]:
    return [column[0] for column in result.description or ()]


def _plain(value: object) -> str:
    """Return a cell as text: numbers and text as they are, and anything with parts as JSON."""
    if value is None:
        return ""
    return msgspec.json.encode(value).decode() if isinstance(value, dict | list | tuple | bytes) else str(value)


def _print_json(result: duckdb.DuckDBPyConnection) -> None:
    names = _names(result)
    for row in _rows(result):
        say(json_escaped(msgspec.json.encode(dict(zip(names, row))).decode()))


def _csv_line(cells: Sequence[object]) -> str:
    line = io.StringIO()
    csv.writer(line, lineterminator="").writerow(map(_plain, cells))
    return line.getvalue()


def _print_csv(result: duckdb.DuckDBPyConnection) -> None:
    say(_csv_line(_names(result)))
    for row in _rows(result):
        say(_csv_line(row))


def _print_table(result: duckdb.DuckDBPyConnection) -> None:
    rows = result.fetchmany(SHOWN + 1)
    cells = [_names(result), *([_shown(value) for value in row] for row in rows[:SHOWN])]
    widths = [max(map(len, column)) for column in zip(*cells)]
    right = [all(isinstance(value, int | float | None) for value in column) for column in zip(*rows)]
    right = right or [False] * len(widths)
    for row in cells:
        line = (cell.rjust(width) if number else cell.ljust(width) for cell, width, number in zip(row, widths, right))
        say("  ".join(line).rstrip())
    if len(rows) > SHOWN:
        complain(f"bombus sql: only the first {SHOWN} rows are shown: --csv, --json and --out give all")


def _shown(value: object) -> str:
    text = escaped(f"{value:.6g}" if isinstance(value, float) else _plain(value))
    return text if len(text) <= WIDTH else f"{text[: WIDTH - 1]}…"


def _write_file(path: Path, text: str, database: LogDatabase) -> None:
    """Write the rows of a query in the format of the file's suffix. The file appears only once it is complete."""
    private_folder(path.parent)
    draft = path.with_name(f".{path.name}-{os.getpid()}")
    try:
        if path.suffix == ".csv":
            result = database.query(text)
            with draft.open("w", newline="", encoding="utf-8") as file:
                lines = csv.writer(file)
                lines.writerow(_names(result))
                lines.writerows(map(_plain, row) for row in _rows(result))
        else:
            batches = database.arrow(text)
            first = next(batches, None)
            if first is None:
                raise QueryRefused("the query has no rows that could be written")
            make = pyarrow.parquet.ParquetWriter if path.suffix == ".parquet" else pyarrow.ipc.new_file
            with make(str(draft), first.schema) as writer:
                for batch in batches:
                    writer.write_table(pa.Table.from_batches([batch]))
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
