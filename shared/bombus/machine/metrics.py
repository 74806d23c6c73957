"""Prometheus metrics of a service, and a listener for services without a port.

A service has counters and histograms of `prometheus_client`, and makes a `family` of what it can look up when it is
asked. Every label has few values, such as engines, phases and codes: never names that clients choose.
"""

import asyncio
import contextlib
import hmac
import itertools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any, TypeVar, cast

from prometheus_client import Metric, ProcessCollector, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from bombus.bus import Bus, ServerRefused
from bombus.config.parts import MetricsOptions
from bombus.errors import BusUnavailable, Refused
from bombus.machine.host_names import AsgiApp, AsgiMessage, AsgiReceive, AsgiSend
from bombus.machine.process import listen

log = logging.getLogger(__name__)

T = TypeVar("T")

PATH = "/metrics"
HEALTH = "/health"  # answers without a key, for probes of containers
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
RETRY_S = 30.0  # until a port that was taken is tried again
BUS_S = 1.0  # how long the bus may take to say what only it knows
# Upper bounds in seconds: from a small model's answer to an agent's longest call.
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)
disable_created_metrics()  # type: ignore[no-untyped-call]  # else one more metric for each says when it began


def family(name: str, text: str, labels: Sequence[str], values: Iterable[tuple[Sequence[str], float]]) -> Metric:
    """Return a metric with its present values by those of its labels. It is a counter if its name ends in `_total`."""
    kind: Any = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
    found: Metric = kind(name, text, labels=labels)
    for each, value in values:
        cast(Any, found).add_metric(each, value)
    return found


def exposition(families: Iterable[Metric], *counted: Collector) -> bytes:
    """Return metrics in Prometheus' text format, those of the operating system included."""
    found = [*families, *(metric for each in (*counted, ProcessCollector(registry=None)) for metric in each.collect())]
    return generate_latest(cast(Collector, SimpleNamespace(collect=lambda: found)))


async def of_bus(asking: Awaitable[T]) -> T | None:
    """Return what only the bus knows, or None while it is away: other metrics are needed most then."""
    with contextlib.suppress(BusUnavailable, ServerRefused, TimeoutError):
        async with asyncio.timeout(BUS_S):
            return await asking
    return None


@contextlib.asynccontextmanager
async def metrics_server(
    bus: Bus, options: MetricsOptions, expose: Callable[[], Awaitable[bytes]]
) -> AsyncIterator[None]:
    """Serve `/metrics` while the block runs, if the options give a port. The key is that of replicas.

    `/health` answers that the event loop runs, without a key.
    """
    if not options.metrics_port:
        yield
        return
    authorization = f"Bearer {await bus.replica_key()}".encode()

    async def app(scope: AsgiMessage, receive: AsgiReceive, send: AsgiSend) -> None:
        given = dict(scope["headers"]).get(b"authorization", b"")
        if scope["path"] == HEALTH:
            status, body = 200, b"ok\n"
        elif not hmac.compare_digest(given, authorization):
            why = b"Send what `bombus inference --show-key` prints, as `Authorization: Bearer <key>`.\n"
            status, body = 401, why
        elif scope["path"] != PATH:
            status, body = 404, b"There is only GET /metrics here.\n"
        else:
            status, body = 200, await expose()
        headers = [(b"content-type", CONTENT_TYPE.encode()), (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    serving = asyncio.create_task(_serve(app, options))
    try:
        yield
    finally:
        serving.cancel()
        await asyncio.wait({serving})


async def _serve(app: AsgiApp, options: MetricsOptions) -> None:
    """Serve until cancelled. A port that is taken is tried again, and warned of once: a hive must not stand still
    because nobody can count what it does."""
    from bombus.machine.http_server import http_server  # uvicorn, which nothing else here needs

    for level in itertools.chain([logging.WARNING], itertools.repeat(logging.DEBUG)):
        try:
            with listen(options.metrics_host, options.metrics_port, option="--metrics-port") as bound:
                async with http_server(app, bound, drain_s=0) as server:
                    log.info("metrics at http://%s:%d%s", *bound.getsockname()[:2], PATH)
                    await asyncio.wait({server})
        except Refused as refusal:
            log.log(level, "this process has no metrics: %s", refusal)
        await asyncio.sleep(RETRY_S)
