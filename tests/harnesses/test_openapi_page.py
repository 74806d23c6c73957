"""schemathesis, unmodified, finds no answer of a gateway that its OpenAPI page does not describe."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from bombus.bus import Bus
from bombus.hive.events import EpisodeType
from bombus.hive.generation import Generate
from tests.gateway.openai_hive import MODEL, GatewayHive, Send, gateway_hive, says
from tests.gateway.openapi_page import closed
from tests.harnesses.cases import ASKED_FOR
from tests.harnesses.install import SCHEMATHESIS, bin_of, is_installed
from tests.harnesses.process import run

JOB = {"bombus": {"model": {"path": MODEL, "tools": "hermes"}, "rollout": {"max_env_worker": 100_000}}}
CALL = 'I look.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
ALIVE_S = 1.0
LIMIT_S = 1800.0
CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
# The engine is stopped last: an agent of a stopped engine is only refused.
ROUTES = {
    "agents": ("--include-path-regex", "^/(v1/|tokenize|detokenize)"),
    "clients": ("--exclude-path-regex", "^/(v1/|tokenize|detokenize|stop_engine|events)"),  # events have no end
    "the stop": ("--include-path", "/stop_engine"),
}


async def calls_a_tool(request: Generate, send: Send) -> None:
    await says(*[CALL] * request.n)(request, send)


@asynccontextmanager
async def with_signs_of_life(hive: GatewayHive) -> AsyncIterator[None]:
    """Report the played replica as alive while the block runs."""

    async def report() -> None:
        while True:
            await hive.alive("replica-1", hive.replica)
            await asyncio.sleep(ALIVE_S)

    reporting = asyncio.create_task(report())
    try:
        yield
    finally:
        reporting.cancel()
        await asyncio.gather(reporting, return_exceptions=True)


async def page_of(hive: GatewayHive) -> str:
    """Return the page without the routes of an engine, which are those at the root."""
    async with httpx.AsyncClient(base_url=hive.base_url, timeout=60) as http:
        page = closed((await http.get("/openapi.json")).json())
    paths = {path: routes for path, routes in page["paths"].items() if not path.startswith("/e/")}
    return json.dumps({**page, "paths": paths})


@pytest.mark.skipif(not (ASKED_FOR and is_installed(SCHEMATHESIS)), reason="`make test-harnesses` makes schemathesis")
async def test_schemathesis_finds_no_answer_that_the_page_does_not_describe(bus: Bus, tmp_path: Path) -> None:
    async with gateway_hive(bus, JOB) as hive, with_signs_of_life(hive):
        hive.replica.otherwise = calls_a_tool
        _, key = await hive.claim(EpisodeType.EVAL)
        (tmp_path / "page.json").write_text(await page_of(hive))
        (tmp_path / "schemathesis.toml").touch()
        command = [str(bin_of(SCHEMATHESIS) / "st"), "run", "page.json", "--url", hive.base_url]
        command += ["--header", f"Authorization: Bearer {key}", "--checks", CHECKS, "--seed", "1", "--warnings", "off"]
        command += ["--phases", "coverage,fuzzing", "--max-examples", "5", "--no-shrink", "--continue-on-failure"]
        for name, which in ROUTES.items():
            variables = {"PATH": str(bin_of(SCHEMATHESIS)), "HOME": str(tmp_path), "LANG": "C.UTF-8"}
            ended = await run([*command, *which], tmp_path, variables, LIMIT_S)
            assert ended.code == 0, f"{name}:\n{ended.output}"
