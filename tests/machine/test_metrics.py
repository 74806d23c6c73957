"""Metrics as text, and the port at which a service without one of its own serves them."""

import re

import httpx
import pytest

from bombus.bus import Bus
from bombus.config.parts import MetricsOptions
from bombus.machine.metrics import Histogram, Metric, MetricValue, exposition, metrics_server
from bombus.machine.process import free_port, listen
from tests.metrics_page import PAGE, page
from tests.replica_access import replica_headers

DECLARED = {
    "a_total": Metric("What grows.", ("kind",)),
    "b_bytes": Metric("What does not."),
    "c_seconds": Metric("How long.", (), True),
}


async def values() -> list[MetricValue]:
    seconds = Histogram()
    for each in (0.0001, 0.02, 0.025, 9000.0):
        seconds.observe(each)
    return [("a_total", ('x"\n',), 2), ("b_bytes", (), 1.5), ("c_seconds", (), seconds)]


def test_the_page_matches_the_sources() -> None:
    assert PAGE.read_text() == page(), "run: python -m tests.metrics_page"


async def test_each_value_has_help_and_its_kind_and_labels_are_escaped() -> None:
    lines = exposition(DECLARED, await values()).decode().splitlines()
    assert lines[:3] == ["# HELP a_total What grows.", "# TYPE a_total counter", 'a_total{kind="x\\"\\n"} 2.0']
    assert lines[3:6] == ["# HELP b_bytes What does not.", "# TYPE b_bytes gauge", "b_bytes 1.5"]
    counted = {line.split()[0]: float(line.split()[1]) for line in lines if line.startswith("c_seconds")}
    assert counted['c_seconds_bucket{le="0.001"}'] == 1
    assert counted['c_seconds_bucket{le="0.025"}'] == 3, "a bound includes what is equal to it"
    assert counted['c_seconds_bucket{le="1800.0"}'] == 3
    assert counted['c_seconds_bucket{le="+Inf"}'] == counted["c_seconds_count"] == 4
    assert counted["c_seconds_sum"] == pytest.approx(9000.0451)
    assert any(line.startswith("process_resident_memory_bytes ") for line in lines)


async def test_a_port_of_its_own_is_opened_only_if_wanted_and_needs_the_key_of_replicas(bus: Bus) -> None:
    port = free_port()
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:
        async with metrics_server(bus, MetricsOptions(), DECLARED, values):
            with pytest.raises(httpx.ConnectError):
                await http.get("/metrics")
        async with metrics_server(bus, MetricsOptions(metrics_port=port), DECLARED, values):
            headers = await replica_headers(bus)
            answers = [
                await http.get("/metrics", headers=each) for each in ({}, {"authorization": "Bearer x"}, headers)
            ]
            elsewhere = await http.get("/", headers=headers)
        assert [answer.status_code for answer in answers] == [401, 401, 200]
        assert "bombus inference --show-key" in answers[0].text
        assert "a_total" in answers[2].text
        assert elsewhere.status_code == 404
        with pytest.raises(httpx.ConnectError):
            await http.get("/metrics")


async def test_a_service_whose_port_is_taken_works_without_metrics_and_says_so(
    bus: Bus, caplog: pytest.LogCaptureFixture
) -> None:
    with listen("127.0.0.1", 0) as taken:
        taken.listen()
        options, works = MetricsOptions(metrics_port=taken.getsockname()[1]), False
        async with metrics_server(bus, options, DECLARED, values):
            works = True
    assert works
    (message,) = caplog.messages
    assert re.search(r"no metrics: .*cannot listen at 127\.0\.0\.1.*another --metrics-port", message)
