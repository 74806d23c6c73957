"""The page of a server with one slot: its own script is run, against a server, and does what a person clicks."""

import asyncio
import contextlib
import json
import re
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import InvalidStatus

from bombus.environments.serving.running import Deployment, deployed
from bombus.environments.serving.settings import ServingSettings
from bombus.machine.process import listen
from tests.patience import PATIENCE_S

PROGRAM = Path(__file__).parent / "programs/page.mjs"
COUNTER = "tests.environments.small_environments:Counter"
GOAL = '{"metadata": {"goal": 3}}'


@contextlib.asynccontextmanager
async def playground() -> AsyncIterator[tuple[str, str]]:
    """Serve an environment in one slot, and yield the server's URL and its page."""
    bound = listen("127.0.0.1", 0)
    async with deployed(Deployment(path=COUNTER, settings=ServingSettings(slots=1)), bound, {}):
        url = f"http://127.0.0.1:{bound.getsockname()[1]}"
        async with httpx.AsyncClient() as http:
            page = await http.get(url)
        assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
        yield url, page.text


def from_page(url: str) -> connect:
    """Connect as a browser does for the page's script."""
    return connect(url.replace("http", "ws") + "/ws", proxy=None, origin=url)


class Browser:
    """Runs the page's script, and carries what it sends to the server and back. Used with `async with`."""

    def __init__(self, url: str, html: str) -> None:
        self._url = url
        self._html = html
        self._socket: ClientConnection | None = None
        self._process: asyncio.subprocess.Process | None = None
        self.shown: dict[str, Any] = {}

    async def __aenter__(self) -> "Browser":
        self._process = await asyncio.create_subprocess_exec(
            "node", str(PROGRAM), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
        )
        await self._tell({"html": self._html, "host": self._url.removeprefix("http://")})
        asked = (await self._said())["socket"]
        assert asked == self._url.replace("http", "ws") + "/ws"
        try:
            self._socket = await from_page(self._url)
        except InvalidStatus:
            await self._told({"close": ""})
        else:
            await self._told({"open": True})
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._socket is not None:
            await self._socket.close()
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.close()
        assert await self._process.wait() == 0

    async def writes(self, place: str, text: str) -> None:
        await self._told({"type": [place, text]})

    async def clicks(self, button: str) -> dict[str, Any]:
        """Click a button, and return what is shown once the server has answered what the page sent, if it did."""
        sent = await self._told({"click": button})
        if sent is not None:
            assert self._socket is not None
            await self._socket.send(sent)
            await self._told({"message": await self._socket.recv()})
        return self.shown

    async def is_cut_off(self) -> None:
        await self._told({"close": "the lease lapsed"})

    async def _told(self, line: dict[str, Any]) -> str | None:
        """Tell the page something. Returns what it sends to the server then, None where that is nothing."""
        await self._tell(line)
        sent: str | None = None
        while "shown" not in (said := await self._said()):
            sent = said["send"]
        self.shown = said["shown"]
        return sent

    async def _tell(self, line: dict[str, Any]) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(line).encode() + b"\n")
        await self._process.stdin.drain()

    async def _said(self) -> dict[str, Any]:
        assert self._process is not None
        assert self._process.stdout is not None
        async with asyncio.timeout(PATIENCE_S):
            found: dict[str, Any] = json.loads(await self._process.stdout.readline())
        return found


async def test_each_request_of_the_page_is_answered_in_its_order() -> None:
    async with playground() as (url, html), from_page(url) as socket:
        assert re.findall(r'send\("(\w+)", \{ (\w+)', html) == [
            ("reset", "task"),
            ("step", "tool"),
            ("step", "message"),
        ]

        async def asked(kind: str, **data: object) -> dict[str, Any]:
            await socket.send(json.dumps({"type": kind, "data": data}))
            answer: dict[str, Any] = json.loads(await socket.recv())
            assert answer["type"] == "observation"
            found: dict[str, Any] = answer["data"]
            return found

        opened = await asked("reset", task=json.loads(GOAL))
        assert [tool["name"] for tool in opened["observation"]["tools"]] == ["add", "where", "fail"]
        called = await asked("step", tool="add", arguments={"amount": 3})
        assert called["observation"] == {"text": '{"count":3}', "failed": False}
        ended = await asked("step", message="It is 3.")
        assert (ended["done"], ended["reward"]) == (True, 1.5)


@pytest.mark.skipif(shutil.which("node") is None, reason="there is no node to run the page's script")
async def test_a_person_resets_calls_a_tool_and_answers_on_the_page() -> None:
    async with playground() as (url, html), Browser(url, html) as page:
        assert page.shown == {"state": "Connected.", "tools": [], "log": []}
        early = await page.clicks("call")
        assert early["log"][0][0] == "error"
        assert early["log"][0][1]["data"]["message"] == "the environment has no task yet: send a reset first"
        for wrong in ("{", "3", "null"):
            await page.writes("task", wrong)
            before = len(page.shown["log"])
            (kind, why), *rest = (await page.clicks("reset"))["log"]
            assert (kind, why.startswith("task: "), len(rest)) == ("error", True, before), "nothing is sent"
        await page.writes("task", GOAL)
        opened = await page.clicks("reset")
        assert opened["tools"] == ["add: Add to the count.", "where: Say where a point is.", "fail: Fail."]
        await page.writes("arguments", '{"amount": 3}')
        (_, answer), (kind, sent), *_ = (await page.clicks("call"))["log"]
        assert (kind, sent) == ("sent", {"type": "step", "data": {"tool": "add", "arguments": {"amount": 3}}})
        assert answer["data"]["observation"]["text"] == '{"count":3}'
        await page.writes("answer", "It is 3.")
        assert (await page.clicks("end"))["log"][0][1]["data"]["reward"] == 1.5
        await page.is_cut_off()
        assert page.shown["state"] == "The session is over: the lease lapsed. Reload for another."
        before = len(page.shown["log"])
        assert len((await page.clicks("end"))["log"]) == before, "the buttons are off"


@pytest.mark.skipif(shutil.which("node") is None, reason="there is no node to run the page's script")
async def test_a_second_page_says_that_somebody_else_has_the_slot() -> None:
    async with playground() as (url, html), from_page(url), Browser(url, html) as page:
        assert page.shown["state"] == "There is no session: somebody else has the slot. Reload for another."
