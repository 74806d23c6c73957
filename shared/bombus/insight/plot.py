"""`bombus plot`: one chart of one or several runs as a file."""

import argparse
from pathlib import Path
from typing import get_args

from bombus.insight.charts import AXES, CHARTS, OF, points, spec
from bombus.insight.drawing import Format, drawn
from bombus.insight.runs import read_runs
from bombus.replay.opening import add_source_arguments
from bombus.replay.running import BadUsage, run_on_source
from bombus.replay.source import NotOnLog, Source
from bombus.terminal import say


def add_arguments(parser: argparse.ArgumentParser) -> None:
    charts = "\n".join(f"  {chart.key:<11} {chart.title}: {chart.about}" for chart in CHARTS)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = f"charts:\n{charts}"
    parser.add_argument("chart", choices=OF, metavar="CHART", help="which chart (see below)")
    parser.add_argument(
        "names",
        nargs="*",
        metavar="RUN",
        help="the runs to draw, such as main-1 main-2 (default: the newest run of the only engine)",
    )
    add_source_arguments(parser)
    parser.add_argument("--axis", choices=AXES, default="step", help="what steps are drawn by (default: %(default)s)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="a .png, .svg or .pdf file (default: CHART.png)")
    parser.add_argument("--width", type=int, default=640, metavar="PX", help="in pixels (default: %(default)s)")


def run(arguments: argparse.Namespace) -> int:
    return run_on_source("bombus plot", _draw, arguments)


async def _draw(source: Source, arguments: argparse.Namespace) -> None:
    out = arguments.out or Path(f"{arguments.chart}.png")
    kind: Format = out.suffix.removeprefix(".")  # type: ignore[assignment]
    if kind not in get_args(Format):
        raise BadUsage(f"--out {out}: the name must end in .{', .'.join(get_args(Format))}")
    if not 100 <= arguments.width <= 10_000:
        raise BadUsage("--width must be between 100 and 10000")
    chart = OF[arguments.chart]
    runs = await read_runs(source)
    chosen = [runs.newest(name, source.title) for name in arguments.names or [""]]
    found = [
        {**point, "run": series.name} if len(chosen) > 1 else point
        for series in chosen
        for point in points(chart, series, arguments.axis)
    ]
    if not found:
        raise NotOnLog(f"{', '.join(series.name for series in chosen)} has no figures for the chart {chart.key}")
    out.write_bytes(drawn({**spec(chart, found, arguments.axis, arguments.width), "title": chart.title}, kind))
    say(f"{out}: {chart.title} of {', '.join(series.name for series in chosen)}")
