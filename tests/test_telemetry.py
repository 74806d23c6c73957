"""Spans are exported if an endpoint is set, and nothing happens otherwise."""

from collections.abc import Iterator

import pytest

from bombus import telemetry
from bombus.errors import Code, Refused
from tests.otlp import Collector, Received, collecting


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as server:
        yield server


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


def exported(collector: Collector) -> list[Received]:
    assert telemetry._provider is not None
    telemetry._provider.force_flush()
    return collector.spans


def test_spans_go_to_the_endpoint_under_the_parent_that_was_received(
    untraced: None, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
    assert telemetry.configure("test")
    parent, other = f"00-{7:032x}-{9:016x}-01", f"00-{8:032x}-{1:016x}-01"
    with telemetry.span("the step", parent, {"bombus.step": 3}, "CONSUMER") as span:
        assert span.traceparent.split("-")[1] == f"{7:032x}"
        assert telemetry.current() == span.traceparent
        span.set({"gen_ai.response.finish_reasons": ["stop"]})
        span.link([other, parent, other, "", "no context"])
    (step,) = exported(collector)
    assert (step.service, step.name, step.trace, step.parent) == (
        "bombus-test", "the step", f"{7:032x}", f"{9:016x}",
    )  # fmt: skip
    assert step.attributes["bombus.step"] == 3
    assert step.links == {f"{8:032x}"}, "once, and not to its own trace"
    assert [path for path, _ in collector.bodies] == ["/v1/traces"]


@pytest.mark.parametrize(
    ("error", "kind"),
    [(Refused(Code.BAD_KEY, "the key sk-1 in 'my prompt'"), "bad_key"), (ValueError("sk-1"), "ValueError")],
)
def test_a_span_has_the_kind_of_an_error_and_never_its_text(
    untraced: None, collector: Collector, monkeypatch: pytest.MonkeyPatch, error: Exception, kind: str
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
    assert telemetry.configure("test")
    with pytest.raises(type(error)), telemetry.span("chat"):
        raise error
    (span,) = exported(collector)
    assert span.attributes == {"error.type": kind}
    assert b"sk-1" not in b"".join(body for _, body in collector.bodies)
