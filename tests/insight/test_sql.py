"""`bombus sql`: the tables agree with what else is known of a log, and queries reach nothing but these tables."""

import asyncio
import csv
import io
import json
import os
import pty
import re
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from math import isclose
from pathlib import Path

import duckdb
import msgspec
import psutil
import pyarrow.ipc
import pyarrow.parquet
import pytest

from bombus.cli import main
from bombus.commands.audit import audited
from bombus.hive.events import EpisodeClaimed
from bombus.hive.state import Hive
from bombus.insight.database import LogDatabase, QueryRefused, refusing
from bombus.insight.metrics import evaluation_metrics, step_metrics
from bombus.insight.rows import LogRows
from bombus.insight.runs import read_runs
from bombus.insight.tables import OF_EVENTS, TABLES
from bombus.replay.archive import FileSource
from bombus.replay.audit.audit import Audit
from bombus.replay.source import Logged, state_at
from tests.insight.record import LOG as LETTERS
from tests.logs.facts import TINY
from tests.overwatch.story import chaos
from tests.patience import PATIENCE_S, wait_until

STARTED_S = 4.0  # of CPU, by which a query has begun
Capture = pytest.CaptureFixture[str]


@pytest.fixture(params=[TINY, LETTERS], ids=lambda path: path.stem)
def source(request: pytest.FixtureRequest) -> Iterator[FileSource]:
    with FileSource.open(request.param) as opened:
        yield opened


@pytest.fixture
def database(source: FileSource) -> Iterator[LogDatabase]:
    with LogDatabase() as opened:
        asyncio.run(opened.load(source, TABLES))
        yield opened


def test_only_the_tables_of_the_log_are_listed(database: LogDatabase) -> None:
    assert {name for (name,) in database.query("SHOW TABLES").fetchall()} == TABLES.keys()


def sql(capsys: Capture, *words: str, log: Path = LETTERS) -> list[str]:
    assert main(["sql", "--log", str(log), *words]) == 0
    return capsys.readouterr().out.splitlines()


