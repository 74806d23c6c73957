"""Traces from the SDK to the optimizer step. They cost nothing unless an OTLP endpoint is set.

`configure` enables traces if the environment sets an endpoint. The trace context is passed in a `traceparent` header
(W3C trace context) over HTTP and the bus. No span has the text of an error, which may quote a request.
"""

import logging
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Literal

from bombus.errors import Refused

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span, Tracer

log = logging.getLogger(__name__)

ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
HEADER = "traceparent"
TRACEPARENT_CHARACTERS = 55  # length in version 00, the only version so far

LINKS_MAX = 128  # what OpenTelemetry keeps of a span's links
Attributes = dict[str, str | int | float | bool | list[str] | list[int]]
SpanRole = Literal["INTERNAL", "CLIENT", "SERVER", "CONSUMER"]


class TraceSpan:
    """A running span, or in a process without tracing merely the context that it received. `traceparent` is sent to the
    next hop; it is "" if there is no trace."""

    def __init__(self, traceparent: str = "") -> None:
        self.traceparent = traceparent

    def set(self, attributes: Attributes) -> None:
        """Add attributes."""

    def link(self, traceparents: Iterable[str]) -> None:
        """Link the span to the other traces that it belongs to, once each."""


class _Traced(TraceSpan):
    def __init__(self, span: "Span", traceparent: str) -> None:
        super().__init__(traceparent)
        self._span = span

    def set(self, attributes: Attributes) -> None:
        self._span.set_attributes(attributes)

    def link(self, traceparents: Iterable[str]) -> None:
        from opentelemetry.trace import get_current_span

        by_trace = {each.split("-")[1]: each for each in filter(traceparent_of, traceparents)}
        by_trace.pop(self.traceparent.split("-")[1], None)
        for each in list(by_trace.values())[:LINKS_MAX]:
            self._span.add_link(get_current_span(_context(each)).get_span_context())


_traceparent = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
_tracer: "Tracer | None" = None
_provider: "TracerProvider | None" = None
_NO_SPAN: AbstractContextManager[TraceSpan] = nullcontext(TraceSpan())


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


def gen_ai(operation: str, episode: str) -> Attributes:
    """Return the attributes by which OpenTelemetry's conventions for generative AI know a span of an episode."""
    return {"gen_ai.operation.name": operation, "gen_ai.provider.name": "bombus", "gen_ai.conversation.id": episode}


def span(
    name: str, parent: str | None = None, attributes: Attributes | None = None, kind: SpanRole = "INTERNAL"
) -> AbstractContextManager[TraceSpan]:
    """Start a span under `parent` (the value of a traceparent header), or under the current span."""
    if _tracer is None:
        return nullcontext(TraceSpan(parent)) if parent else _NO_SPAN
    return _span(_tracer, name, parent, attributes, kind)


@contextmanager
def _span(
    tracer: "Tracer", name: str, parent: str | None, attributes: Attributes | None, kind: SpanRole
) -> Iterator[TraceSpan]:
    from opentelemetry.trace import SpanKind, StatusCode

    with tracer.start_as_current_span(
        name,
        context=_context(parent) if parent else None,
        kind=SpanKind[kind],
        attributes=attributes,
        record_exception=False,
        set_status_on_exception=False,
    ) as running:
        try:
            yield _Traced(running, current())
        except BaseException as error:
            running.set_status(StatusCode.ERROR)
            running.set_attribute("error.type", error.code if isinstance(error, Refused) else type(error).__name__)
            raise


def _context(traceparent: str) -> "Context":
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator().extract({HEADER: traceparent})
