"""The charts of a run: which figures each shows, and a chart as a Vega-Lite specification. Pure.

A browser draws a specification with the scripts in the package `vl-convert-python`, which also draws it as SVG, PNG or
PDF without a browser.
"""

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cache
from typing import Any, Literal

import msgspec

from bombus.errors import BombusError
from bombus.insight.metrics import evaluation_metrics, step_metrics
from bombus.replay.diagnosis.steps import RunSeries, StepFigures

SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"  # an identifier: nothing is fetched from it
Axis = Literal["step", "version", "minutes", "tokens"]
AXES: dict[Axis, str] = {
    "step": "step",
    "version": "policy version",
    "minutes": "minutes since the start",
    "tokens": "tokens sampled so far",
}
MARKED = 400  # with fewer points, each has a mark
Spec = dict[str, Any]
ROWS_MAX = 500  # steps of a chart in a browser, which is slow to draw more


class NoSuchFigure(BombusError):
    """No run has a figure or chart of this name. The message says which charts there are."""


class Chart(msgspec.Struct, frozen=True):
    """What a chart shows. `metrics` are names of figures (see `step_metrics`), or patterns with a `*`.

    A figure `NAME/mean` is drawn with a band of one standard deviation where `NAME/std` is known.
    """

    key: str
    title: str
    unit: str
    metrics: tuple[str, ...]
    about: str
    by_version: bool = False  # the figures of evaluations (see `evaluation_metrics`)


CHARTS = (
    Chart(
        "reward", "Reward", "reward", ("reward/mean", "data_set/*"), "mean over the batch and by data set, ± one std"
    ),
    Chart("held_out", "Held-out evaluation", "reward or share", ("held_out/*",), "by policy version", by_version=True),
    Chart("signal", "Groups without signal", "share of groups", ("groups/without_signal",), "all rewards are equal"),
    Chart("parts", "Reward components", "mean", ("reported/*", "reward/success_rate"), "as episodes report them"),
    Chart("loss", "Loss", "loss", ("train/loss",), "mean over the updates of a step"),
    Chart("grad_norm", "Gradient norm", "norm", ("train/grad_norm",), "before clipping"),
    Chart("entropy", "Entropy", "nats per token", ("policy/entropy",), "of the policy on trained tokens"),
    Chart(
        "kl", "KL", "nats per token", ("policy/kl_reference", "policy/kl_sampler"), "to the reference; to the sampler"
    ),
    Chart(
        "difference",
        "Sampler and trainer logprobs",
        "absolute difference",
        ("policy/sampler_difference", "policy/sampler_difference_max"),
        "mean and maximum over the trained tokens",
    ),
    Chart("ratio", "Importance ratio", "ratio", ("policy/ratio", "policy/ratio_max"), "mean and maximum"),
    Chart(
        "clipped",
        "Clipped and masked tokens",
        "share of tokens",
        ("policy/clipped_share", "policy/masked_share", "policy/capped_share"),
        "by the loss",
    ),
    Chart("age", "Age of samples", "policy versions", ("age/mean", "age/max"), "when they were trained on"),
    Chart(
        "stale", "Dropped episodes", "episodes", ("episodes/dropped_stale", "episodes/unusable"), "stale or unusable"
    ),
    Chart("length", "Length", "completion tokens", ("length/mean",), "of an episode, ± one std"),
    Chart("truncated", "Truncated episodes", "share of episodes", ("length/truncated_share",), "used up a budget"),
    Chart("turns", "Turns and tool calls", "per episode", ("turns/mean", "reported/tool_*"), "and failures of tools"),
    Chart(
        "errors", "Failed episodes", "episodes", ("aborted/*", "used_up/*", "episodes/failed_with_reward"), "by cause"
    ),
    Chart("time", "Where the time goes", "seconds per step", ("time/*_s",), "collecting and training, and their parts"),
    Chart("throughput", "Throughput", "tokens/s", ("tokens/sampled_per_s",), "sampled while a batch was collected"),
    Chart("queue", "Open episodes", "episodes", ("queue/open_episodes",), "when the batch was sealed"),
)
OF: dict[str, Chart] = {chart.key: chart for chart in CHARTS}


def points(chart: Chart, series: RunSeries, axis: Axis = "step", until: int | None = None) -> list[dict[str, Any]]:
    """Return the points of one chart for one run, as `all_points` does, of all its steps."""
    return all_points(series, axis, until, rows_max=len(series.steps) + 1, charts=(chart,))[chart.key]


def all_points(  # noqa: PLR0913 - the options of a picture
    series: RunSeries,
    axis: Axis,
    until: int | None,
    after: int = 0,
    rows_max: int = ROWS_MAX,
    charts: Sequence[Chart] = CHARTS,
) -> dict[str, list[dict[str, Any]]]:
    """Return the points of every chart for one run, by the chart's key, of the steps after event `after`: `x`, `y`,
    `figure` and, for a band, `low` and `high`.

    `until` is the position of the log that is shown: later steps and evaluations are left out. At most about `rows_max`
    steps are shown, evenly spread and with the newest. Charts by version are always complete.
    """
    rows = [(x, row) for x, row in _placed(series, axis, until) if row.done_seq > after]
    apart = 1 + len(rows) // rows_max
    by_step = [(False, x, step_metrics(row)) for x, row in rows[:-1:apart] + rows[-1:]]
    played = (each for each in series.evaluated if until is None or each.seq <= until)
    by_version = [(True, version, metrics) for version, metrics in evaluation_metrics(played).items()]
    found: dict[str, list[dict[str, Any]]] = {chart.key: [] for chart in charts}

    @cache
    def charts_with(name: str, is_by_version: bool) -> list[Chart]:
        return [chart for chart in charts if chart.by_version == is_by_version and shows(chart, name)]

    for is_by_version, x, metrics in by_step + by_version:
        for name, y in metrics.items():
            deviation = metrics.get(f"{name.removesuffix('/mean')}/std") if name.endswith("/mean") else None
            band = {} if deviation is None else {"low": y - deviation, "high": y + deviation}
            for chart in charts_with(name, is_by_version):
                found[chart.key].append({"x": x, "y": y, "figure": name, **band})
    return found


