"""`bombus report`: one self-contained HTML page about a run, without scripts or network access."""

import argparse
import asyncio
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from importlib import resources
from importlib.metadata import version
from pathlib import Path

import yaml
from markupsafe import Markup

from bombus.errors import BombusError
from bombus.figures import one_line
from bombus.insight.charts import CHARTS, Chart, all_points, spec
from bombus.insight.drawing import svg
from bombus.insight.runs import add_run_argument, read_answers, read_runs
from bombus.insight.web.pages import render
from bombus.replay.diagnosis.diagnose import diagnose
from bombus.replay.diagnosis.steps import STEPS_KEPT, RunSeries
from bombus.replay.logged_run import LoggedRun, read_run
from bombus.replay.opening import add_source_arguments
from bombus.replay.running import run_on_source
from bombus.replay.source import Source
from bombus.terminal import say

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
PRINT_S = 120.0
CHART_WIDTH = 340


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Writes one self-contained HTML page about a run: what `bombus diagnose` says, every chart with its numbers, "
        "the ancestry of the weights, the configuration, and how to make the run again."
    )
    add_run_argument(parser)
    add_source_arguments(parser)
    parser.add_argument("--out", type=Path, metavar="FILE", help="the page to write (default: RUN.html)")
    parser.add_argument(
        "--pdf", type=Path, metavar="FILE", help="print the page to a PDF file too, with the Chromium or Chrome found"
    )


def run(arguments: argparse.Namespace) -> int:
    return run_on_source("bombus report", _write, arguments)


async def _write(source: Source, arguments: argparse.Namespace) -> None:
    browser = None if arguments.pdf is None else _browser()
    series = (await read_runs(source)).newest(arguments.name, source.title)
    await read_answers(source, series.steps)
    logged = await read_run(source, series.engine, series.run)
    out = arguments.out or Path(f"{series.name}.html")
    out.write_text(page(series, logged, source.title, (await source.end()).seq), encoding="utf-8")
    say(f"{out}: {len(series.steps)} steps of {series.name}")
    if browser is not None:
        await asyncio.to_thread(_print, browser, out, arguments.pdf)
        say(f"{arguments.pdf}: the same, printed")


def page(series: RunSeries, logged: LoggedRun, title: str, end: int) -> str:
    """Return the page. `title` says where the log is stored, and `end` is the position of its last event."""
    return render(
        "report.html",
        style=Markup((resources.files("bombus.insight.web") / "static" / "page.css").read_text()),
        findings=diagnose(series.steps, series.job),
        charts=list(_charts(series)),
        logged=logged,
        versions=sorted({0, *logged.checkpoints, *logged.versions}),
        series=series,
        first=min(logged.steps, default=None),
        job=yaml.safe_dump(series.job.to_yaml_mapping(), sort_keys=False, allow_unicode=True),
        release=version("bombus"),
        title=title,
        end=end,
    )


def _charts(series: RunSeries) -> Iterator[tuple[Chart, Markup | None, list[str], list[tuple[str, list[str]]]]]:
    """Yield each chart, drawn, with the names of its figures and the rows of its table."""
    for chart, found in zip(CHARTS, all_points(series, "step", None, rows_max=STEPS_KEPT + 1).values(), strict=True):
        drawn = Markup(svg(spec(chart, found, width=CHART_WIDTH))) if found else None  # its texts are escaped
        figures = list(dict.fromkeys(point["figure"] for point in found))
        by_x: dict[float, dict[str, str]] = {}
        for point in found:
            by_x.setdefault(point["x"], {})[point["figure"]] = f"{point['y']:.6g}"
        rows = [(f"{x:g}", [values.get(figure, "") for figure in figures]) for x, values in by_x.items()]
        yield chart, drawn, figures, rows


def _browser() -> str:
    """Return the program that prints pages. Raises `BombusError` if there is none."""
    found = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if found is None:
        raise BombusError(
            f"--pdf needs one of {', '.join(BROWSERS)}; or open the page in a browser, and print it there"
        )
    return found


def _print(browser: str, page: Path, pdf: Path) -> None:
    """Print a page to a PDF file. Raises `BombusError` if the browser fails."""
    with tempfile.TemporaryDirectory() as profile:
        options = ["--headless", "--disable-gpu", "--no-pdf-header-footer", f"--user-data-dir={profile}"]
        options += ["--no-sandbox"] if os.geteuid() == 0 else []  # Chromium refuses to sandbox what root starts
        command = [browser, *options, f"--print-to-pdf={pdf.absolute()}", page.absolute().as_uri()]
        try:
            done = subprocess.run(command, capture_output=True, timeout=PRINT_S)
        except subprocess.TimeoutExpired:
            raise BombusError(f"{browser} did not print the page within {PRINT_S:.0f} s") from None
    if done.returncode or not pdf.is_file():
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:] or ["it says nothing"]
        raise BombusError(f"{browser} could not print the page: {one_line(last[0])}")
