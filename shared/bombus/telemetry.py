"""Traces from the SDK to the optimizer step. They cost nothing unless an OTLP endpoint is set.

`configure` enables traces if the environment sets an endpoint. The trace context is passed in a `traceparent` header
(W3C trace context) over HTTP and the bus.
"""

import logging
import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Tracer

log = logging.getLogger(__name__)

ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
HEADER = "traceparent"
TRACEPARENT_CHARACTERS = 55  # length in version 00, the only version so far

Attribute = str | int | float | bool


class TraceSpan(Protocol):
    """A running span. `traceparent` is sent to the next hop; it is "" if there is no trace."""

    @property
    def traceparent(self) -> str: ...

    def set(self, **attributes: Attribute) -> None: ...


class _PassedOn:
    """The span in a process without tracing, which merely passes on the context that it received."""

    def __init__(self, traceparent: str = "") -> None:
        self.traceparent = traceparent

    def set(self, **attributes: Attribute) -> None:
        pass


class _Traced:
    def __init__(self, span: object, traceparent: str) -> None:
        self._span = span
        self.traceparent = traceparent

    def set(self, **attributes: Attribute) -> None:
        self._span.set_attributes(attributes)  # type: ignore[attr-defined]


_traceparent = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
_tracer: "Tracer | None" = None
_provider: "TracerProvider | None" = None
_NO_SPAN: AbstractContextManager[TraceSpan] = nullcontext(_PassedOn())


def enabled() -> bool:
    return _tracer is not None


def configure(service: str, environment: Mapping[str, str] = os.environ) -> bool:
    """Start exporting this process's spans if an endpoint is set. Return whether they are exported."""
    global _tracer, _provider
    if enabled():
        return True
    if not any(environment.get(name) for name in ENDPOINT_VARIABLES):
        return False
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ModuleNotFoundError as error:
        log.warning("an OTLP endpoint is set, but traces cannot be exported: %s; install 'bombus[telemetry]'", error)
        return False

    _provider = TracerProvider(resource=Resource.create({"service.name": f"bombus-{service}"}))
    _provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    _tracer = _provider.get_tracer("bombus")
    return True


def traceparent_of(value: str) -> str:
    """Return the value of a `traceparent` header from outside, or "" if it is not valid."""
    return value if len(value) == TRACEPARENT_CHARACTERS and _traceparent.fullmatch(value) else ""


def current() -> str:
    """Return the `traceparent` of the current span, even if other code started that span, or "" if there is none.

    Costs nothing if OpenTelemetry is not in use, because this does not import it.
    """
    trace = sys.modules.get("opentelemetry.trace")
    if trace is None:
        return ""
    context = trace.get_current_span().get_span_context()
    if not context.is_valid:
        return ""
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"


def span(name: str, parent: str | None = None, **attributes: Attribute) -> AbstractContextManager[TraceSpan]:
    """Start a span under `parent` (the value of a traceparent header), or under the current span."""
    if _tracer is None:
        return nullcontext(_PassedOn(parent)) if parent else _NO_SPAN
    return _span(_tracer, name, parent, attributes)


@contextmanager
def _span(tracer: "Tracer", name: str, parent: str | None, attributes: Mapping[str, Attribute]) -> Iterator[TraceSpan]:
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    context = TraceContextTextMapPropagator().extract({HEADER: parent}) if parent else None
    with tracer.start_as_current_span(name, context=context, attributes=dict(attributes)) as running:
        yield _Traced(running, current())
