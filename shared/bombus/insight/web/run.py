"""The page of a run: what is wrong with it, its figures by step as charts, and the rewards of one step."""

import asyncio
from bisect import bisect_left
from collections.abc import Sequence
from math import inf, nextafter
from typing import Any

from starlette.responses import Response

from bombus.insight import charts
from bombus.insight.charts import AXES, CHARTS, Axis
from bombus.insight.drawing import theme
from bombus.insight.web.pages import Visit, json, page
from bombus.insight.web.step import batch_of
from bombus.replay.diagnosis.steps import RunSeries, StepFigures

BINS = 20
ON_PAGE = {"config": theme("currentColor")}


async def show(visit: Visit) -> Response:
    series = visit.run(visit.request.path_params["name"])
    steps = visit.steps(series)
    visit.watch.read_answers(series)
    step = visit.number("step")
    chosen = next((row for row in reversed(steps) if step in (None, row.step)), None)
    bins = [] if chosen is None else await _bins(visit, series, chosen)
    return visit.html(
        "run.html",
        series=series,
        steps=steps,
        findings=await asyncio.to_thread(visit.record.findings, series, steps),  # seconds for thousands of steps
        axis=axis_of(visit),
        axes=AXES,
        charts=CHARTS,
        step=step,
        rewards_of=None if chosen is None else chosen.step,
        bins=bins,
        histogram=charts.histogram(bins) | ON_PAGE,
    )


async def points(visit: Visit) -> Response:
    """Answer with the charts, or with the points of the steps after event `after`."""
    return chart_points(visit, [visit.run(visit.request.path_params["name"])])


def chart_points(visit: Visit, runs: Sequence[RunSeries], is_compared: bool = False) -> Response:
    """Answer with the charts and the points of these runs or, if the URL names an event as `after`, with the points
    after it. If runs are compared, each point has the name of its run."""
    axis, after = axis_of(visit), visit.number("after") or 0
    found: dict[str, list[dict[str, Any]]] = {chart.key: [] for chart in CHARTS}
    for series in runs:
        for key, more in charts.all_points(series, axis, visit.position, after).items():
            found[key] += [{**point, "run": series.name} for point in more] if is_compared else more
    kinds = [{"run": ""}] if is_compared else []
    specs = {} if after else {chart.key: charts.spec(chart, kinds, axis) | ON_PAGE for chart in CHARTS}
    whole = [chart.key for chart in CHARTS if chart.by_version]
    return json({"position": visit.position, "specs": specs, "points": found, "whole": whole})


def axis_of(visit: Visit) -> Axis:
    asked = visit.request.query_params.get("axis", "")
    return next((axis for axis in AXES if axis == asked), "step")


async def _bins(visit: Visit, series: RunSeries, row: StepFigures) -> list[dict[str, Any]]:
    """Return how many episodes of a step's batch had which reward, as `charts.histogram` takes them."""
    groups = await batch_of(visit.source, series, row)
    bins = binned(sorted(each.reward for group in groups for each in group.episodes))
    # The page of a step includes both bounds, but a bin does not include its upper one.
    last = [nextafter(high, -inf) for _, high, _ in bins[:-1]] + [high for _, high, _ in bins[-1:]]
    links = [
        visit.link("run", series.name, "step", row.step, low=low, high=until)
        for (low, _, _), until in zip(bins, last, strict=True)
    ]
    return [
        {"low": low, "high": high, "episodes": count, "href": link}
        for (low, high, count), link in zip(bins, links, strict=True)
    ]


def binned(rewards: list[float]) -> list[tuple[float, float, int]]:
    """Return (low, high, count) of up to `BINS` bins of equal width that cover sorted rewards. `high` itself belongs to
    the last bin only."""
    if not rewards:
        return []
    low, high = rewards[0], rewards[-1]
    count = BINS if high > low else 1
    width = high / count - low / count  # the difference of huge rewards is not finite
    edges = [*(low + width * each for each in range(count)), high]
    ends = [0, *(bisect_left(rewards, edge) for edge in edges[1:-1]), len(rewards)]
    return [(edges[each], edges[each + 1], ends[each + 1] - ends[each]) for each in range(count)]


ROUTES = (page("/run/{name}", show), page("/run/{name}/points.json", points))
