"""The page of what a hive is doing: its engines, what they wait for, and its runs."""

from typing import Any

import msgspec
from starlette.responses import Response

from bombus.hive.status.data import engine_status
from bombus.hive.status.rows import EngineStatus
from bombus.hive.why.chains import chain
from bombus.hive.why.links import ChainLink
from bombus.insight.web.pages import Visit, page
from bombus.replay.diagnosis.findings import reward_of
from bombus.replay.diagnosis.steps import RunSeries

EPISODES_SHOWN = 50


class ShownEngine(msgspec.Struct, frozen=True):
    status: EngineStatus
    chain: list[ChainLink]
    tokens_per_s: float
    episodes_per_s: float


async def show(visit: Visit) -> Response:
    moment, hive = visit.moment, visit.moment.hive
    now_ns, led_ns = await visit.watch.now_ns(moment)
    shown = [
        ShownEngine(
            engine_status(engine, now_ns, hive.refusing_of(engine)),
            chain(hive, now_ns, moment.last, name, led_ns) or [],
            *moment.per_second(name, now_ns),
        )
        for name, engine in sorted(hive.engines.items())
    ]
    runs = [_row(series, visit.position) for series in reversed(visit.runs)]
    return visit.html("now.html", shown=shown, runs=runs, rows=EPISODES_SHOWN)


def _row(series: RunSeries, position: int) -> dict[str, Any]:
    steps = [row for row in series.steps if row.done_seq <= position]
    return {
        "name": series.name,
        "model": series.job.model.path,
        "started_ns": series.started_ns,
        "steps": len(steps),
        "reward": reward_of(steps[-1]) if steps else None,
    }


ROUTES = (page("/", show),)
