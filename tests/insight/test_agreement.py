"""The page, the report, `bombus sql`, a tracker and a notebook show the same numbers of a run, and the log's."""

import asyncio
import json
from pathlib import Path

import pytest

import bombus.runs
from bombus.cli import main
from bombus.insight.charts import CHARTS, shows
from bombus.insight.metrics import evaluation_metrics, step_metrics
from bombus.insight.runs import read_runs
from bombus.replay.archive import FileSource
from bombus.replay.diagnosis.steps import RunSeries
from tests.insight.test_report import Page, with_heads
from tests.insight.test_web_pages import pages
from tests.logs.facts import TINY

Figures = dict[tuple[int, str], float]  # by step or, for evaluations, by version
RUN = "main-1"


@pytest.fixture(scope="module")
def of_the_log() -> tuple[Figures, Figures]:
    """The figures of steps, and those of evaluations by version."""

    async def read() -> RunSeries:
        with FileSource.open(TINY) as source:
            return (await read_runs(source)).newest(RUN, source.title)

    series = asyncio.run(read())
    steps = {(row.step, name): value for row in series.steps for name, value in step_metrics(row).items()}
    evaluated = evaluation_metrics(series.evaluated)
    assert len(steps) > 50
    return steps, {(version, name): value for version, found in evaluated.items() for name, value in found.items()}


def drawn(figures: Figures, by_version: bool) -> Figures:
    """Return those of the figures that some chart shows."""
    charts = [chart for chart in CHARTS if chart.by_version == by_version]
    return {key: value for key, value in figures.items() if any(shows(chart, key[1]) for chart in charts)}


async def test_the_page_draws_the_figures_of_the_log(of_the_log: tuple[Figures, Figures]) -> None:
    (answer,) = await pages(TINY, f"/runs/points.json?run={RUN}")
    found = json.loads(answer.text)["points"]
    for by_version, figures in zip((False, True), of_the_log, strict=True):
        points = [point for chart in CHARTS if chart.by_version == by_version for point in found[chart.key]]
        assert {(point["x"], point["figure"]): point["y"] for point in points} == drawn(figures, by_version)


def test_the_report_prints_the_figures_of_the_log(tmp_path: Path, of_the_log: tuple[Figures, Figures]) -> None:
    assert main(["report", RUN, "--log", str(TINY), "--out", str(tmp_path / "r.html")]) == 0
    printed: dict[tuple[int, str], str] = {}
    for head, row in with_heads(Page((tmp_path / "r.html").read_text()).rows):
        if head and len(head) == len(row):
            printed |= {(int(row[0]), name): cell for name, cell in zip(head[1:], row[1:], strict=True) if cell}
    expected = drawn(of_the_log[0], False) | drawn(of_the_log[1], True)
    assert {key: printed.get(key) for key in expected} == {key: f"{value:.6g}" for key, value in expected.items()}


def test_sql_and_frames_have_the_figures_of_the_log(
    capsys: pytest.CaptureFixture[str], of_the_log: tuple[Figures, Figures]
) -> None:
    query = f"SELECT step, name, value FROM metrics WHERE run = '{RUN}' AND name NOT LIKE 'held_out/%'"
    assert main(["sql", query, "--json", "--log", str(TINY)]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {(row["step"], row["name"]): row["value"] for row in rows} == of_the_log[0]
    frame = bombus.runs.open(TINY).runs[RUN].metrics()
    framed_rows = frame.to_dicts() if hasattr(frame, "to_dicts") else frame.to_dict("records")
    names = {name for _, name in of_the_log[0]}
    framed = {(row["step"], name): row[name] for row in framed_rows for name in names if row.get(name) is not None}
    assert framed == of_the_log[0]


def test_a_tracker_gets_the_figures_of_the_log(tmp_path: Path, of_the_log: tuple[Figures, Figures]) -> None:
    assert main(["track", RUN, "--to", "jsonl", "--log", str(TINY), "--folder", str(tmp_path)]) == 0
    (written,) = tmp_path.glob("*/steps.jsonl")
    rows = [json.loads(line) for line in written.read_text().splitlines()]
    found = {(row["step"], name): value for row in rows for name, value in row.items() if "/" in name}
    assert {key: value for key, value in found.items() if not key[1].startswith("held_out/")} == of_the_log[0]