def _placed(series: RunSeries, axis: Axis, until: int | None) -> Iterator[tuple[float, StepFigures]]:
    """Yield the steps that a run had completed by event `until`, each with its place on an axis."""
    tokens = 0
    for row in series.steps:
        if until is not None and row.done_seq > until:
            return
        tokens += row.sampled_tokens
        minutes = max(0, row.done_ns - series.started_ns) / 60e9
        yield {"step": row.step, "version": row.step, "minutes": minutes, "tokens": tokens}[axis], row


def shows(chart: Chart, name: str) -> bool:
    """Return whether a chart shows a figure. Deviations are shown as bands, and counts of evaluations not at all."""
    if name.endswith(("/std", "/episodes")):
        return False
    return any(name == pattern or fnmatchcase(name, pattern) for pattern in chart.metrics)


def plot(figure: str, runs: Mapping[str, RunSeries], axis: Axis, width: int) -> Spec:
    """Return a chart of runs by their labels: the chart called `figure`, or one of this figure alone.

    Raises `NoSuchFigure` if none of the runs has it.
    """
    chart = OF.get(figure) or Chart(figure, figure, "", (figure,), "", figure.startswith("held_out/"))
    found = [
        point | ({"run": label} if len(runs) > 1 else {})
        for label, series in runs.items()
        for point in points(chart, series, axis)
    ]
    if not found:
        raise NoSuchFigure(
            f"{', '.join(runs) or 'no run'} has no figure {figure}; the charts are {', '.join(OF)}, and each figure of "
            "the table metrics can be plotted as well"
        )
    return spec(chart, found, axis, width) | {"title": chart.title}


def spec(
    chart: Chart, values: Sequence[Mapping[str, Any]], axis: Axis = "step", width: int | str = "container"
) -> Spec:
    """Return a chart of `points`, whose data are called `points`, so that a page can replace them.

    Points may have a `run`: then each run has a colour, and its figures differ in their dashes.
    """
    number: Spec = {"type": "quantitative", "scale": {"zero": False}}
    x: Spec = {**number, "field": "x", "title": "policy version" if chart.by_version else AXES[axis]}
    x["axis"] = {"tickMinStep": 0 if axis in ("minutes", "tokens") else 1}
    y: Spec = {**number, "axis": {"format": ".6~g"}}
    compared = any("run" in each for each in values)
    colour = {"field": "run" if compared else "figure", "type": "nominal", "title": None}
    style: dict[str, Any] = {"color": colour, "detail": {"field": "figure", "type": "nominal"}}
    dashes = {"strokeDash": {"field": "figure", "type": "nominal", "title": None}} if compared else {}
    tips = [{"field": name, "type": "nominal"} for name in (("run", "figure") if compared else ("figure",))]
    tips += [{**x, "title": x["title"]}, {"field": "y", "type": "quantitative", "title": chart.unit, "format": ".5g"}]
    line = {"type": "line", "point": {"size": 20} if len(values) < MARKED else False, "strokeWidth": 1.5}
    return {
        "$schema": SCHEMA,
        "description": f"{chart.title}: {chart.about}",
        "width": width,
        "height": 180,
        "data": {"name": "points", "values": list(values)},
        "layer": [
            {
                "mark": {"type": "area", "opacity": 0.15},
                "transform": [{"filter": "isValid(datum.low)"}],
                "encoding": {"x": x, "y": {**y, "field": "low", "title": chart.unit}, "y2": {"field": "high"}, **style},
            },
            {
                "mark": line,
                "params": [{"name": "zoom", "select": "interval", "bind": "scales"}],
                "encoding": {"x": x, "y": {**y, "field": "y", "title": chart.unit}, **style, **dashes, "tooltip": tips},
            },
        ],
    }


def histogram(bins: Sequence[Mapping[str, Any]]) -> Spec:
    """Return a chart of bins, each with `low`, `high`, `episodes`, and `href`, the page that its bar leads to."""
    return {
        "$schema": SCHEMA,
        "description": "How many episodes had which reward",
        "width": "container",
        "height": 180,
        "data": {"values": list(bins)},
        "mark": {"type": "bar", "cursor": "pointer"},
        "encoding": {
            "x": {"field": "low", "title": "reward"}
            | ({"type": "quantitative", "bin": "binned"} if len(bins) > 1 else {"type": "ordinal"}),
            **({"x2": {"field": "high"}} if len(bins) > 1 else {}),
            "y": {"field": "episodes", "type": "quantitative", "title": "episodes"},
            "href": {"field": "href", "type": "nominal"},
            "tooltip": [{"field": name, "type": "quantitative"} for name in ("low", "high", "episodes")],
        },
    }
