"""Metrics as text, and the port at which a service without one of its own serves them."""

import asyncio
import contextlib
import logging
import re

import httpx
import pytest
from prometheus_client import Histogram

from bombus.bus import Bus
from bombus.config.parts import MetricsOptions
from bombus.machine import metrics
from bombus.machine.metrics import SECONDS, exposition, family, metrics_server
from bombus.machine.process import free_port, listen
from tests.foreign_keys import foreign_keys
from tests.metrics_page import PAGE, page
from tests.patience import PATIENCE_S, until
from tests.replica_access import replica_headers


async def exposed() -> bytes:
    seconds = Histogram("c_seconds", "How long.", buckets=SECONDS, registry=None)
    for each in (0.0001, 0.02, 0.025, 9000.0):
        seconds.observe(each)
    counted = family("a_total", "What grows.", ("kind",), [(('x"\n',), 2)])
    return exposition([counted, family("b_bytes", "What does not.", (), [((), 1.5)])], seconds)


def test_the_page_matches_the_sources() -> None:
    assert PAGE.read_text() == page(), "run: python -m tests.metrics_page"


async def test_each_value_has_help_and_its_kind_and_labels_are_escaped() -> None:
    lines = (await exposed()).decode().splitlines()
    assert lines[:3] == ["# HELP a_total What grows.", "# TYPE a_total counter", 'a_total{kind="x\\"\\n"} 2.0']
    assert lines[3:6] == ["# HELP b_bytes What does not.", "# TYPE b_bytes gauge", "b_bytes 1.5"]
    counted = {line.split()[0]: float(line.split()[1]) for line in lines if line.startswith("c_seconds")}
    assert counted['c_seconds_bucket{le="0.001"}'] == 1
    assert counted['c_seconds_bucket{le="0.025"}'] == 3, "a bound includes what is equal to it"
    assert counted['c_seconds_bucket{le="1800.0"}'] == 3
    assert counted['c_seconds_bucket{le="+Inf"}'] == counted["c_seconds_count"] == 4
    assert counted["c_seconds_sum"] == pytest.approx(9000.0451)
    assert not any("_created" in line for line in lines)
    assert any(line.startswith("process_resident_memory_bytes ") for line in lines)


async def test_a_port_of_its_own_is_opened_only_if_wanted_and_needs_the_key_of_replicas(bus: Bus) -> None:
    port = free_port()
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:
        async with metrics_server(bus, MetricsOptions(), exposed):
            with pytest.raises(httpx.ConnectError):
                await http.get("/metrics")
        async with metrics_server(bus, MetricsOptions(metrics_port=port), exposed):
            await until_open(port)
            headers = await replica_headers(bus)
            answers = [
                await http.get("/metrics", headers=each) for each in ({}, {"authorization": "Bearer x"}, headers)
            ]
            elsewhere = await http.get("/", headers=headers)
            assert (await http.get("/health")).status_code == 200, "a probe has no key"
        assert [answer.status_code for answer in answers] == [401, 401, 200]
        assert "bombus inference --show-key" in answers[0].text
        assert "a_total" in answers[2].text
        assert elsewhere.status_code == 404
        with pytest.raises(httpx.ConnectError):
            await http.get("/metrics")


async def test_no_key_of_anybody_else_reads_metrics(bus: Bus) -> None:
    """Whatever the path is, except that probes need no key."""
    right, port = (await replica_headers(bus))["authorization"].removeprefix("Bearer "), free_port()
    async with (
        metrics_server(bus, MetricsOptions(metrics_port=port), exposed),
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http,
    ):
        await until_open(port)
        for what, key in (await foreign_keys(bus, right)).items():
            for path in ("/metrics", "/metrics/", "/health/", "/", "/x", f"/k/{right}/metrics"):
                for headers in (
                    {"authorization": f"Bearer {key}".strip()},
                    {"authorization": key},
                    {"x-api-key": right},
                ):
                    refused = await http.request("GET", path, headers=headers)
                    assert refused.status_code == 401, (what, path)
                    assert "a_total" not in refused.text


async def test_a_service_whose_port_is_taken_works_without_metrics_says_so_and_has_them_once_it_is_free(
    bus: Bus, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "RETRY_S", 0.05)
    with listen("127.0.0.1", 0) as taken:
        taken.listen()
        port, works = taken.getsockname()[1], False
        async with metrics_server(bus, MetricsOptions(metrics_port=port), exposed):
            works = True
            await until(lambda: caplog.messages)
            taken.close()
            await until_open(port)
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:
                assert (await http.get("/metrics")).status_code == 401
    assert works
    (message,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert re.search(r"no metrics: .*cannot listen at 127\.0\.0\.1.*another --metrics-port", message)


async def until_open(port: int) -> None:
    """Wait until something listens at a port."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                return writer.close()
            await asyncio.sleep(0.01)
