"""A gateway and a coordinator whose processes may open no more files: they say so, and go on once they may again."""

import asyncio
import resource
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from bombus.bus import Bus, EmbeddedServer
from bombus.hive.generation import replica_key
from bombus.hive.subjects import SIGNING_SECRET
from tests.conftest import kill
from tests.effort import long_only
from tests.gateway.openai_hive import JOB, MODEL, GatewayHive
from tests.patience import PATIENCE_S

STANDARD = 3  # files that every process has


class Service:
    """A service in a process of its own."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._limits = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)

    def starve(self) -> None:
        """Let it open no file more, until it closes one. It keeps those that are open."""
        has = {int(each.name) for each in Path(f"/proc/{self._process.pid}/fd").iterdir()}
        self._allow(min(set(range(len(has) + 1)) - has))

    def starve_for_good(self) -> None:
        """Let it open no file more, whichever it closes."""
        self._allow(STANDARD)

    def _allow(self, files: int) -> None:
        resource.prlimit(self._process.pid, resource.RLIMIT_NOFILE, (files, self._limits[1]))

    def feed(self) -> None:
        resource.prlimit(self._process.pid, resource.RLIMIT_NOFILE, self._limits)

    async def said(self, what: str) -> str:
        """Wait for a line of its log, and return it."""
        assert self._process.stderr is not None
        async with asyncio.timeout(3 * PATIENCE_S):
            while line := (await self._process.stderr.readline()).decode():
                if what in line:
                    return line
        raise AssertionError(f"it ended before it said {what!r}")


@asynccontextmanager
async def service(name: str, server: EmbeddedServer, *more: str) -> AsyncIterator[Service]:
    words = ("-m", "bombus", name, "--hive", "h", "--nats", server.url, *more)
    process = await asyncio.create_subprocess_exec(sys.executable, *words, stdout=DEVNULL, stderr=PIPE)
    try:
        yield Service(process)
    finally:
        process.terminate()
        await process.communicate()
        assert process.returncode == 0


class Agent:
    """Plays one episode over one connection."""

    def __init__(self, url: str) -> None:
        self._http = httpx.AsyncClient(base_url=url, timeout=PATIENCE_S)
        self._key = ""

    async def claim(self) -> str:
        body = {"client_uuid": "c", "claim_id": "k", "count": 1, "wait_s": PATIENCE_S}
        (episode,) = (await self._http.post("/claim_episodes", json=body)).json()["episodes"]
        self._key = episode["openai_api_key"]
        return str(episode["episode_uuid"]).partition(".")[0]

    async def call(self, http: httpx.AsyncClient | None = None) -> httpx.Response:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}
        headers = {"Authorization": f"Bearer {self._key}"}
        return await (http or self._http).post("/v1/chat/completions", json=body, headers=headers)

    async def call_anew(self) -> httpx.Response:
        """Make a call over a new connection."""
        async with httpx.AsyncClient(base_url=self._http.base_url, timeout=PATIENCE_S) as http:
            return await self.call(http)


@long_only
async def test_without_open_files_services_say_so_go_on_once_there_are_some_and_lose_nothing(
    crashing: tuple[EmbeddedServer, Bus],
) -> None:
    server, bus = crashing
    hive = GatewayHive(bus)
    hive.replica.key = replica_key(await bus.secret(SIGNING_SECRET))
    following = asyncio.create_task(hive.follower.run())
    async with service("coordinator", server) as coordinator, service("gateway", server, "--port", "0") as gateway:
        await hive.start(JOB)
        keeping = asyncio.create_task(hive.keep_replicas())
        agent = Agent(f"http://{(await gateway.said('listening at')).split()[-1]}")
        await gateway.said("the gateway is ready")
        episode = await agent.claim()
        assert (await agent.call()).status_code == 200

        gateway.starve()
        assert "Too many open files: no connection can be accepted or made" in await gateway.said("error")
        assert (await agent.call()).status_code == 200, "what is open goes on"
        with pytest.raises(httpx.TransportError):
            await agent.call_anew()
        gateway.starve_for_good()
        hive.replica.drop()
        refused = await agent.call()
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_replica")
        assert "Too many open files; try again in a moment" in refused.text
        gateway.feed()
        await gateway.said("files and connections can be opened again")
        assert (await agent.call_anew()).status_code == 200

        kill(server)
        for each in (coordinator, gateway):
            await each.said("the connection to the bus is lost")
            each.starve_for_good()
        await asyncio.to_thread(server.start)
        for each in (coordinator, gateway):
            await each.said("nats: OSError: [Errno 24] Too many open files")
            each.feed()
        for each in (coordinator, gateway):
            await each.said("the bus is back")
        assert (await agent.call_anew()).status_code == 200
        assert len(await hive.calls(episode, 4)) == 4, "each call that was answered is noted, and no other"
        for task in (keeping, following):
            task.cancel()
        await hive.replica.stop()