def refused(capsys: Capture, query: str) -> str:
    assert main(["sql", "--log", str(TINY), query]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    return line


# ---- agreement ----------------------------------------------------------------------------------------------------


def test_every_figure_is_that_of_the_page_and_of_trackers(source: FileSource, database: LogDatabase) -> None:
    expected: dict[tuple[str, int, str], float] = {}
    for series in asyncio.run(read_runs(source)).series.values():
        found = [(row.step, step_metrics(row)) for row in series.steps]
        found += evaluation_metrics(series.evaluated).items()
        expected |= {(series.name, step, name): value for step, row in found for name, value in row.items()}
    rows = database.query("FROM metrics").fetchall()
    assert {(run, step, name): value for run, step, name, value in rows} == expected
    assert len(rows) == len(expected) > 100


def test_the_tokens_are_those_that_an_audit_accounts_for(source: FileSource, database: LogDatabase) -> None:
    report = asyncio.run(audited(source))
    assert not report.differences
    for query in (
        "SELECT sum(completion_tokens) FROM calls",
        "SELECT count(*) FROM tokens",
        "SELECT sum(tokens) FROM answers",
    ):
        assert database.query(query).fetchone() == (report.sampled,), query
    by_step = database.query("SELECT run, step, coalesce(fates['trained'], 0) FROM steps").fetchall()
    assert {(f"{each.engine}-{each.run}", each.step, each.tokens) for each in report.steps} == set(by_step)
    if LETTERS.samefile(source.title):  # earlier versions did not report what steps did with tokens
        fates = "(SELECT unnest(map_entries(fates)) AS fate FROM episodes)"
        found = dict(database.query(f"SELECT fate.key, sum(fate.value)::INT FROM {fates} GROUP BY ALL").fetchall())
        assert found == {fate: count for fate, count in report.tokens.items() if fate.startswith(("trained", "masked"))}
        trained = database.query("SELECT count(*) FROM tokens WHERE trained").fetchone()
        assert trained == (report.tokens["trained"],)
        assert database.query("SELECT count(*) FROM tokens WHERE trained IS NULL").fetchone() == (0,)


def test_samples_have_each_sampled_token_of_their_episodes_once(database: LogDatabase) -> None:
    query = "SELECT episode, sum(list_sum(loss_mask))::INT FROM samples GROUP BY episode"
    expected = "SELECT episode, completion_tokens FROM episodes WHERE state = 'trained'"
    found = dict(database.query(query).fetchall())
    assert found == dict(database.query(expected).fetchall())
    assert found


def test_each_event_is_there_as_json(source: FileSource, database: LogDatabase) -> None:
    async def events() -> list[tuple[int, str]]:
        return [(entry.seq, msgspec.json.encode(entry.event).decode()) async for entry in source.events()]

    assert database.query("SELECT seq, json FROM events ORDER BY seq").fetchall() == asyncio.run(events())


def test_the_columns_are_those_that_are_described(database: LogDatabase) -> None:
    for name, table in TABLES.items():
        found = database.relation(f"FROM {name} LIMIT 0").to_arrow_table().schema
        assert found.equals(table.schema), name


def test_the_recorded_episodes_have_ended_as_they_did(database: LogDatabase, source: FileSource) -> None:
    found = dict(database.query("SELECT state, count(*) FROM episodes GROUP BY state").fetchall())
    if TINY.samefile(source.title):
        assert found == {"trained": 12, "dropped": 2, "aborted": 3, "ended": 2}
        first = "SELECT task, reason, reward, calls, seconds > 0 FROM episodes WHERE episode = 'main-1-1'"
        assert database.query(first).fetchone() == ("equal", "no_signal", 0.5, 1, True)
        runs = database.query("SELECT run, state, kind, model FROM runs ORDER BY run").fetchall()
        assert runs == [("main-1", "stopped", "job", "tiny"), ("main-2", "running", "job", "tiny")]
        groups = "SELECT task, episodes, reward, has_signal FROM groups WHERE run = 'main-1' AND step = 2 ORDER BY 1"
        assert database.query(groups).fetchall() == [("a", 2, 0.5, True), ("tree", 2, 0.25, True)]


@pytest.mark.parametrize("seed", range(20))
def test_every_kind_of_event_of_any_hive_can_be_loaded(seed: int) -> None:
    found: dict[str, list[pyarrow.RecordBatch]] = defaultdict(list)
    rows = LogRows(Hive(), OF_EVENTS, lambda name, rows: found[name].append(TABLES[name].batch(rows)))
    audit = Audit()
    events = chaos(seed)
    for seq, event in enumerate(events, 1):
        rows.note(seq, event)  # type: ignore[arg-type]
        audit.read(event, seq)
    rows.finish()
    tables = {name: pyarrow.Table.from_batches(batches) for name, batches in found.items()}
    assert tables["events"].num_rows == len(events)
    claimed = [name for event in events if isinstance(event, EpisodeClaimed) for name in event.episodes]
    assert {*claimed} <= {*tables["episodes"]["episode"].to_pylist()}
    assert sum(tables["calls"]["completion_tokens"].to_pylist()) == audit.report().sampled


def test_a_compacted_log_has_what_it_still_knows() -> None:
    async def read() -> tuple[Hive, list[Logged]]:
        with FileSource.open(TINY) as source:
            return await state_at(source, 45), [entry async for entry in source.events(45)]

    hive, events = asyncio.run(read())
    found: dict[str, list[pyarrow.RecordBatch]] = defaultdict(list)
    rows = LogRows(hive, OF_EVENTS, lambda name, rows: found[name].append(TABLES[name].batch(rows)))
    for entry in events:
        rows.note(entry.seq, entry.event)
    rows.finish()
    tables = {name: pyarrow.Table.from_batches(batches) for name, batches in found.items()}
    assert tables["runs"]["run"].to_pylist() == ["main-1", "main-2"]
    assert tables["runs"]["model"].to_pylist() == ["tiny", "tiny"]
    episodes = {row["episode"]: row for row in tables["episodes"].to_pylist()}
    assert episodes["main-1-12"]["claimed"] is None
    assert episodes["main-1-12"]["state"] == "trained"
    assert tables["steps"]["step"].to_pylist() == [2, 1]


def test_calls_that_are_gone_are_left_out_with_a_warning(capsys: Capture) -> None:
    class Purged(FileSource):
        async def messages(self, stream: str, seqs: Sequence[int]) -> list[bytes | None]:
            return [None if seq <= 5 else body for seq, body in zip(seqs, await super().messages(stream, seqs))]

    with Purged.open(LETTERS) as source, LogDatabase() as database:
        asyncio.run(database.load(source, {"tokens"}))
        query = "SELECT count(DISTINCT call), count(*) FILTER (trained IS NULL) FROM tokens"
        assert database.query(query).fetchone() == (275, 0)
    assert "5 calls can no longer be read" in capsys.readouterr().err


# ---- what is loaded, and what a query may do ----------------------------------------------------------------------


def test_stored_calls_are_read_only_for_a_query_that_names_their_tables() -> None:
    with LogDatabase() as empty:
        assert empty.tables_in("SELECT completion_tokens FROM Calls") == {"calls"}
        named = "SELECT run, sum(completion_tokens) AS tokens, count(*) AS samples FROM calls GROUP BY ALL"
        assert empty.tables_in(named) == {"calls"}
        joined = 'FROM "Tokens" JOIN main.episodes USING (episode) WHERE episode = $1 ORDER BY id'
        assert empty.tables_in(joined) == {"tokens", "episodes"}
        for query in ("CREATE VIEW v AS FROM tokens; FROM v", "PIVOT tokens ON run", "FROM query('FROM tokens')"):
            assert empty.tables_in(query) == {"tokens"}
    reads: list[int] = []

    class Counting(FileSource):
        async def messages(self, stream: str, seqs: Sequence[int]) -> list[bytes | None]:
            reads.append(1)
            return await super().messages(stream, seqs)

    with Counting.open(TINY) as source, LogDatabase() as database:
        asyncio.run(database.load(source, OF_EVENTS))
        assert not reads
        asyncio.run(database.load(source, {"tokens"}))
        assert reads
        count = len(reads)
        asyncio.run(database.load(source, {"tokens", "answers", "calls"}))
        assert len(reads) == count, "they are there"


@pytest.mark.parametrize(
    "query",
    [
        "FROM read_csv('/etc/passwd')",
        "FROM '/etc/passwd'",
        "COPY runs TO 'stolen.csv'",
        "ATTACH 'other.db'",
        "INSTALL httpfs",
        "SET enable_external_access = true",
        "SET memory_limit = '1TB'",
        "EXPORT DATABASE 'stolen'",
    ],
)
def test_a_query_reaches_no_file_and_no_network_and_changes_no_limit(
    query: str, capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert refused(capsys, query).startswith("bombus sql: ")
    assert not [*tmp_path.iterdir()]


def test_a_query_that_is_wrong_is_refused_in_one_sentence(capsys: Capture) -> None:
    assert "syntax error" in refused(capsys, "SELEC 1")
    assert '"rewards" not found' in refused(capsys, "SELECT rewards FROM episodes")
    assert "--tables" in refused(capsys, "FROM nothing")
    for form in ((), ("--json",), ("--csv",)):
        assert main(["sql", "--log", str(TINY), "-- nothing", *form]) == 1
        assert capsys.readouterr().err == "bombus sql: the query is empty\n"


# ---- what is printed and written ----------------------------------------------------------------------------------


def test_the_same_rows_are_printed_and_written_in_every_form(capsys: Capture, tmp_path: Path) -> None:
    query = "SELECT episode, reward, claimed, reported FROM episodes WHERE reward IS NOT NULL ORDER BY episode LIMIT 5"
    rows = [json.loads(line) for line in sql(capsys, query, "--json")]
    assert len(rows) == 5
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in sql(capsys, query) if line.startswith("│")]
    assert cells[0] == ["episode", "reward", "claimed", "reported"]
    assert [each[0] for each in cells[2:]] == [row["episode"] for row in rows]
    lines = [*csv.DictReader(io.StringIO("\n".join(sql(capsys, query, "--csv"))))]
    assert [json.loads(line["reported"]) for line in lines] == [row["reported"] for row in rows]
    for name in ("rows.parquet", "rows.arrow"):
        sql(capsys, query, "--out", str(tmp_path / name))
    parquet = pyarrow.parquet.read_table(tmp_path / "rows.parquet")
    assert parquet.column("reward").to_pylist() == [row["reward"] for row in rows]
    with pyarrow.ipc.open_file(tmp_path / "rows.arrow") as file:
        assert file.read_all() == parquet
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rows.arrow", "rows.parquet"]


def test_a_file_that_cannot_hold_a_type_is_refused_in_one_sentence(capsys: Capture, tmp_path: Path) -> None:
    query = "SELECT ended - claimed AS time FROM episodes"
    assert main(["sql", "--log", str(TINY), query, "--out", str(tmp_path / "rows.parquet")]) == 1
    assert capsys.readouterr().err.startswith("bombus sql: Unhandled type")
    assert not [*tmp_path.iterdir()]


def test_a_query_is_read_from_stdin(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("SELECT count(*) AS n FROM runs"))
    assert sql(capsys, "--csv", log=TINY) == ["n", "2"]


def test_a_long_table_is_cut_and_says_so(capsys: Capture) -> None:
    shown = sql(capsys, "SELECT position FROM tokens, range(2)", log=TINY)
    assert len(shown) < 215
    assert "400 rows" in shown[-2]
    assert "200 shown" in shown[-1]


def test_no_cell_can_control_the_terminal(capsys: Capture) -> None:
    query = "SELECT 'a' || chr(27) || '[2J' || chr(10) || chr(155) || chr(8238) AS text"
    for form in ((), ("--csv",), ("--json",)):
        assert all(line.isprintable() for line in sql(capsys, query, *form, log=TINY)), form


def test_columns_of_one_name_lose_no_cells(capsys: Capture) -> None:
    query = "SELECT 1 AS a, 2 AS a"
    assert main(["sql", "--log", str(TINY), query, "--json"]) == 1
    assert "several columns are called a" in capsys.readouterr().err
    assert sql(capsys, query, "--csv", log=TINY) == ["a,a", "1,2"]


def test_a_terminal_gets_a_prompt_that_goes_on_after_a_mistake(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bombus", "sql", "--log", str(TINY)]
    leader, follower = pty.openpty()
    with subprocess.Popen(command, stdin=follower, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        for line in (
            b"SELEC;",
            b"\xff;",
            b".tables",
            b"SELECT 'it is ' ||",
            b"  count(*) AS n",
            b"FROM runs;",
            b"\x04",
        ):
            os.write(leader, line if line == b"\x04" else line + b"\n")
        shown, _ = process.communicate(timeout=PATIENCE_S)
    os.close(leader)
    os.close(follower)
    assert process.returncode == 0
    text = shown.decode()
    for part in ("bombus sql: Parser Error", "is not UTF-8", "events: every event of the log", "it is 2"):
        assert part in text


def test_a_query_that_ctrl_c_interrupted_ends_as_what_is_typed_does() -> None:
    with pytest.raises(KeyboardInterrupt), refusing():
        raise RuntimeError("Query interrupted")  # as DuckDB does


def test_ctrl_c_ends_a_query_of_one_long_task() -> None:
    query = "SELECT sum(a.range * b.range) FROM range(10000000) a, range(100000) b"
    command = [sys.executable, "-m", "bombus", "sql", "--log", str(TINY), query]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        try:
            wait_until(lambda: psutil.Process(process.pid).cpu_times().user > STARTED_S)
            process.send_signal(signal.SIGINT)
            assert process.wait(PATIENCE_S) == 130
        finally:
            process.kill()


def test_a_load_is_no_part_of_a_transaction() -> None:
    with FileSource.open(TINY) as source, LogDatabase() as database:
        database.query("BEGIN")
        asyncio.run(database.load(source, {"metrics", "answers"}))
        with pytest.raises(QueryRefused, match="no transaction is active"):
            database.query("ROLLBACK")
        for table in ("metrics", "answers"):
            assert database.query(f"SELECT count(*) > 0 FROM {table}").fetchone() == (True,), table


def test_a_database_is_kept_for_other_tools_and_never_written_over(capsys: Capture, tmp_path: Path) -> None:
    kept = tmp_path / "log.duckdb"
    sql(capsys, "SELECT count(*) FROM tokens", "--database", str(kept))
    with duckdb.connect(str(kept), read_only=True) as connection:
        for name in TABLES.keys() - {"samples"}:
            assert connection.execute(f"FROM {name} LIMIT 1").fetchall(), name
    assert main(["sql", "--log", str(TINY), "--database", str(kept), "SELECT 1"]) == 1
    assert "exists already" in capsys.readouterr().err
    for _ in range(2):
        new = tmp_path / "new.duckdb"
        assert main(["sql", "--log", str(tmp_path / "none"), "--database", str(new), "SELECT 1"]) == 1
        assert "there is no file" in capsys.readouterr().err


def test_the_tables_are_described(capsys: Capture) -> None:
    assert main(["sql", "--tables"]) == 0
    described = capsys.readouterr().out.splitlines()
    for name, table in TABLES.items():
        start = described.index(next(line for line in described if line.startswith(f"{name}: ")))
        for line, column in zip(described[start + 1 :], table.columns.items(), strict=False):
            assert line.split()[:2] == [column[0], column[1][0]]


# ---- docs/sql.md --------------------------------------------------------------------------------------------------

PAGE = (Path(__file__).parents[2] / "docs" / "sql.md").read_text()
QUESTIONS = dict(re.findall(r"^\*\*(.*?)\*\*.*?^```sql\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE))
FIRST = {
    "Which tasks never succeed?": {"task": "capitals", "data_set": "letters", "episodes": 70, "best": 0.0},
    "What is the reward by data set and policy version?": {
        "data_set": "digits", "version": 5, "type": "eval", "episodes": 6, "reward": pytest.approx(0.96633, abs=1e-5)
    },
    "Which episodes were the slowest, and why?": {"task": "digit", "calls": 1, "completion_tokens": 5},
    "Which share of the tokens in batches was masked, and by which rule?": {
        "fate": "masked: group without signal", "tokens": 1034, "share": 1034 / 1670
    },
    "What became of the calls?": {"outcome": "complete", "calls": 280, "tokens": 1832, "merged_share": 0.0},
    "Do sampler and trainer drift apart?": {"run": "main-1", "step": 1, "before": None},
    "Which clients play how many episodes, and what fails there?": {
        "episodes": 69, "aborted": 5, "usual_failure": "environment"
    },
    "Which truncated answers are the longest?": {"task": "long", "tokens": 12, "cut_by": "turn"},
}  # fmt: skip


@pytest.mark.parametrize("question", QUESTIONS)
def test_each_query_of_the_page_answers_its_question(question: str, capsys: Capture) -> None:
    rows = [json.loads(line) for line in sql(capsys, QUESTIONS[question], "--json")]
    assert rows
    assert {name: rows[0][name] for name in FIRST[question]} == FIRST[question]


def test_the_parts_of_a_slow_episode_are_its_time(capsys: Capture) -> None:
    for line in sql(capsys, QUESTIONS["Which episodes were the slowest, and why?"], "--json"):
        row = json.loads(line)
        assert isclose(row["waiting_s"] + row["sampling_s"] + row["outside_s"], row["seconds"], rel_tol=1e-6)


def test_the_page_has_eight_questions_and_every_table() -> None:
    assert set(FIRST) == set(QUESTIONS)
    assert len(QUESTIONS) == 8
    assert set(re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE)) == TABLES.keys()
