"""What pages have in common: a visit to one, its answer, and the templates."""

from collections.abc import Awaitable, Callable
from functools import cache
from importlib.metadata import version
from typing import Any
from urllib.parse import quote, urlencode

import msgspec
from jinja2 import Environment, PackageLoader, StrictUndefined
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from bombus.errors import BombusError, BusUnavailable
from bombus.figures import duration
from bombus.insight.charts import AXES, CHARTS, Axis
from bombus.insight.drawing import theme
from bombus.insight.record import DIGITS_MAX, Moment, Record
from bombus.insight.watch import LogWatch
from bombus.replay.diagnosis.steps import RunSeries, StepFigures
from bombus.replay.moments import clock, date
from bombus.replay.source import NotOnLog, Source

ON_PAGE = {"config": theme("currentColor")}  # of a chart


class Visit(msgspec.Struct):
    """A request for a page of a log that was read. `moment` is the state that it shows: the newest one, or the one at
    `at`, the position that the URL names."""

    request: Request
    watch: LogWatch
    record: Record
    moment: Moment
    at: int | None

    @property
    def position(self) -> int:
        return self.moment.position

    @property
    def source(self) -> Source:
        """The log, to read more of it. Raises `BusUnavailable` while its bus is away."""
        if self.watch.source is None:
            raise BusUnavailable(self.watch.error)
        return self.watch.source

    @property
    def runs(self) -> list[RunSeries]:
        """The runs that had started by the position that is shown, oldest first."""
        return self.record.runs_at(self.position)

    def run(self, name: str) -> RunSeries:
        """Return a run by its name. Raises `NotOnLog`."""
        for series in self.runs:
            if series.name == name:
                return series
        raise NotOnLog(f"{self.watch.title} has no run {name} of a job at event {self.position}")

    def steps(self, series: RunSeries) -> list[StepFigures]:
        """Return the steps that a run had completed by the position that is shown."""
        return [row for row in series.steps if row.done_seq <= self.position]

    @property
    def axis(self) -> Axis:
        """The horizontal axis of charts that the URL names, or steps."""
        asked = self.request.query_params.get("axis", "")
        return next((axis for axis in AXES if axis == asked), "step")

    def number(self, name: str) -> int | None:
        """Return a parameter of the URL that is a natural number, or None if it is missing or is not one."""
        return natural(self.request.query_params.get(name, ""))

    def link(self, *path: str | int, **query: str | float | list[str] | None) -> str:
        """Return the URL of another page at the same position. Each part of the path is escaped."""
        parameters = {"at": self.at, **query}
        text = urlencode({name: value for name, value in parameters.items() if value is not None}, doseq=True)
        return "/" + "/".join(quote(str(part), safe="") for part in path) + (f"?{text}" if text else "")

    def html(self, template: str, **values: Any) -> Response:
        """Answer with a template that extends `base.html`."""
        return _html(template, self.watch, visit=self, **values)


PageHandler = Callable[[Visit], Awaitable[Response]]


def page(path: str, handler: PageHandler) -> Route:
    """Return the route of a page. Until the log is read, the page shows how far that is; errors are sentences. While
    the bus is away, pages show what was read before."""

    async def endpoint(request: Request) -> Response:
        watch: LogWatch = request.app.state.watch
        watch.touch()
        record = watch.record
        if record is None or watch.position < watch.end:
            return _html("reading.html", watch, status=503 if watch.error else 200)
        at = natural(request.query_params.get("at", ""))
        moment, shown_at = record.live, None
        try:
            if at is not None:
                moment, shown_at = await watch.at(at), at
            return await handler(Visit(request, watch, record, moment, at))
        except BombusError as error:
            found = Visit(request, watch, record, moment, shown_at)
            status = 404 if isinstance(error, NotOnLog) else 503 if isinstance(error, BusUnavailable) else 500
            return _html("error.html", watch, status=status, visit=found, why=str(error))

    return Route(path, endpoint)


def natural(text: str) -> int | None:
    """Return the natural number in a part of a URL, or None if it is not one."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= DIGITS_MAX else None


def _html(template: str, watch: LogWatch, status: int = 200, visit: Visit | None = None, **values: Any) -> Response:
    return Response(render(template, watch=watch, visit=visit, **values), status, media_type="text/html")


def render(template: str, **values: Any) -> str:
    """Return a page as HTML, in which all values are escaped."""
    return _templates().get_template(template).render(**values)


@cache
def _templates() -> Environment:
    found = Environment(
        loader=PackageLoader("bombus.insight.web"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.globals |= {"vega": version("vl-convert-python"), "charts": CHARTS, "axes": AXES}
    found.filters |= {
        "clock": lambda at_ns: clock(at_ns)[:8],
        "date": date,
        "duration": duration,
        "count": lambda value: f"{value:,}",
        "figure": lambda value: f"{value:.4g}",
    }
    return found
