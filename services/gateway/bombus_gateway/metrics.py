"""`GET /metrics` of a gateway: its own calls, and the state of the hive as it has folded it.

Replicas choose their ports themselves, so `GET /metrics/replicas` tells Prometheus where they are
(`http_sd_configs`).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from typing import NamedTuple
from urllib.parse import urlsplit

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric
from starlette.requests import Request
from starlette.responses import Response

from bombus.bus import StreamState
from bombus.figures import seconds_between
from bombus.hive.failures import FailureKind
from bombus.hive.records import CallRecord, CallStatus
from bombus.hive.state import EngineState, Hive, Phase
from bombus.machine.metrics import CONTENT_TYPE, PATH, SECONDS, exposition, family, of_bus
from bombus_gateway.context import Gateway
from bombus_gateway.plain_routes import JsonResponse, PlainRoute

FATES = ("claimed", "ended", "aborted", "trained", "dropped", "taken")  # of episodes, as `Counters` counts them


def _replicas(engine: EngineState) -> Mapping[str, int]:
    usable, serving = len(engine.usable), len(engine.usable.keys() & engine.loaded)
    return {"serving": serving, "loading": usable - serving, "quarantined": len(engine.replicas) - usable}


# What each engine has one value of.
OF_ENGINES: Mapping[str, tuple[str, Callable[[EngineState], float]]] = {
    "suspended": ("1 while the run is suspended, until somebody resumes it.", lambda engine: bool(engine.suspended)),
    "run": ("The number of the run.", lambda engine: engine.run),
    "policy_version": ("The newest version of the weights, -1 before the first.", lambda engine: engine.version),
    "step": ("The newest step whose batch is sealed.", lambda engine: engine.step),
    "step_failures": ("Failed attempts at the step that is outstanding.", lambda engine: engine.step_failures),
    "last_step_timestamp_seconds": (
        "When the newest step was completed, 0: never.",
        lambda engine: 0.0 if engine.step_done is None else engine.step_done.at_ns / 1e9,
    ),
    "open_episodes": ("Episodes that clients play.", lambda engine: len(engine.open)),
    "pool_episodes": ("Ended episodes that wait for a batch.", lambda engine: len(engine.pool)),
    "pool_size_bytes": ("The size of the calls of these episodes.", lambda engine: engine.pool_bytes),
    "waiting_operations": ("Training operations that wait.", lambda engine: engine.clients.waiting),
}
# The metrics of engines that have another label: their help, the label, and the values by label.
BY_LABEL: Mapping[str, tuple[str, str, Callable[[EngineState], Mapping[str, float]]]] = {
    "phase": (
        "1 for the phase that an engine is in, 0 for others.",
        "phase",
        lambda engine: {each.removeprefix("ENGINE.").lower(): engine.phase == each for each in Phase},
    ),
    "replicas": ("Replicas: serving, loading or quarantined.", "state", _replicas),
    "episodes_total": (
        "Episodes of the run, by what became of them.",
        "fate",
        lambda engine: {fate: getattr(engine.counters, fate) for fate in FATES},
    ),
    "failed_episodes_total": (
        "Aborted episodes of the run, by failure.",
        "kind",
        lambda engine: {kind: engine.counters.aborted_by.get(kind, 0) for kind in FailureKind},
    ),
    "operations_total": (
        "Training operations: accepted, executed or failed.",
        "state",
        lambda engine: {state: getattr(engine.clients, state) for state in ("accepted", "executed", "failed")},
    ),
}


def families_of(hive: Hive, engines: Sequence[EngineState], streams: Mapping[str, StreamState]) -> Iterator[Metric]:
    """Yield the metrics of a hive's state, and of its streams."""
    yield family("bombus_hive_epoch", "The epoch, which grows with each change of the leader.", (), [((), hive.epoch)])
    text = "The hive's time, from the newest event, in seconds since 1970."
    yield family("bombus_hive_timestamp_seconds", text, (), [((), hive.now_ns / 1e9)])
    text = "How many streams and disks have no room for new work."
    yield family("bombus_hive_full", text, (), [((), len(hive.full))])
    sizes = [((name,), state.bytes) for name, state in streams.items()]
    yield family("bombus_stream_size_bytes", "The size of a stream on the bus.", ("stream",), sizes)
    limits = [((name,), max(0, state.max_bytes)) for name, state in streams.items()]
    yield family("bombus_stream_limit_bytes", "The size that a stream may have.", ("stream",), limits)
    for name, (text, label, every) in BY_LABEL.items():
        found = [((each.name, of), value) for each in engines for of, value in every(each).items()]
        yield family(f"bombus_engine_{name}", text, ("engine", label), found)
    for name, (text, read) in OF_ENGINES.items():
        yield family(f"bombus_engine_{name}", text, ("engine",), [((each.name,), read(each)) for each in engines])


