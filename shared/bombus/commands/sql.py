"""`bombus sql`: query the log of a hive as tables."""

import argparse
import asyncio
import csv
import io
import os
import shutil
import sqlite3
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import redirect_stdout
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import duckdb
import msgspec
import pyarrow.ipc
import pyarrow.parquet

from bombus.insight.database import LogDatabase, QueryRefused, refusing
from bombus.insight.tables import OF_EVENTS, TABLES
from bombus.private import private_folder
from bombus.replay.opening import add_source_arguments, open_source
from bombus.replay.running import BadUsage, reported
from bombus.terminal import complain, json_escaped, say

DESCRIPTION = """Queries the log of a hive with SQL (DuckDB's): its runs, steps, episodes, calls, exact tokens and
figures. docs/sql.md has queries for common questions. A query reads no files, and cannot change the hive."""
SHOWN = 200  # the most rows of a printed table
WIDTH = 60  # the widest cell of a printed table
ROWS_AT_ONCE = 32_768
PARTS = (dict, list, tuple, bytes)
SUFFIXES = (".parquet", ".arrow")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = DESCRIPTION
    parser.add_argument(
        "query", nargs="?", default="", metavar="SQL", help="the query (default: typed, or read from stdin)"
    )
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
    return reported("bombus sql", lambda: _query(arguments))


def _described() -> Iterator[str]:
    for name, table in TABLES.items():
        yield f"{name}: {table.about}{' (read from stored calls: slower)' if table.is_stored else ''}"
        for column, (kind, note) in table.columns.items():
            yield f"  {column:<18} {kind:<8} {note}".rstrip()


def _query(arguments: argparse.Namespace) -> None:
    if arguments.out is not None and arguments.out.suffix not in SUFFIXES:
        raise BadUsage(f"--out must be a file ending in {', '.join(SUFFIXES)}")
    is_typed = not arguments.query and sys.stdin.isatty()
    with LogDatabase(arguments.database) as database:
        if is_typed and arguments.database is None:
            _prompt(database, arguments)
        else:
            _answer(database, arguments, arguments.query or ("" if is_typed else sys.stdin.read()))


def _prompt(database: LogDatabase, arguments: argparse.Namespace) -> None:
    """Answer queries that are typed, until Ctrl-D."""
    import readline  # noqa: F401 - `input` edits lines with it, and keeps a history

    _load(database, arguments, {"runs"})  # which says at once if there is no log
    say("A query ends with a semicolon. `.tables` describes the tables, and Ctrl-D ends.")
    while True:
        try:
            text = input("sql> ")
            while text.strip() and text.strip() != ".tables" and not sqlite3.complete_statement(text):
                text += "\n" + input("...> ")
            if text.strip() == ".tables":
                say(*_described())
            elif text.strip():
                reported("bombus sql", partial(_answer, database, arguments, text))
        except UnicodeError:
            complain("bombus sql: what was typed is not UTF-8")
        except KeyboardInterrupt:
            say("")
        except EOFError:
            say("")
            return


def _load(database: LogDatabase, arguments: argparse.Namespace, wanted: set[str]) -> None:
    async def load() -> None:
        async with open_source(arguments) as source:
            await database.load(source, wanted)

    if wanted - database.loaded:
        with refusing():  # such as in a transaction that has failed
            asyncio.run(load())


def _answer(database: LogDatabase, arguments: argparse.Namespace, text: str) -> None:
    """Load what a query needs, and print or write its rows."""
    _load(database, arguments, database.tables_in(text) | (OF_EVENTS if arguments.database else set()))
    if not text.strip():
        return
    with refusing(), database.interruptible():
        if arguments.out is not None:
            _write_file(arguments.out, text, database)
        elif arguments.json:
            _print_json(database.query(text))
        elif arguments.csv:
            _print_csv(database.query(text))
        else:
            _print_table(database.relation(text))


def _rows(result: duckdb.DuckDBPyConnection) -> Iterator[tuple[Any, ...]]:
    while rows := result.fetchmany(ROWS_AT_ONCE):
        yield from rows


def _names(result: duckdb.DuckDBPyConnection) -> list[str]:
    return [column[0] for column in result.description or ()]


def _print_json(result: duckdb.DuckDBPyConnection) -> None:
    names = _names(result)
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise QueryRefused(f"several columns are called {twice[0]}: name them with AS, or use --csv")
    for row in _rows(result):
        say(json_escaped(msgspec.json.encode(dict(zip(names, row))).decode()))


def _print_table(found: duckdb.DuckDBPyRelation) -> None:
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 1 << 20
    with redirect_stdout(io.StringIO()) as shown:
        found.show(max_width=width, max_rows=SHOWN, max_col_width=WIDTH)
    say(*shown.getvalue().rstrip("\n").split("\n"))


def _print_csv(result: duckdb.DuckDBPyConnection) -> None:
    """Print rows as lines of CSV: anything with parts as JSON."""
    file = io.StringIO()
    lines = csv.writer(file, lineterminator="")
    for row in chain([_names(result)], _rows(result)):
        lines.writerow(msgspec.json.encode(each).decode() if isinstance(each, PARTS) else each for each in row)
        say(file.getvalue())
        file.seek(file.truncate(0))


def _write_file(path: Path, text: str, database: LogDatabase) -> None:
    """Write the rows of a query in the format of the file's suffix. The file appears only once it is complete."""
    private_folder(path.parent)
    draft = path.with_name(f".{path.name}-{os.getpid()}")
    try:
        rows = database.relation(text).to_arrow_reader(ROWS_AT_ONCE)
        make = pyarrow.parquet.ParquetWriter if path.suffix == ".parquet" else pyarrow.ipc.new_file
        with make(str(draft), rows.schema) as writer:
            for batch in rows:
                writer.write_batch(batch)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
