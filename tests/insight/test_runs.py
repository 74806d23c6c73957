"""Runs in a notebook: frames that agree with the log, plots that Jupyter shows, and the notebook of the examples."""

import asyncio
import shutil
import sys
from copy import deepcopy
from pathlib import Path
from typing import Any

import nbformat
import pandas
import polars
import pytest
from nbclient import NotebookClient

import bombus
from bombus.bus import EmbeddedServer
from bombus.config.streams import StreamLimits
from bombus.hive import events as ev
from bombus.hive.events import AnyEvent
from bombus.hive.fold.evolve import evolve
from bombus.hive.state import Hive
from bombus.insight.charts import NoSuchFigure
from bombus.insight.database import QueryRefused
from bombus.insight.metrics import evaluation_metrics, step_metrics
from bombus.insight.runs import Runs, read_runs
from bombus.replay.archive import FileSource
from bombus.replay.importing import import_log
from bombus.replay.source import NotOnLog
from bombus.runs import HiveLog, LogRun
from tests.insight.record import LOG
from tests.insight.tracked import run_of
from tests.logs.facts import TINY
from tests.patience import PATIENCE_S

NOTEBOOK = LOG.with_name("a_run.ipynb")


@pytest.fixture(scope="module")
def log() -> HiveLog:
    return bombus.runs.open(LOG)


@pytest.fixture
def run(log: HiveLog) -> LogRun:
    return log.runs["main-1"]


def known(row: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name != key and value is not None}


def test_the_frames_of_figures_are_those_of_every_other_view(run: LogRun) -> None:
    with FileSource.open(LOG) as source:
        series = asyncio.run(read_runs(source)).series["main-1"]
    rows = run.metrics().to_dicts()
    assert {row["step"]: known(row, "step") for row in rows} == {row.step: step_metrics(row) for row in series.steps}
    played = {row["version"]: known(row, "version") for row in run.evaluations().to_dicts()}
    assert played == evaluation_metrics(series.evaluated)
    assert list(played) == [5, 10, 15]


def test_an_episode_has_its_calls_its_tokens_and_a_place_in_a_step(run: LogRun) -> None:
    (episode,) = run.episodes().filter(polars.col("episode") == "main-1-3").to_dicts()
    calls = run.calls().filter(polars.col("episode") == "main-1-3")
    tokens = run.tokens("main-1-3")
    assert (episode["task"], episode["reward"], episode["step"], episode["state"]) == ("digit", 0.75, 1, "trained")
    assert tokens["trained"].sum() == calls["completion_tokens"].sum() == episode["completion_tokens"] == 5
    samples = run.samples(1).filter(polars.col("episode") == "main-1-3")
    assert samples["tokens"][0].to_list()[-5:] == tokens["id"].to_list()
    assert samples["logprobs"][0].to_list() == tokens["logprob"].to_list()


def test_what_is_not_there_is_refused_in_words(log: HiveLog, run: LogRun, tmp_path: Path) -> None:
    with pytest.raises(NotOnLog, match="main-1-999"):
        run.tokens("main-1-999")
    with pytest.raises(NotOnLog, match="it has 1 to 16"):
        run.samples(17)
    with pytest.raises(QueryRefused, match="--tables"):
        log.sql("FROM nothing")
    with pytest.raises(NoSuchFigure, match="reward, held_out"):
        run.plot("beauty")
    with pytest.raises(NotOnLog, match="there is no file"):
        bombus.runs.open(tmp_path / "nothing")


def test_queries_have_parameters(log: HiveLog) -> None:
    rows = log.sql("SELECT count(*) AS n FROM events WHERE kind = $kind", kind="batch.ready").to_dicts()
    assert rows == [{"n": 16}]


