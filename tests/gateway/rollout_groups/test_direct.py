"""Requests that are answered without FastAPI's routes."""

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import Receive, Scope, Send

from bombus.machine.hive_keys import HiveKeys, KeyRing
from bombus_gateway.access import Access, Guard
from bombus_gateway.rollout_groups.direct import DirectRoute


async def others(scope: Scope, receive: Receive, send: Send) -> None:
    await PlainTextResponse("by the others")(scope, receive, send)


async def answer(request: Request) -> Response:
    return PlainTextResponse(await request.body())


async def failing(_: Request) -> Response:
    raise AssertionError("a bug")


def client(route: DirectRoute) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(route), base_url="http://hive.test")


async def test_only_its_method_with_a_key_that_opens_is_answered_directly() -> None:
    guard = Guard(Access.CLIENT, KeyRing(HiveKeys(client="a-key-of-16-characters")), "")
    async with client(DirectRoute("POST", guard, answer, others)) as http:
        opened = {"x-api-key": "a-key-of-16-characters"}
        assert (await http.post("/", content="a", headers=opened)).text == "a"
        assert (await http.get("/", headers=opened)).text == "by the others"
        assert (await http.post("/", content="a")).text == "by the others"


async def test_a_bug_is_an_answer_and_on_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async with client(DirectRoute("POST", Guard(Access.CLIENT, KeyRing(HiveKeys()), ""), failing, others)) as http:
        failed = await http.post("/")
    assert failed.status_code == 500
    assert failed.json() == {"detail": "The gateway failed; see its log."}
    assert "a bug" in caplog.text
