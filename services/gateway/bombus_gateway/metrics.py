"""`GET /metrics` of a gateway: its own calls, and the state of the hive as it has folded it.

Replicas choose their ports themselves, so `GET /metrics/replicas` tells Prometheus where they are
(`http_sd_configs`).
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.responses import Response

from bombus.errors import Code
from bombus.figures import seconds_between
from bombus.hive.failures import FailureKind
from bombus.hive.records import CallRecord, CallStatus
from bombus.hive.state import EngineState, Phase
from bombus.machine.metrics import CONTENT_TYPE, PATH, Declared, Histogram, Metric, MetricValue, exposition, of_bus
from bombus_gateway.context import Gateway
from bombus_gateway.plain_routes import JsonResponse, PlainRoute

FATES = ("claimed", "ended", "aborted", "trained", "dropped", "taken")  # of episodes, as `Counters` counts them
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
DECLARED: Declared = {
    "bombus_gateway_calls_total": Metric("Model calls recorded, by outcome.", ("engine", "outcome")),
    "bombus_gateway_call_seconds": Metric("From a recorded call's request to its last token.", ("engine",), True),
    "bombus_gateway_first_token_seconds": Metric(
        "From a recorded call's request to its first token.", ("engine",), True
    ),
    "bombus_gateway_tokens_total": Metric("Tokens of recorded calls: prompt or completion.", ("engine", "kind")),
    "bombus_gateway_calls_in_flight": Metric("Model calls that are open."),
    "bombus_gateway_refusals_total": Metric("Requests answered with an error, by its code.", ("code",)),
    "bombus_hive_epoch": Metric("The epoch, which grows with each change of the leader."),
    "bombus_hive_timestamp_seconds": Metric("The hive's time, from the newest event, in seconds since 1970."),
    "bombus_hive_full": Metric("How many streams and disks have no room for new work."),
    "bombus_stream_size_bytes": Metric("The size of a stream on the bus.", ("stream",)),
    "bombus_stream_limit_bytes": Metric("The size that a stream may have.", ("stream",)),
    "bombus_engine_phase": Metric("1 for the phase that an engine is in, 0 for others.", ("engine", "phase")),
    "bombus_engine_replicas": Metric("Replicas: serving, loading or quarantined.", ("engine", "state")),
    "bombus_engine_episodes_total": Metric("Episodes of the run, by what became of them.", ("engine", "fate")),
    "bombus_engine_failed_episodes_total": Metric("Aborted episodes of the run, by failure.", ("engine", "kind")),
    "bombus_engine_operations_total": Metric("Training operations: accepted, executed or failed.", ("engine", "state")),
    **{f"bombus_engine_{name}": Metric(text, ("engine",)) for name, (text, _) in OF_ENGINES.items()},
}


class _EngineCalls:
    """The recorded calls of one engine."""

    __slots__ = ("first_token", "outcomes", "seconds", "tokens")

    def __init__(self) -> None:
        self.outcomes = dict.fromkeys(CallStatus, 0)
        self.seconds = Histogram()
        self.first_token = Histogram()
        self.tokens = [0, 0]  # of prompts, of completions


class CallMetrics:
    """What a gateway counts of the requests that it answers. To count a call takes a dozen additions, and no lock."""

    def __init__(self, engines: Iterable[str]) -> None:
        self.refusals: Counter[Code] = Counter()
        self._engines = {engine: _EngineCalls() for engine in engines}

    def recorded(self, record: CallRecord) -> None:
        """Count a call that was recorded."""
        timings = record.timings
        counted = self._engines.get(record.engine) or self._engines.setdefault(record.engine, _EngineCalls())
        counted.outcomes[record.status] += 1
        counted.seconds.observe(seconds_between(timings.received_ns, timings.finished_ns))
        if timings.first_token_ns:
            counted.first_token.observe(seconds_between(timings.received_ns, timings.first_token_ns))
        counted.tokens[0] += record.prompt_tokens
        counted.tokens[1] += record.completion_tokens()

    def values(self) -> Iterator[MetricValue]:
        for engine, counted in self._engines.items():
            for outcome, count in counted.outcomes.items():
                yield "bombus_gateway_calls_total", (engine, outcome), count
            yield "bombus_gateway_call_seconds", (engine,), counted.seconds
            yield "bombus_gateway_first_token_seconds", (engine,), counted.first_token
            for kind, tokens in zip(("prompt", "completion"), counted.tokens, strict=True):
                yield "bombus_gateway_tokens_total", (engine, kind), tokens
        for code, count in self.refusals.items():
            yield "bombus_gateway_refusals_total", (code,), count


class MetricsRoutes:
    def __init__(self, gateway: Gateway, calls: CallMetrics, in_flight: Sized) -> None:
        self._gateway = gateway
        self._calls = calls
        self._in_flight = in_flight

    @property
    def plain(self) -> list[PlainRoute]:
        return [PlainRoute("GET", PATH, self.answer), PlainRoute("GET", f"{PATH}/replicas", self.replicas)]

    async def values(self) -> list[MetricValue]:
        hive, streams = self._gateway.follower.hive, await of_bus(self._streams())
        found: list[MetricValue] = [
            *self._calls.values(),
            *streams,
            ("bombus_gateway_calls_in_flight", (), len(self._in_flight)),
            ("bombus_hive_epoch", (), hive.epoch),
            ("bombus_hive_timestamp_seconds", (), hive.now_ns / 1e9),
            ("bombus_hive_full", (), len(hive.full)),
        ]
        for name in self._gateway.settings.engines:
            found += engine_values(hive.engine(name))
        return found

    async def answer(self, _: Request) -> Response:
        return Response(exposition(DECLARED, await self.values()), media_type=CONTENT_TYPE)

    async def replicas(self, _: Request) -> Response:
        """List the replicas as targets that Prometheus scrapes."""
        engines = self._gateway.settings.engines
        states = [self._gateway.follower.hive.engine(engine) for engine in engines]
        urls = sorted({urlsplit(replica.url) for state in states for replica in state.replicas.values()})
        return JsonResponse([{"targets": [url.netloc], "labels": {"__scheme__": url.scheme}} for url in urls])

    async def _streams(self) -> list[MetricValue]:
        found: list[MetricValue] = []
        for stream, state in (await self._gateway.bus.limited_states()).items():
            found.append(("bombus_stream_size_bytes", (stream,), state.bytes))
            found.append(("bombus_stream_limit_bytes", (stream,), max(0, state.max_bytes)))
        return found


def engine_values(engine: EngineState) -> Iterator[MetricValue]:
    """Yield the gauges of an engine's state."""
    name, counters, clients = engine.name, engine.counters, engine.clients
    for phase in Phase:
        yield "bombus_engine_phase", (name, phase.removeprefix("ENGINE.").lower()), float(engine.phase == phase)
    for gauge, (_, value) in OF_ENGINES.items():
        yield f"bombus_engine_{gauge}", (name,), float(value(engine))
    usable, serving = len(engine.usable), len(engine.usable.keys() & engine.loaded)
    states = {"serving": serving, "loading": usable - serving, "quarantined": len(engine.replicas) - usable}
    for state, count in states.items():
        yield "bombus_engine_replicas", (name, state), count
    for fate in FATES:
        yield "bombus_engine_episodes_total", (name, fate), getattr(counters, fate)
    for kind in FailureKind:
        yield "bombus_engine_failed_episodes_total", (name, kind), counters.aborted_by.get(kind, 0)
    for state in ("accepted", "executed", "failed"):
        yield "bombus_engine_operations_total", (name, state), getattr(clients, state)
