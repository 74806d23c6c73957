"""The page of a step: the groups of its batch, as cells coloured by reward, and the way to each episode."""

from math import isfinite

import msgspec
from starlette.responses import Response

from bombus.hive import events as ev
from bombus.hive.rewards import have_signal
from bombus.insight.web.pages import Visit, natural, page
from bombus.replay.diagnosis.statistics import Spread
from bombus.replay.diagnosis.steps import RunSeries, StepFigures
from bombus.replay.source import NotOnLog, Source

SORTED_BY = {"order": "the batch's order", "spread": "largest spread", "worst": "lowest mean", "best": "highest mean"}
GROUPS_SHOWN = 500  # with more, the page of a step is slow in a browser


class EpisodeCell(msgspec.Struct, frozen=True):
    """An episode. `place` is where its reward lies between the lowest and the highest of the batch, from 0 to 1."""

    episode: str
    reward: float
    place: float


class GroupRow(msgspec.Struct, frozen=True):
    """A group of a batch. `is_silent` says that its rewards have no signal."""

    task: str
    cells: tuple[EpisodeCell, ...]
    mean: float
    spread: float
    is_silent: bool


async def show(visit: Visit) -> Response:
    series = visit.run(visit.request.path_params["name"])
    steps = [row for row in series.steps if row.done_seq <= visit.position]
    asked = visit.request.path_params["step"]
    row = next((each for each in steps if each.step == natural(asked)), None)
    if row is None:
        raise NotOnLog(f"{series.name} has not completed a step {asked} by event {visit.position}")
    query = visit.request.query_params
    low, high = _bound(query.get("low", "")), _bound(query.get("high", ""))
    task, order = query.get("task", ""), query.get("sort", "")
    groups = [_row(group, row) for group in await batch_of(visit.source, series, row)]
    chosen = [group for group in groups if task in group.task and _is_between(group, low, high)]
    return visit.html(
        "step.html",
        series=series,
        row=row,
        before=max((each.step for each in steps if each.step < row.step), default=None),
        after=min((each.step for each in steps if each.step > row.step), default=None),
        groups=_sorted(chosen, order)[:GROUPS_SHOWN],
        groups_chosen=len(chosen),
        groups_in_all=len(groups),
        low=low,
        high=high,
        task=task,
        sort=order,
        sorts=SORTED_BY,
        is_chosen=lambda cell: _holds(cell.reward, low, high),
    )


async def batch_of(source: Source, series: RunSeries, row: StepFigures) -> tuple[ev.BatchGroup, ...]:
    """Return the groups of a step's batch; none if other clients collected them, whose rewards are not on the log."""
    async for entry in source.events(row.seq - 1, row.seq):
        if isinstance(entry.event, ev.BatchReady) and entry.event.engine == series.engine:
            return entry.event.groups
    return ()


def _row(group: ev.BatchGroup, row: StepFigures) -> GroupRow:
    rewards = Spread()
    for each in group.episodes:
        rewards.add(each.reward)
    width = row.highest - row.lowest
    cells = (
        EpisodeCell(each.episode, each.reward, (each.reward - row.lowest) / width if width > 0 else 0.5)
        for each in group.episodes
    )
    call_rewards = [each.call_rewards for each in group.episodes]
    is_silent = not have_signal([each.reward for each in group.episodes], call_rewards, [1] * len(call_rewards))
    return GroupRow(group.task, tuple(cells), rewards.mean, rewards.variance**0.5, is_silent)


def _bound(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if isfinite(value) else None


def _is_between(group: GroupRow, low: float | None, high: float | None) -> bool:
    return any(_holds(cell.reward, low, high) for cell in group.cells)


def _holds(reward: float, low: float | None, high: float | None) -> bool:
    return (low is None or reward >= low) and (high is None or reward <= high)


def _sorted(groups: list[GroupRow], order: str) -> list[GroupRow]:
    match order:
        case "spread":
            return sorted(groups, key=lambda group: -group.spread)
        case "worst":
            return sorted(groups, key=lambda group: group.mean)
        case "best":
            return sorted(groups, key=lambda group: -group.mean)
        case _:
            return groups


ROUTES = (page("/run/{name}/step/{step}", show),)
