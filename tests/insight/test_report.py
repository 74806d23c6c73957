"""`bombus report` and `bombus plot`: their files say what the log says, and nothing in them runs."""

import asyncio
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest
import yaml

from bombus.cli import main
from bombus.config.job import RunConfig
from bombus.insight.charts import CHARTS, points
from bombus.insight.report import BROWSERS, page
from bombus.insight.runs import read_runs
from bombus.replay.archive import FileSource
from bombus.replay.diagnosis.steps import RunSeries
from bombus.replay.logged_run import LoggedRun, read_run
from tests.logs.facts import TINY

HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>"


class Page(HTMLParser):
    """The tags of a page with their attributes, and the cells of its tables by row."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.rows: list[list[str]] = []
        self._in_cell = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
            self._in_cell = True

    def handle_endtag(self, tag: str) -> None:
        self._in_cell = self._in_cell and tag not in ("td", "th")

    def handle_data(self, data: str) -> None:
        if self._in_cell:
            self.rows[-1][-1] += data


def recorded() -> tuple[RunSeries, LoggedRun]:
    async def read() -> tuple[RunSeries, LoggedRun]:
        with FileSource.open(TINY) as source:
            series = (await read_runs(source)).newest("main-1", source.title)
            return series, await read_run(source, series.engine, series.run)

    return asyncio.run(read())


def test_a_report_has_each_point_of_each_chart_and_the_ancestry_of_the_weights(tmp_path: Path) -> None:
    out = tmp_path / "r.html"
    assert main(["report", "main-1", "--log", str(TINY), "--out", str(out)]) == 0
    series, logged = recorded()
    found = Page(out.read_text())
    shown = {(row[0], name, cell) for head, row in with_heads(found.rows) for name, cell in zip(head, row, strict=True)}
    for chart in CHARTS:
        for point in points(chart, series):
            assert (f"{point['x']:g}", point["figure"], f"{point['y']:.6g}") in shown, chart.key
    assert {ready.weights.sha256 for ready in logged.versions.values()} <= {cell for row in found.rows for cell in row}
    assert yaml.safe_dump(series.job.to_yaml_mapping()).splitlines()[1].strip() in out.read_text()


def with_heads(rows: list[list[str]]) -> list[tuple[list[str], list[str]]]:
    """Pair each row of figures with the head of its table."""
    head: list[str] = []
    found = []
    for row in rows:
        if row[0] in ("step", "version"):
            head = row
        else:
            found.append((head, row))
    return found


def test_a_report_runs_nothing_and_fetches_nothing_whatever_names_are_on_the_log() -> None:
    series, logged = recorded()
    row = series.steps[0]
    row.data_sets = {HOSTILE: row.rewards}
    row.metrics = {HOSTILE: row.rewards}
    logged.job = RunConfig.model_validate({"model": {"path": HOSTILE}})
    text = page(series, logged, HOSTILE, 9)
    found = Page(text)
    assert "&lt;script&gt;alert(1)" in text
    assert not {tag for tag, _ in found.tags} & {"script", "img", "iframe", "object", "link", "base", "form"}
    attributes = {(name, value) for _, given in found.tags for name, value in given.items()}
    assert not [name for name, _ in attributes if name.startswith("on")]
    assert not [value for name, value in attributes if name in ("src", "href", "xlink:href")]
    assert ("content", "default-src 'none'; style-src 'unsafe-inline'") in attributes


def test_a_run_without_a_step_has_a_report_too() -> None:
    series, logged = recorded()
    series.steps.clear()
    assert "No step was completed" in page(series, msgspec.structs.replace(logged, steps={}, checkpoints={}), "log", 3)


@pytest.mark.skipif(not any(map(shutil.which, BROWSERS)), reason="there is no Chromium on this machine")
def test_a_report_is_printed(tmp_path: Path) -> None:
    out, pdf = tmp_path / "r.html", tmp_path / "r.pdf"
    assert main(["report", "main-1", "--log", str(TINY), "--out", str(out), "--pdf", str(pdf)]) == 0
    assert pdf.read_bytes().startswith(b"%PDF-")


def test_a_pdf_without_a_browser_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    out = tmp_path / "r.html"
    assert main(["report", "main-1", "--log", str(TINY), "--out", str(out), "--pdf", str(tmp_path / "r.pdf")]) == 1
    assert "--pdf needs one of chromium" in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize(("name", "begins"), [("a.png", b"\x89PNG"), ("a.svg", b"<svg"), ("a.pdf", b"%PDF-")])
def test_a_chart_of_two_runs_is_drawn(tmp_path: Path, name: str, begins: bytes) -> None:
    out = tmp_path / name
    words = ["plot", "reward", "main-1", "main-2", "--axis", "tokens", "--log", str(TINY), "--out", str(out)]
    assert main(words) == 0
    assert out.read_bytes().startswith(begins)
    if name == "a.svg":
        assert set(re.findall(r"main-\d", out.read_text())) >= {"main-1", "main-2"}


def test_a_figure_with_a_slash_is_drawn_into_this_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["plot", "reward/max", "main-1", "--log", str(TINY)]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["reward_max.png"]


@pytest.mark.parametrize(
    ("words", "code", "why"),
    [
        (["reward", "--out", "a.gif"], 2, "must end in .svg, .png, .pdf"),
        (["held_out"], 1, "main-2 has no figure held_out; the charts are reward, held_out"),
        (["reward", "main-9"], 1, "its runs are main-1, main-2"),
        (["reward", "--width", "3"], 2, "it must be from 100 to 10000"),
    ],
)
def test_what_cannot_be_drawn_is_refused_in_a_sentence(
    words: list[str], code: int, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plot", *words, "--log", str(TINY)]) == code
    assert why in capsys.readouterr().err
