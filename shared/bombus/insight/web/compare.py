"""The page of runs side by side: shared charts, the settings that differ, and by how much the figures differ."""

from starlette.responses import Response

from bombus.insight.charts import AXES, CHARTS
from bombus.insight.compare import figure_differences, job_differences
from bombus.insight.web.pages import Visit, page
from bombus.insight.web.run import axis_of, chart_points
from bombus.replay.diagnosis.steps import RunSeries

RUNS_MAX = 8


async def show(visit: Visit) -> Response:
    chosen, axis = _chosen(visit), axis_of(visit)
    return visit.html(
        "compare.html",
        chosen=chosen,
        names=[series.name for series in chosen],
        runs=list(reversed(visit.runs)),
        axis=axis,
        axes=AXES,
        charts=CHARTS,
        settings=job_differences([series.job for series in chosen]) if len(chosen) > 1 else [],
        figures=figure_differences(chosen[0], chosen[1], until=visit.position) if len(chosen) == 2 else [],
    )


async def points(visit: Visit) -> Response:
    return chart_points(visit, _chosen(visit), is_compared=True)


def _chosen(visit: Visit) -> list[RunSeries]:
    """Return the runs that the URL names, or the newest two."""
    asked = visit.request.query_params.getlist("run")[:RUNS_MAX]
    return [series for series in visit.runs if series.name in asked] if asked else visit.runs[-2:]


ROUTES = (page("/runs", show), page("/runs/points.json", points))
