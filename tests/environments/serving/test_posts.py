"""Sessions over `POST /mcp`: they lapse without a sign of life, and no call is carried out in an environment of
nobody's."""

import asyncio
import contextlib
import threading
from typing import Any

import httpx
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from bombus.environments.openenv.messages import MESSAGE_BYTES_MAX, RpcError, WireMessage
from bombus.environments.serving.server import POSTS_MAX
from tests.environments.serving.served import served
from tests.environments.small_environments import Counter as PlainCounter
from tests.patience import until

TASK = '{"type": "reset", "data": {"task": {"main_query": "three"}}}'


class Poster:
    """Posts requests of JSON-RPC to a server."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.http = httpx.AsyncClient(base_url=url, timeout=60)

    async def ask(self, method: str, **params: Any) -> dict[str, Any]:
        body = {"jsonrpc": "2.0", "id": 7, "method": method, "params": params}
        answer = await self.http.post("/mcp", json=body)
        assert answer.status_code == 200
        found: dict[str, Any] = answer.json()
        assert (found["jsonrpc"], found["id"]) == ("2.0", 7)
        return found

    async def opened(self) -> str:
        return str((await self.ask("openenv/session/create"))["result"]["session_id"])

    async def why(self, method: str, **params: Any) -> str:
        return str((await self.ask(method, **params))["error"]["message"])

    def held(self, session: str) -> connect:
        """Connect to a session, which that holds from then on."""
        return connect(f"{self.url.replace('http', 'ws')}/ws?session_id={session}", proxy=None, ping_interval=None)

    async def __aenter__(self) -> "Poster":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.http.aclose()


async def test_a_session_that_was_posted_is_held_by_the_connection_to_it_and_ends_with_it() -> None:
    async with served(slots=2) as (server, url), Poster(url) as poster:
        session = await poster.opened()
        assert server.counts()["leased"] == 1
        assert await poster.why("tools/call", name="add", session_id=session) == (
            "the environment has no task yet: send a reset first"
        )
        async with poster.held(session) as socket:
            with pytest.raises(InvalidStatus, match="409"):
                await poster.held(session)
            await socket.send(TASK)
            await socket.recv()
            called = await poster.ask("tools/call", name="add", arguments={}, session_id=session)
            assert called["result"]["data"] == called["result"]["content"][0]["text"]
            assert called["result"]["data"].endswith(":1"), "the environment that the connection has reset"
            await socket.send('{"type": "step", "data": {"tool": "add"}}')
            assert ':2"' in str(await socket.recv())
        await until(lambda: server.counts()["leased"] == 0)
        assert "has ended, or does not exist" in await poster.why("tools/call", name="add", session_id=session)
        with pytest.raises(InvalidStatus, match="410"):
            await poster.held(session)


async def test_calls_that_were_posted_count_for_the_reward_of_the_step_that_ends_the_episode() -> None:
    async with served(PlainCounter) as (_, url), Poster(url) as poster:
        session = await poster.opened()
        async with poster.held(session) as socket:
            await socket.send('{"type": "reset", "data": {"task": {"metadata": {"goal": 3}}}}')
            await socket.recv()
            await poster.ask("tools/call", name="add", arguments={"amount": 3}, session_id=session)
            assert await poster.why("tools/call", name="fail", session_id=session) == "ValueError: as it was asked to"
            await socket.send('{"type": "step", "data": {"message": "done"}}')
            assert '"reward":1.5' in str(await socket.recv())
            assert "the episode is over" in await poster.why("tools/call", name="add", session_id=session)


async def test_the_tools_of_a_plain_class_are_known_before_a_reset_and_those_of_another_after_it() -> None:
    async with served(PlainCounter) as (_, url), Poster(url) as poster:
        tools = (await poster.ask("tools/list", session_id=await poster.opened()))["result"]["tools"]
        assert [tool["name"] for tool in tools] == ["add", "where", "fail"]
        assert tools[0]["inputSchema"]["required"] == ["amount"]
    async with served() as (_, url), Poster(url) as poster:
        assert "send a reset first" in await poster.why("tools/list", session_id=await poster.opened())


async def test_one_that_nobody_holds_lives_from_call_to_call_and_lapses_without_one() -> None:
    async with served(PlainCounter, ttl_s=1) as (server, url), Poster(url) as poster:
        session = await poster.opened()
        clock = asyncio.get_running_loop().time
        over_at = clock() + 2
        while clock() < over_at:
            await poster.ask("tools/list", session_id=session)
        await until(lambda: server.counts()["leased"] == 0)
        assert "has ended, or does not exist" in await poster.why("tools/list", session_id=session)


async def test_one_that_nobody_holds_does_not_lapse_in_the_middle_of_a_call() -> None:
    may_end = threading.Event()

    class Slow(PlainCounter):
        def wait(self) -> str:
            """Wait."""
            return str(may_end.wait())

    async with served(Slow, ttl_s=0.5) as (server, url), Poster(url) as poster:
        session = await poster.opened()
        seat = server._seats[session]
        assert seat.work is not None
        await seat.work.carry_out(WireMessage(type="reset", data={"task": {"metadata": {"goal": 3}}}))
        calling = asyncio.create_task(poster.ask("tools/call", name="wait", session_id=session))
        await until(lambda: server.working() == 1)
        clock = asyncio.get_running_loop().time
        over_at = clock() + 1
        await until(lambda: clock() > over_at)
        may_end.set()
        assert (await calling)["result"]["data"] == "True"


async def test_one_whose_connection_is_silent_lapses_also_in_the_middle_of_a_call() -> None:
    async with served(ttl_s=0.5) as (server, url), Poster(url) as poster:
        session = await poster.opened()
        async with poster.held(session) as socket:
            await socket.send(TASK)
            await socket.recv()
            socket.transport.pause_reading()  # so that it answers no ping
            assert "before the call was carried out" in await poster.why("tools/call", name="hang", session_id=session)
            await until(lambda: len(server.table.free) == 1)
            socket.transport.abort()


async def test_messages_of_a_connection_and_calls_by_post_are_carried_out_one_at_a_time() -> None:
    under_way: list[int] = []

    class Alone(PlainCounter):
        tools_run_together = True

        async def alone(self) -> str:
            """Say how many are under way."""
            under_way.append(1)
            await asyncio.sleep(0.01)
            seen = len(under_way)
            under_way.pop()
            return str(seen)

    async with served(Alone) as (_, url), Poster(url) as poster:
        session = await poster.opened()
        async with poster.held(session) as socket:
            await socket.send('{"type": "reset", "data": {"task": {"metadata": {"goal": 3}}}}')
            await socket.recv()
            calls = [asyncio.create_task(poster.ask("tools/call", name="alone", session_id=session)) for _ in range(4)]
            await socket.send('{"type": "step", "data": {"tool": "alone"}}')
            assert '"text":"1"' in str(await socket.recv())
            assert [(await call)["result"]["data"] for call in calls] == ["1"] * 4


async def test_one_that_is_closed_gives_its_slot_back_and_closing_again_does_nothing() -> None:
    async with served() as (server, url), Poster(url) as poster:
        session = await poster.opened()
        assert "Environment pool exhausted: all 1 slots are taken" in await poster.why("openenv/session/create")
        for _ in range(2):
            closed = await poster.ask("openenv/session/close", session_id=session)
            assert closed["result"] == {"session_id": session, "closed": True}
        await until(lambda: len(server.table.free) == 1)


async def test_one_that_waits_for_a_slot_gets_it_and_one_that_leaves_takes_none() -> None:
    async with served() as (server, url), Poster(url) as poster:
        first = await poster.opened()
        body = {"jsonrpc": "2.0", "id": 1, "method": "openenv/session/create"}
        leaving = asyncio.create_task(poster.http.post("/mcp?wait_s=60", json=body))
        await until(lambda: server.counts()["waiting"] == 1)
        leaving.cancel()
        await until(lambda: server.counts()["waiting"] == 0)
        waiting = asyncio.create_task(poster.http.post("/mcp?wait_s=60", json=body))
        await until(lambda: server.counts()["waiting"] == 1)
        await poster.ask("openenv/session/close", session_id=first)
        assert (await waiting).json()["result"]["session_id"] != first


async def test_a_client_that_leaves_in_the_middle_of_a_call_ends_its_session() -> None:
    async with served() as (server, url), Poster(url) as poster:
        session = await poster.opened()
        async with poster.held(session) as socket:
            await socket.send(TASK)
            await socket.recv()
            calling = asyncio.create_task(poster.ask("tools/call", name="hang", session_id=session))
            await until(lambda: server.working() == 1)
            calling.cancel()
            await until(lambda: server.counts()["leased"] == 0)


async def test_a_call_that_takes_too_long_and_an_environment_that_breaks_end_the_session() -> None:
    for tool, why in (("hang", "the mcp took longer than 0.2 s"), ("break", "its backend is gone")):
        async with served(step_s=0.2) as (server, url), Poster(url) as poster:
            session = await poster.opened()
            async with poster.held(session) as socket:
                await socket.send(TASK)
                await socket.recv()
                assert why in await poster.why("tools/call", name=tool, session_id=session)
                await until(lambda: server.counts()["leased"] == 0)


class Hanging(PlainCounter):
    """Has tools that take too long, and end in different ways once they are cancelled."""

    async def let_it_out(self) -> None:
        """End as a coroutine does that does not catch it."""
        await asyncio.Event().wait()

    async def swallow(self) -> None:
        """Return."""
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()

    async def raise_another(self) -> None:
        """Raise something else."""
        try:
            await asyncio.Event().wait()
        finally:
            raise ValueError("it could not be undone")


@pytest.mark.parametrize("tool", ["let_it_out", "swallow", "raise_another"])
async def test_a_call_that_takes_too_long_is_told_to_its_client_and_to_the_connection(tool: str) -> None:
    async with served(Hanging, step_s=0.2) as (_, url), Poster(url) as poster:
        session = await poster.opened()
        async with poster.held(session) as socket:
            await socket.send('{"type": "reset", "data": {"task": {"metadata": {"goal": 3}}}}')
            await socket.recv()
            assert "the mcp took longer than 0.2 s" in await poster.why("tools/call", name=tool, session_id=session)
            await socket.wait_closed()
            assert (socket.close_code, socket.close_reason) == (4500, "the environment broke")


async def test_a_call_that_goes_on_after_its_time_is_answered_all_the_same() -> None:
    may_end = asyncio.Event()

    class GoingOn(PlainCounter):
        async def go_on(self) -> None:
            """Go on until it may end."""
            while not may_end.is_set():
                with contextlib.suppress(asyncio.CancelledError):
                    await may_end.wait()

    async with served(GoingOn, step_s=0.2, close_s=0.1) as (_, url), Poster(url) as poster:
        session = await poster.opened()
        async with poster.held(session) as socket:
            await socket.send('{"type": "reset", "data": {"task": {"metadata": {"goal": 3}}}}')
            await socket.recv()
            assert "the mcp took longer than 0.2 s" in await poster.why("tools/call", name="go_on", session_id=session)
        may_end.set()


async def test_a_session_has_so_many_calls_under_way_and_no_more() -> None:
    async with served() as (server, url), Poster(url) as poster:
        session = await poster.opened()
        async with poster.held(session) as socket:
            await socket.send(TASK)
            await socket.recv()
            calls = [
                asyncio.create_task(poster.ask("tools/call", name="nap", session_id=session)) for _ in range(POSTS_MAX)
            ]
            await until(lambda: sum(seat.posts for seat in server._seats.values()) == POSTS_MAX)
            assert f"{POSTS_MAX} calls of this session are in progress" in await poster.why(
                "tools/call", name="add", session_id=session
            )
            assert [(await call)["result"]["data"] for call in calls] == ["rested"] * POSTS_MAX
            assert (await poster.ask("tools/call", name="nap", session_id=session))["result"]["data"] == "rested"


@pytest.mark.parametrize(
    ("body", "code", "why"),
    [
        (b"{", RpcError.PARSE, "the body is not JSON"),
        (b"[]", RpcError.INVALID_REQUEST, "the body must be one request"),
        (b'{"method": "tools/list", "params": 3}', RpcError.INVALID_REQUEST, "`$.params`"),
        (b'{"method": "tools/list"}', RpcError.INVALID_PARAMS, "params have no session_id"),
        (b'{"method": "tools/list", "params": {"session_id": "x"}}', RpcError.SERVER, "session 'x' has ended"),
    ],
)
async def test_a_request_that_makes_no_sense_is_answered_in_a_sentence(body: bytes, code: int, why: str) -> None:
    async with served() as (_, url), httpx.AsyncClient(base_url=url) as http:
        error = (await http.post("/mcp", content=body)).json()["error"]
    assert error["code"] == code
    assert why in error["message"]


async def test_a_method_that_there_is_not_is_named_and_the_session_goes_on() -> None:
    async with served(PlainCounter) as (_, url), Poster(url) as poster:
        session = await poster.opened()
        assert "'initialize' is not a method" in await poster.why("initialize", session_id=session)
        assert (await poster.ask("tools/list", session_id=session))["result"]["tools"]


async def test_who_may_not_connect_may_not_post() -> None:
    async with served(key="sesame") as (server, url), httpx.AsyncClient(base_url=url) as http:
        body = {"method": "openenv/session/create"}
        assert (await http.post("/mcp", json=body)).status_code == 401
        foreign = {"Authorization": "Bearer sesame", "Origin": "http://evil.example"}
        assert (await http.post("/mcp", json=body, headers=foreign)).status_code == 403
        assert server.counts()["leased"] == 0
        let_in = await http.post("/mcp", json=body, headers={"Authorization": "Bearer sesame"})
        assert let_in.json()["result"]["session_id"]
    async with served() as (_, url), httpx.AsyncClient(base_url=url) as http:
        assert (await http.post("/mcp", json=body, headers={"Host": "evil.example"})).status_code == 421
        assert (await http.post("/reset", json=body)).status_code == 404
        assert (await http.post("/mcp?wait_s=soon", json=body)).status_code == 400
        assert (await http.post("/mcp", content=b"x" * (3 * MESSAGE_BYTES_MAX))).status_code == 413


async def raw(url: str, *parts: bytes) -> bytes:
    """Send bytes in parts, and return all that comes back."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
    for part in parts:
        writer.write(part)
        await writer.drain()
        await asyncio.sleep(0)
    answer = await reader.read()
    writer.close()
    return answer


