"""The page of a step: the groups of its batch, as cells coloured by reward, and the way to each episode."""

from collections.abc import Callable
from math import isfinite

import msgspec
from starlette.responses import Response

from bombus.hive import events as ev
from bombus.hive.rewards import have_signal
from bombus.insight.web.pages import Visit, natural, page
from bombus.replay.diagnosis.statistics import Spread
from bombus.replay.diagnosis.steps import RunSeries, StepFigures
from bombus.replay.source import NotOnLog, Source

GROUPS_SHOWN = 500  # with more, the page of a step is slow in a browser


class GroupRow(msgspec.Struct, frozen=True):
    """A group of a batch. `is_silent` says that its rewards have no signal."""

    task: str
    episodes: tuple[ev.BatchEpisode, ...]
    mean: float
    spread: float
    is_silent: bool


SORTED_BY: dict[str, tuple[str, Callable[[GroupRow], float]]] = {
    "order": ("the batch's order", lambda group: 0.0),
    "spread": ("largest spread", lambda group: -group.spread),
    "worst": ("lowest mean", lambda group: group.mean),
    "best": ("highest mean", lambda group: -group.mean),
}


async def show(visit: Visit) -> Response:
    series = visit.run(visit.request.path_params["name"])
    steps = visit.steps(series)
    asked = visit.request.path_params["step"]
    row = next((each for each in steps if each.step == natural(asked)), None)
    if row is None:
        kept = f"; steps {series.steps[0].step} to {series.steps[-1].step} are kept" if series.steps else ""
        raise NotOnLog(f"{series.name} has not completed a step {asked} by event {visit.position}{kept}")
    query = visit.request.query_params
    low, high = _bound(query.get("low", "")), _bound(query.get("high", ""))

    def is_chosen(episode: ev.BatchEpisode) -> bool:
        return (low is None or episode.reward >= low) and (high is None or episode.reward <= high)

    task, order = query.get("task", ""), query.get("sort", "")
    groups = [_row(group) for group in await batch_of(visit.source, series, row)]
    chosen = [group for group in groups if task in group.task and any(map(is_chosen, group.episodes))]
    return visit.html(
        "step.html",
        series=series,
        row=row,
        before=max((each.step for each in steps if each.step < row.step), default=None),
        after=min((each.step for each in steps if each.step > row.step), default=None),
        groups=sorted(chosen, key=SORTED_BY.get(order, SORTED_BY["order"])[1])[:GROUPS_SHOWN],
        groups_chosen=len(chosen),
        groups_in_all=len(groups),
        low=low,
        high=high,
        task=task,
        sort=order,
        sorts={name: label for name, (label, _) in SORTED_BY.items()},
        is_chosen=is_chosen,
        place=lambda reward: (reward - row.lowest) / width if (width := row.highest - row.lowest) > 0 else 0.5,
    )


async def batch_of(source: Source, series: RunSeries, row: StepFigures) -> tuple[ev.BatchGroup, ...]:
    """Return the groups of a step's batch; none if other clients collected them, whose rewards are not on the log."""
    async for entry in source.events(row.seq - 1, row.seq):
        if isinstance(entry.event, ev.BatchReady) and entry.event.engine == series.engine:
            return entry.event.groups
    return ()


def _row(group: ev.BatchGroup) -> GroupRow:
    rewards, call_rewards = zip(*((each.reward, each.call_rewards) for each in group.episodes), strict=True)
    spread = Spread()
    spread.extend(rewards)
    is_silent = not have_signal(rewards, call_rewards, [1] * len(rewards))
    return GroupRow(group.task, group.episodes, spread.mean, spread.variance**0.5, is_silent)


def _bound(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if isfinite(value) else None


ROUTES = (page("/run/{name}/step/{step}", show),)
