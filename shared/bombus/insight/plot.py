"""`bombus plot`: one chart of one or several runs as a file."""

import argparse
from pathlib import Path
from typing import get_args

from bombus.config.flags import check_range
from bombus.insight.charts import AXES, CHARTS, plot
from bombus.insight.drawing import Format, drawn
from bombus.insight.runs import read_runs
from bombus.insight.trackers.rows import plain
from bombus.replay.opening import add_source_arguments
from bombus.replay.running import BadUsage, run_on_source
from bombus.replay.source import Source
from bombus.terminal import say


def add_arguments(parser: argparse.ArgumentParser) -> None:
    charts = "\n".join(f"  {chart.key:<11} {chart.title}: {chart.about}" for chart in CHARTS)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = f"charts:\n{charts}"
    parser.add_argument("chart", metavar="CHART", help="which chart (see below), or a figure such as reward/max")
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
    check_range("--width", arguments.width, 100, 10_000)
    return run_on_source("bombus plot", _draw, arguments)


async def _draw(source: Source, arguments: argparse.Namespace) -> None:
    out = arguments.out or Path(f"{plain(arguments.chart)}.png")
    kind: Format = out.suffix.removeprefix(".")  # type: ignore[assignment]
    if kind not in get_args(Format):
        raise BadUsage(f"--out {out}: the name must end in .{', .'.join(get_args(Format))}")
    runs = await read_runs(source)
    chosen = {each.name: each for each in (runs.newest(name, source.title) for name in arguments.names or [""])}
    out.write_bytes(drawn(plot(arguments.chart, chosen, arguments.axis, arguments.width), kind))
    say(f"{out}: {arguments.chart} of {', '.join(chosen)}")