async def test_a_request_may_come_in_any_parts_and_one_that_is_not_http_is_refused() -> None:
    body = b'{"id": 1, "method": "openenv/session/create"}'
    head = b"POST /mcp HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: %d\r\n\r\n" % len(body)
    async with served(slots=2) as (_, url):
        whole = head + body
        assert b'"session_id"' in await raw(url, *(whole[at : at + 1] for at in range(len(whole))))
        waits = head.replace(b"Content-Length", b"Expect: 100-continue\r\nContent-Length")
        assert (await raw(url, waits, body)).startswith(b"HTTP/1.1 100 \r\n\r\nHTTP/1.1 200 OK")
        assert b" 400 " in (await raw(url, b"POST nonsense\r\n\r\n")).splitlines()[0]
        for method in (b"GET", b"POST"):
            for wrong in (
                b"//[ HTTP/1.1",
                b"/mcp HTTP/1.1\r\nOrigin: http://[",
                b"/mcp HTTP/1.1\r\nOrigin: a\r\nOrigin: b",
            ):
                answer = await raw(url, b"%s %s\r\nHost: 127.0.0.1\r\n\r\n" % (method, wrong))
                assert answer[9:12] in (b"400", b"403"), (method, wrong, answer)
        assert b" 426 " in (await raw(url, b"G", b"ET /ws HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")).splitlines()[0]
