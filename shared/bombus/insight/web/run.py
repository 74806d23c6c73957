"""The page of a run: what is wrong with it, its figures by step as charts, and the rewards of one step."""

from bisect import bisect_left
from math import inf, nextafter

import msgspec
from starlette.responses import Response

from bombus.hive import events as ev
from bombus.insight import charts
from bombus.insight.charts import AXES, CHARTS, Axis
from bombus.insight.web.pages import Visit, json, page
from bombus.replay.diagnosis.steps import StepFigures

BINS = 20


class RewardBin(msgspec.Struct, frozen=True):
    """The episodes of a step with rewards from `low` to below `high`; those with `high` belong to the last bin."""

    low: float
    high: float
    episodes: int
    href: str


async def show(visit: Visit) -> Response:
    series = visit.run(visit.request.path_params["name"])
    steps = [row for row in series.steps if row.done_seq <= visit.position]
    visit.watch.read_answers(series)
    step = visit.number("step")
    chosen = next((row for row in reversed(steps) if step in (None, row.step)), None)
    bins = [] if chosen is None else await _bins(visit, series.name, chosen)
    return visit.html(
        "run.html",
        series=series,
        steps=steps,
        findings=visit.record.findings(series, steps),
        axis=axis_of(visit),
        axes=AXES,
        charts=CHARTS,
        step=step,
        rewards_of=None if chosen is None else chosen.step,
        bins=bins,
        histogram=charts.histogram([msgspec.to_builtins(each) for each in bins]),
    )


async def points(visit: Visit) -> Response:
    """Answer with the charts, or with the points of the steps after event `after`."""
    series, axis, after = visit.run(visit.request.path_params["name"]), axis_of(visit), visit.number("after") or 0
    found = charts.all_points(series, axis, visit.position, after)
    specs = {} if after else {chart.key: charts.spec(chart, (), axis) for chart in CHARTS}
    whole = [chart.key for chart in CHARTS if chart.by_version]
    return json({"position": visit.position, "specs": specs, "points": found, "whole": whole})


def axis_of(visit: Visit) -> Axis:
    asked = visit.request.query_params.get("axis", "")
    return next((axis for axis in AXES if axis == asked), "step")


async def _bins(visit: Visit, run: str, row: StepFigures) -> list[RewardBin]:
    """Return how many episodes of a step's batch had which reward, as the batch's event says."""
    async for entry in visit.source.events(row.seq - 1, row.seq):
        if isinstance(entry.event, ev.BatchReady):
            rewards = sorted(each.reward for group in entry.event.groups for each in group.episodes)
            bins = binned(rewards)
            # The page of a step includes both bounds, but a bin does not include its upper one.
            shown = [high if each == len(bins) else nextafter(high, -inf) for each, (_, high, _) in enumerate(bins, 1)]
            return [
                RewardBin(low, high, count, visit.link("run", run, "step", row.step, low=low, high=last))
                for (low, high, count), last in zip(bins, shown, strict=True)
            ]
    return []


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
