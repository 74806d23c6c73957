"""An OpenTelemetry collector, as far as exporters need one: it takes spans over HTTP, and decodes them."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


class Received(NamedTuple):
    """A span. Ids are hexadecimal, `parent` is "" for a root, and `links` has the ids of linked traces."""

    service: str
    name: str
    trace: str
    id: str
    parent: str
    kind: int
    attributes: dict[str, Any]
    links: set[str]


class Collector(ThreadingHTTPServer):
    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.bodies: list[tuple[str, bytes]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    @property
    def spans(self) -> list[Received]:
        found: list[Received] = []
        for _, body in list(self.bodies):
            for group in ExportTraceServiceRequest.FromString(body).resource_spans:
                service = _values(group.resource.attributes)["service.name"]
                for scope in group.scope_spans:
                    found += [_received(service, span) for span in scope.spans]
        return found


def _received(service: str, span: Any) -> Received:
    assert not span.events, "events have the texts of errors"
    assert not span.status.message
    return Received(
        service,
        span.name,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.kind,
        _values(span.attributes),
        {link.trace_id.hex() for link in span.links},
    )


def _values(attributes: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in attributes}


class _Handler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.bodies.append((self.path, body))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def collecting() -> Iterator[Collector]:
    with Collector() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
