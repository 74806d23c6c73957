"""Prometheus metrics of a service: what it counts, how that is written, and a listener for services without a port.

Each service declares its metrics by name, and lists their values when it is asked. What is counted on a hot path is a
plain number until then; `prometheus_client` writes the answer.
"""

import asyncio
import contextlib
import hmac
import logging
import socket
from bisect import bisect_left
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from itertools import accumulate
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from bombus.bus import Bus, ServerRefused
from bombus.config.parts import MetricsOptions
from bombus.errors import BusUnavailable, Refused
from bombus.hive.generation import replica_key
from bombus.hive.subjects import SIGNING_SECRET
from bombus.machine.host_names import AsgiMessage, AsgiReceive, AsgiSend
from bombus.machine.process import listen

if TYPE_CHECKING:
    from prometheus_client.registry import Collector

log = logging.getLogger(__name__)

PATH = "/metrics"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
BUS_S = 1.0  # how long the bus may take to say what only it knows
# Upper bounds in seconds: from a small model's answer to an agent's longest call.
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)


class Histogram:
    """Counts durations by size. It is for one thread, and an observation takes a fraction of a microsecond."""

    __slots__ = ("counts", "sum")

    def __init__(self) -> None:
        self.counts = [0] * (len(SECONDS) + 1)
        self.sum = 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(SECONDS, seconds)] += 1
        self.sum += seconds

    def buckets(self) -> list[tuple[str, float]]:
        """Return each upper bound with the number of durations up to it."""
        return list(zip((*map(str, SECONDS), "+Inf"), accumulate(self.counts), strict=True))


class Metric(NamedTuple):
    """A metric as documented. It is a counter if its name ends in `_total`, a `Histogram`, or a gauge.

    Every label has few values, such as engines, phases and codes: never names that clients choose.
    """

    help: str
    labels: tuple[str, ...] = ()
    is_histogram: bool = False


Declared = Mapping[str, Metric]  # by name
MetricValue = tuple[str, tuple[str, ...], float | Histogram]  # a metric's name, the values of its labels, and its value
Collect = Callable[[], Awaitable[Iterable[MetricValue]]]


def exposition(declared: Declared, values: Iterable[MetricValue]) -> bytes:
    """Return the metrics of this process in Prometheus' text format, those of the operating system included."""
    from prometheus_client import ProcessCollector, generate_latest
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

    families: dict[str, Any] = {}  # the parameters of `add_metric` differ from kind to kind
    for name, labels, value in values:
        if name not in families:
            text, its_labels, is_histogram = declared[name]
            kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            families[name] = (HistogramMetricFamily if is_histogram else kind)(name, text, labels=its_labels)
        if isinstance(value, Histogram):
            families[name].add_metric(labels, list(value.buckets()), value.sum)
        else:
            families[name].add_metric(labels, value)

    of_process = ProcessCollector(registry=None)
    everything = SimpleNamespace(collect=lambda: [*families.values(), *of_process.collect()])
    return generate_latest(cast("Collector", everything))


async def of_bus(asking: Awaitable[Iterable[MetricValue]]) -> Iterable[MetricValue]:
    """Return values that only the bus knows, or none while it is away: other metrics are needed most then."""
    with contextlib.suppress(BusUnavailable, ServerRefused, TimeoutError):
        async with asyncio.timeout(BUS_S):
            return await asking
    return ()


@contextlib.asynccontextmanager
async def metrics_server(
    bus: Bus, options: MetricsOptions, declared: Declared, collect: Collect
) -> AsyncIterator[None]:
    """Serve `/metrics` while the block runs, if the options give a port. The key is that of replicas.

    A port that is taken is only warned of: a hive must not stand still because nobody can count what it does.
    """
    bound = _bound(options)
    if bound is None:
        yield
        return
    from bombus.machine.http_server import http_server  # uvicorn, which nothing else here needs

    authorization = f"Bearer {replica_key(await bus.secret(SIGNING_SECRET))}".encode()

    async def app(scope: AsgiMessage, receive: AsgiReceive, send: AsgiSend) -> None:
        given = dict(scope["headers"]).get(b"authorization", b"")
        if not hmac.compare_digest(given, authorization):
            why = b"Send what `bombus inference --show-key` prints, as `Authorization: Bearer <key>`.\n"
            status, body = 401, why
        elif scope["path"] != PATH:
            status, body = 404, b"There is only GET /metrics here.\n"
        else:
            status, body = 200, exposition(declared, await collect())
        headers = [(b"content-type", CONTENT_TYPE.encode()), (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    with bound:
        async with http_server(app, bound, drain_s=0):
            log.info("metrics at http://%s:%d%s", *bound.getsockname()[:2], PATH)
            yield


def _bound(options: MetricsOptions) -> socket.socket | None:
    if not options.metrics_port:
        return None
    try:
        return listen(options.metrics_host, options.metrics_port, option="--metrics-port")
    except Refused as refusal:
        log.warning("this process has no metrics: %s", refusal)
        return None
