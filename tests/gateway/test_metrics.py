"""What a gateway tells Prometheus: each call once, refusals by code, the hive's state, and nothing that is secret."""

from typing import Any

import httpx
import msgspec
import pytest
from openai import APIStatusError, AsyncOpenAI

from bombus.bus import Bus, EmbeddedServer
from bombus.hive.records import Timings
from bombus.machine.metrics import SECONDS
from bombus_gateway.metrics import CallMetrics
from tests.conftest import freeze, thaw
from tests.gateway.openai_hive import GatewayHive, gateway_hive
from tests.harnesses import test_evidence
from tests.metrics_page import PAGE
from tests.patience import PATIENCE_S

PROMPT = "the unmistakable prompt of a client"


async def exposed(hive: GatewayHive, path: str = "/metrics") -> httpx.Response:
    async with httpx.AsyncClient(base_url=hive.base_url, timeout=PATIENCE_S) as http:
        return await http.get(path)


async def ask(client: AsyncOpenAI, **more: Any) -> None:
    messages: Any = [{"role": "user", "content": PROMPT}]
    answer = await client.chat.completions.create(model="my-own-name", messages=messages, max_tokens=4, **more)
    if more:
        async for _ in answer:
            pass


async def test_calls_their_tokens_and_times_are_counted_once_and_refusals_by_code(bus: Bus) -> None:
    async with gateway_hive(bus) as hive:
        episode, key = await hive.claim()
        await ask(hive.client(key))
        await ask(hive.client(key), stream=True)
        with pytest.raises(APIStatusError):
            await ask(hive.client(key[:-2] + "xx"))
        async with httpx.AsyncClient(base_url=hive.base_url) as http:
            assert (await http.post("/tokenize", json={"prompt": PROMPT})).status_code == 401
            assert (await http.post("/end_episode", json={})).status_code == 400
        records = await hive.records(episode, 2)
        text = (await exposed(hive)).text
    lines = text.splitlines()
    assert 'bombus_gateway_calls_total{engine="main",outcome="complete"} 2.0' in lines
    assert 'bombus_gateway_calls_total{engine="main",outcome="cut_off"} 0.0' in lines
    for kind, tokens in (
        ("prompt", sum(record.prompt_tokens for record in records)),
        ("completion", sum(record.completion_tokens() for record in records)),
    ):
        assert f'bombus_gateway_tokens_total{{engine="main",kind="{kind}"}} {float(tokens)}' in lines
    for name in ("bombus_gateway_call_seconds", "bombus_gateway_first_token_seconds"):
        assert f'{name}_count{{engine="main"}} 2.0' in lines
        assert sum(line.startswith(f"{name}_bucket") for line in lines) == len(SECONDS) + 1
    assert 'bombus_gateway_refusals_total{code="bad_key"} 2.0' in lines
    assert 'bombus_gateway_refusals_total{code="malformed"} 1.0' in lines
    assert "bombus_gateway_calls_in_flight 0.0" in lines
    assert 'bombus_engine_phase{engine="main",phase="rolling"} 1.0' in lines
    assert 'bombus_engine_replicas{engine="main",state="serving"} 1.0' in lines
    assert 'bombus_engine_open_episodes{engine="main"} 1.0' in lines
    assert sum(line.startswith("bombus_stream_limit_bytes{") for line in lines) == 6
    for secret in (PROMPT, key, episode, "my-own-name", "c1"):
        assert secret not in text
    documented = PAGE.read_text()
    names = [line.split()[2] for line in lines if line.startswith("# HELP bombus_")]
    assert names
    assert all(f"| `{name}` |" in documented for name in names)


def test_a_clock_that_is_set_back_lets_no_counter_fall() -> None:
    calls = CallMetrics(["main"])
    timings = Timings(received_ns=9_000_000_000, first_token_ns=2_000_000_000, finished_ns=3_000_000_000)
    calls.recorded(msgspec.structs.replace(test_evidence.record("a", [1], [2], 1), timings=timings))
    for name in ("call", "first_token"):
        for of, value in (("sum", 0.0), ("count", 1.0)):
            assert calls.registry.get_sample_value(f"bombus_gateway_{name}_seconds_{of}", {"engine": "main"}) == value


async def test_prometheus_finds_the_replicas_at_a_gateway(bus: Bus) -> None:
    async with gateway_hive(bus) as hive:
        (target,) = (await exposed(hive, "/metrics/replicas")).json()
        (replica,) = hive.engine.replicas.values()
    assert f"{target['labels']['__scheme__']}://{target['targets'][0]}" == replica.url


async def test_metrics_are_answered_while_the_bus_is_away_without_what_only_it_knows(
    crashing: tuple[EmbeddedServer, Bus],
) -> None:
    server, bus = crashing
    async with gateway_hive(bus) as hive:
        await freeze(server)
        lines = (await exposed(hive)).text.splitlines()
        thaw(server)
    assert 'bombus_engine_phase{engine="main",phase="rolling"} 1.0' in lines
    assert not any(line.startswith("bombus_stream_") for line in lines)