def test_without_polars_frames_are_those_of_pandas_and_without_both_of_arrow(
    run: LogRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert isinstance(run.metrics(), polars.DataFrame)
    monkeypatch.setitem(sys.modules, "polars", None)
    frame = run.metrics()
    assert isinstance(frame, pandas.DataFrame)
    assert list(frame["step"]) == list(range(1, 17))


async def test_it_works_where_an_event_loop_is_running() -> None:
    assert list(bombus.runs.open(TINY).runs) == ["main-1", "main-2"]


async def test_a_running_hive_and_its_folder_are_opened_like_an_archive(tmp_path: Path, run: LogRun) -> None:
    data = tmp_path / "hive"
    with FileSource.open(LOG) as source:
        await import_log(source, data, StreamLimits(), lambda *_: None)
    stopped = bombus.runs.open(data).runs["main-1"]
    assert stopped.metrics().equals(run.metrics())
    server = EmbeddedServer(data / "nats")
    await asyncio.to_thread(server.start)
    try:
        running = bombus.runs.open(server.url).runs["main-1"]
        assert running.episodes().equals(run.episodes())
        assert running.tokens("main-1-3").equals(run.tokens("main-1-3"))
    finally:
        await asyncio.to_thread(server.stop)


def test_a_run_stands_as_the_whole_log_says_wherever_a_compacted_log_begins() -> None:
    events: list[AnyEvent] = [*run_of(1, []), *run_of(1, [], run=2, ends=False)]
    after_ns = events[-1].at_ns + 1
    events.append(ev.EngineSuspended(engine="main", at_ns=after_ns, run=2, reason="no_replica"))
    events.append(ev.EngineResumed(engine="main", at_ns=after_ns + 1, run=2))
    events.append(ev.EngineFailed(engine="main", at_ns=after_ns + 2, run=2, reason="boot_failed"))
    events += run_of(1, [], run=3)
    whole, hive, found = Runs(Hive()), Hive(), set()
    for seq, event in enumerate(events, 1):
        whole.note(seq, event)
        evolve(hive, event)
        for name, row in Runs(deepcopy(hive)).rows.items():
            assert known(row, "") == known(whole.rows[name], ""), event
            found.add(row["state"])
    assert found == {"running", "stopped", "suspended", "failed"}


def test_a_plot_is_a_chart_for_jupyter_with_a_picture_for_others(run: LogRun) -> None:
    bundle = run.plot("reward")._repr_mimebundle_()
    drawn = bundle["application/vnd.vegalite.v6+json"]
    assert [point["y"] for point in drawn["data"]["values"] if point["figure"] == "reward/mean"] == [
        row["reward/mean"] for row in run.metrics().to_dicts()
    ]
    assert bundle["image/svg+xml"].startswith("<svg")
    one = run.plot("reward/success_rate", "tokens").spec
    assert {point["figure"] for point in one["data"]["values"]} == {"reward/success_rate"}
    assert len(run.plot("held_out/mean").spec["data"]["values"]) == 3


def test_runs_of_several_logs_are_compared_by_colour(run: LogRun) -> None:
    others = bombus.runs.open(TINY).runs
    drawn = bombus.runs.compare("loss", run, *others.values()).spec
    names = {point["run"] for point in drawn["data"]["values"]}
    assert names == {f"{LOG}: main-1", f"{TINY}: main-1", "main-2"}


def test_a_diagnosis_reads_as_the_command_prints_it(run: LogRun) -> None:
    found = run.diagnose()
    assert [finding.kind for finding in found.findings] == ["evaluated_on_trained", "too_easy"]
    assert "try: evaluate on tasks that are held out" in repr(found)


# ---- the notebook -------------------------------------------------------------------------------------------------


def read_notebook() -> nbformat.NotebookNode:
    found: nbformat.NotebookNode = nbformat.read(NOTEBOOK, as_version=4)  # type: ignore[no-untyped-call]
    return found


def texts(notebook: nbformat.NotebookNode) -> list[str]:
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return [output.data["text/plain"] for cell in cells for output in cell.outputs]


async def test_the_notebook_shows_what_it_is_stored_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("JUPYTER_RUNTIME_DIR", "JUPYTER_DATA_DIR", "JUPYTER_CONFIG_DIR", "IPYTHONDIR"):
        monkeypatch.setenv(name, str(tmp_path))
    shutil.copy(LOG, tmp_path)
    stored, played = read_notebook(), read_notebook()
    kernel = NotebookClient(played, timeout=PATIENCE_S, resources={"metadata": {"path": str(tmp_path)}})
    await kernel.async_execute()
    assert texts(played) == texts(stored)
    assert len(texts(stored)) == len([cell for cell in stored.cells if cell.cell_type == "code"]) >= 7
    plot = next(output.data for cell in stored.cells for output in cell.get("outputs", ()) if "svg" in str(output.data))
    assert {"image/svg+xml", "application/vnd.vegalite.v6+json"} <= plot.keys()
    assert NOTEBOOK.stat().st_size < 100_000
