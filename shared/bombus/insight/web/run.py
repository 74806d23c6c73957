"""The page of a run: what is wrong with it, its figures by step as charts, and the rewards of one step."""

import asyncio
from bisect import bisect_left
from math import inf, nextafter
from typing import Any

from starlette.responses import Response

from bombus.insight.charts import histogram
from bombus.insight.web.pages import ON_PAGE, Visit, page
from bombus.insight.web.step import batch_of
from bombus.replay.diagnosis.steps import RunSeries, StepFigures

BINS = 20


async def show(visit: Visit) -> Response:
    series = visit.run(visit.request.path_params["name"])
    steps = visit.steps(series)
    visit.watch.read_answers(series)
    step = visit.number("step")
    chosen = next((row for row in reversed(steps) if step in (None, row.step)), None)
    bins = [] if chosen is None or visit.watch.source is None else await _bins(visit, series, chosen)
    return visit.html(
        "run.html",
        series=series,
        steps=steps,
        findings=await asyncio.to_thread(visit.record.findings, series, steps),  # seconds for thousands of steps
        step=step,
        rewards_of=None if chosen is None else chosen.step,
        bins=bins,
        histogram=histogram(bins) | ON_PAGE,
    )


async def _bins(visit: Visit, series: RunSeries, row: StepFigures) -> list[dict[str, Any]]:
    """Return how many episodes of a step's batch had which reward, as `histogram` takes them."""
    groups = await batch_of(visit.source, series, row)
    found = []
    for low, high, count in binned(sorted(each.reward for group in groups for each in group.episodes)):
        # The page of a step includes both bounds, but a bin does not include its upper one, unless it is the last one.
        until = nextafter(high, -inf) if high < row.highest else high
        link = visit.link("run", series.name, "step", row.step, low=low, high=until)
        found.append({"low": low, "high": high, "episodes": count, "href": link})
    return found


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


ROUTES = (page("/run/{name}", show),)
