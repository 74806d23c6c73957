"""Spans are exported if an endpoint is set, and nothing happens otherwise."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from bombus import telemetry


class Collector(HTTPServer):
    """An OTLP endpoint, as far as an exporter needs one: it takes posts."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.bodies: list[tuple[str, bytes]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.bodies.append((self.path, body))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def untraced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry, "_tracer", None)
    monkeypatch.setattr(telemetry, "_provider", None)


@pytest.mark.parametrize(
    ("value", "passes"),
    [
        (f"00-{1:032x}-{2:016x}-01", True),
        (f"00-{10:032x}-{11:016x}-ff", True),
        ("", False),
        ("a" * 5_000_000, False),
        (f"00-{1:032x}-{2:016x}-01" * 1000, False),
        (f"00-{1:032x}-{2:016x}-01\n", False),
        (f"00-{10:032X}-{2:016x}-01", False),
        (f"00-{0:032x}-{2:016x}-01", False),
        (f"00-{1:032x}-{0:016x}-01", False),
        (f"ff-{1:032x}-{2:016x}-01", False),
        ("00-1-2-01", False),
    ],
)
def test_only_a_trace_context_is_taken_from_outside(value: str, passes: bool) -> None:
    assert telemetry.traceparent_of(value) == (value if passes else "")


def test_without_an_endpoint_nothing_is_traced_and_a_context_is_passed_on(untraced: None) -> None:
    assert not telemetry.configure("test", {})
    with telemetry.span("step") as span:
        assert span.traceparent == ""
    with telemetry.span("step", "00-1-2-01") as span:
        assert span.traceparent == "00-1-2-01"


def test_spans_go_to_the_endpoint_under_the_parent_that_was_received(
    untraced: None, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
    assert telemetry.configure("test")
    parent = f"00-{7:032x}-{9:016x}-01"
    with telemetry.span("the step", parent, step=3) as span:
        assert span.traceparent.split("-")[1] == f"{7:032x}"
        assert telemetry.current() == span.traceparent
    assert telemetry._provider is not None
    telemetry._provider.force_flush()
    ((path, body),) = collector.bodies
    assert path == "/v1/traces"
    assert b"bombus-test" in body
    assert b"the step" in body
    assert (9).to_bytes(8, "big") in body  # the parent's span