class _EngineCalls(NamedTuple):
    """What is counted of the calls of one engine."""

    outcomes: Mapping[CallStatus, Counter]
    seconds: Histogram
    first_token: Histogram
    prompt_tokens: Counter
    completion_tokens: Counter


class CallMetrics:
    """What a gateway counts of the requests that it answers."""

    def __init__(self, engines: Iterable[str]) -> None:
        self.registry = registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"bombus_gateway_{name}", text, labels, registry=registry)

        def seconds(name: str, text: str) -> Histogram:
            return Histogram(f"bombus_gateway_{name}_seconds", text, ["engine"], registry=registry, buckets=SECONDS)

        self._outcomes = counter("calls_total", "Model calls recorded, by outcome.", "engine", "outcome")
        self._seconds = seconds("call", "From a recorded call's request to its last token.")
        self._first_token = seconds("first_token", "From a recorded call's request to its first token.")
        self._tokens = counter("tokens_total", "Tokens of recorded calls: prompt or completion.", "engine", "kind")
        self.refusals = counter("refusals_total", "Requests answered with an error, by its code.", "code")
        self.in_flight = Gauge("bombus_gateway_calls_in_flight", "Model calls that are open.", registry=registry)
        # Finding labels takes longer than counting. A series is there before the first such call.
        self._of_engine = {engine: self._children(engine) for engine in engines}

    def _children(self, engine: str) -> _EngineCalls:
        return _EngineCalls(
            {status: self._outcomes.labels(engine, status) for status in CallStatus},
            self._seconds.labels(engine),
            self._first_token.labels(engine),
            self._tokens.labels(engine, "prompt"),
            self._tokens.labels(engine, "completion"),
        )

    def recorded(self, record: CallRecord) -> None:
        """Count a call that was recorded."""
        counted, timings = self._of_engine[record.engine], record.timings
        counted.outcomes[record.status].inc()
        counted.seconds.observe(seconds_between(timings.received_ns, timings.finished_ns))
        if timings.first_token_ns:
            counted.first_token.observe(seconds_between(timings.received_ns, timings.first_token_ns))
        counted.prompt_tokens.inc(record.prompt_tokens)
        counted.completion_tokens.inc(record.completion_tokens())


class MetricsRoutes:
    def __init__(self, gateway: Gateway, calls: CallMetrics, in_flight: Sized) -> None:
        self._gateway = gateway
        self._calls = calls
        calls.in_flight.set_function(lambda: len(in_flight))

    @property
    def plain(self) -> list[PlainRoute]:
        return [PlainRoute("GET", PATH, self.answer), PlainRoute("GET", f"{PATH}/replicas", self.replicas)]

    @property
    def _engines(self) -> list[EngineState]:
        return [self._gateway.follower.hive.engine(name) for name in self._gateway.settings.engines]

    async def exposed(self) -> bytes:
        streams = await of_bus(self._gateway.bus.limited_states()) or {}
        families = families_of(self._gateway.follower.hive, self._engines, streams)
        return exposition(families, self._calls.registry)

    async def answer(self, _: Request) -> Response:
        return Response(await self.exposed(), media_type=CONTENT_TYPE)

    async def replicas(self, _: Request) -> Response:
        """List the replicas as targets that Prometheus scrapes."""
        urls = sorted({urlsplit(replica.url) for engine in self._engines for replica in engine.replicas.values()})
        return JsonResponse([{"targets": [url.netloc], "labels": {"__scheme__": url.scheme}} for url in urls])
