"""The page of what a hive is doing: its engines, what they wait for, and its runs."""

from starlette.responses import Response

from bombus.hive.status.data import engine_status
from bombus.hive.why.chains import chain
from bombus.insight.web.pages import Visit, page
from bombus.replay.diagnosis.findings import reward_of

EPISODES_SHOWN = 50


async def show(visit: Visit) -> Response:
    moment, hive = visit.moment, visit.moment.hive
    now_ns, led_ns = visit.watch.now_ns(moment)
    shown = [
        {
            "status": engine_status(engine, now_ns, hive.refusing_of(engine)),
            "chain": chain(hive, now_ns, moment.last, name, led_ns) or [],
            "per_second": moment.per_second(name, now_ns),
        }
        for name, engine in sorted(hive.engines.items())
    ]
    runs = [(series, visit.steps(series)) for series in reversed(visit.runs)]
    return visit.html("now.html", shown=shown, runs=runs, reward_of=reward_of, rows=EPISODES_SHOWN)


ROUTES = (page("/", show),)
