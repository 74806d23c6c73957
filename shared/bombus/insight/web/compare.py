"""The page of runs side by side: shared charts, the settings that differ, and by how much the figures differ."""

from typing import Any

import msgspec
from starlette.responses import Response

from bombus.insight.charts import CHARTS, all_points, spec
from bombus.insight.compare import figure_differences, job_differences
from bombus.insight.web.pages import ON_PAGE, Visit, page
from bombus.replay.diagnosis.steps import RunSeries

RUNS_MAX = 8


async def show(visit: Visit) -> Response:
    chosen = _chosen(visit)
    return visit.html(
        "compare.html",
        chosen=chosen,
        names=[series.name for series in chosen],
        runs=list(reversed(visit.runs)),
        settings=job_differences([series.job for series in chosen]) if len(chosen) > 1 else {},
        figures=figure_differences(chosen[0], chosen[1], until=visit.position) if len(chosen) == 2 else [],
    )


async def points(visit: Visit) -> Response:
    """Answer with the charts and the points of one or several runs or, if the URL names an event as `after`, with the
    points after it. If the URL does not name one run alone, each point has the name of its run."""
    is_compared, after = len(visit.request.query_params.getlist("run")) != 1, visit.number("after") or 0
    found: dict[str, list[dict[str, Any]]] = {chart.key: [] for chart in CHARTS}
    for series in _chosen(visit):
        for key, more in all_points(series, visit.axis, visit.position, after).items():
            found[key] += [{**point, "run": series.name} for point in more] if is_compared else more
    kinds = [{"run": ""}] if is_compared else []
    specs = {} if after else {chart.key: spec(chart, kinds, visit.axis) | ON_PAGE for chart in CHARTS}
    whole = [chart.key for chart in CHARTS if chart.by_version]
    answer = {"position": visit.position, "specs": specs, "points": found, "whole": whole}
    return Response(msgspec.json.encode(answer), media_type="application/json")


def _chosen(visit: Visit) -> list[RunSeries]:
    """Return the runs that the URL names, or the newest two."""
    asked = visit.request.query_params.getlist("run")[:RUNS_MAX]
    return [series for series in visit.runs if series.name in asked] if asked else visit.runs[-2:]


ROUTES = (page("/runs", show), page("/runs/points.json", points))
