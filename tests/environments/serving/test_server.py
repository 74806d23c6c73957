"""An environment server over real sockets: leases, limits, and what it says to whoever is not let in."""

import asyncio
import functools
import inspect
import re
import sys
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from bombus.bus import Bus
from bombus.environments.kinds import EnvironmentLost, EnvironmentsBusy, ResetFailed, ToolCall, ToolOutcome
from bombus.environments.pools.session import EnvSession, SessionSettings, StepRefused
from bombus.sdk import running
from tests.environments.serving.served import served
from tests.environments.serving.small_served import Clinging, Counter, Slow, Stubborn, Unmakeable
from tests.foreign_keys import foreign_keys
from tests.patience import until

TASK = {"task": {"main_query": "three", "task_id": "t1"}}


async def test_a_session_resets_and_steps_in_an_environment_of_its_own() -> None:
    async with served(slots=2) as (_, url), await EnvSession.open(url) as one, await EnvSession.open(url) as other:
        opened = await one.reset(TASK)
        assert opened.observation["messages"] == [{"role": "user", "content": "count for three"}]
        assert [tool["name"] for tool in opened.observation["tools"]] == ["add", "nap"]
        await other.reset(TASK)
        texts = [(await one.step({"tool": "add"})).observation["text"].split(":") for _ in range(2)]
        theirs = (await other.step({"tool": "add"})).observation["text"].split(":")
        assert [count for _, count in texts] == ["1", "2"]
        assert theirs[1] == "1"
        assert theirs[0] != texts[0][0]
        assert (await one.state())["step_count"] == 2


async def test_the_step_that_ends_an_episode_has_its_reward_and_no_step_follows_it() -> None:
    async with served() as (_, url), await EnvSession.open(url) as session:
        await session.reset(TASK)
        results = [await session.step({"tool": "add"}) for _ in range(3)]
        assert [(result.done, result.reward) for result in results] == [(False, None), (False, None), (True, 1.0)]
        with pytest.raises(StepRefused, match="the episode is over"):
            await session.step({"tool": "add"})
        await session.reset(TASK)
        ended = await session.step({"message": "I give up"})
        assert (ended.done, ended.reward) == (True, 0.0)


def wrapped(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that is no coroutine function, as decorators make them."""
    return functools.wraps(method)(lambda *given: method(*given))


async def test_what_a_session_keeps_of_its_steps_is_bounded() -> None:
    async with served() as (_, url), await EnvSession.open(url) as session:
        await session.reset({"task": {"main_query": "many"}})
        for _ in range(2):
            await session.step({"tool": "add", "arguments": {"x": "x" * 9_000_000}})
        with pytest.raises(StepRefused, match="an episode has at most 16777216 characters in its messages"):
            await session.step({"tool": "add"})
        await session.reset({"task": {"main_query": "many"}})
        await session.step({"tool": "add"})


async def test_an_environment_whose_methods_are_behind_decorators_is_served() -> None:
    class Decorated(Counter):
        call = wrapped(Counter.call)

    async with served(Decorated) as (_, url), await EnvSession.open(url) as session:
        await session.reset(TASK)
        assert (await session.step({"tool": "add"})).observation["text"].endswith(":1")


async def test_a_task_of_another_release_is_played_without_the_fields_that_are_not_known_here() -> None:
    async with served() as (_, url), await EnvSession.open(url) as session:
        opened = await session.reset({"task": {**TASK["task"], "field_of_another_release": 1}})
        assert opened.observation["messages"] == [{"role": "user", "content": "count for three"}]


async def test_one_too_many_is_refused_at_the_handshake() -> None:
    async with served() as (server, url), await EnvSession.open(url):
        with pytest.raises(EnvironmentsBusy, match=r"503: Environment pool exhausted: all 1 slots are taken"):
            await EnvSession.open(url)
        with pytest.raises(InvalidStatus) as refused:
            await connect(url.replace("http", "ws") + "/ws", proxy=None)
        assert refused.value.response.status_code == 503
        assert server.counts() == {"slots": 1, "leased": 1, "waiting": 0}


async def test_one_that_waits_gets_the_slot_that_is_given_back() -> None:
    async with served() as (server, url):
        first = await EnvSession.open(url)
        waiting = asyncio.create_task(EnvSession.open(url, SessionSettings(wait_s=60)))
        await until(lambda: server.counts()["waiting"] == 1)
        await first.close()
        async with await waiting as second:
            assert (await second.reset(TASK)).done is False


async def test_one_that_waits_is_refused_at_its_deadline() -> None:
    async with served(ttl_s=0.4) as (server, url), await EnvSession.open(url):
        with pytest.raises(EnvironmentsBusy, match=r"none became free in 0\.1 s"):
            await EnvSession.open(url, SessionSettings(wait_s=0.1))
        assert server.counts()["waiting"] == 0


async def test_one_that_leaves_while_it_waits_takes_no_slot() -> None:
    async with served() as (server, url):
        first = await EnvSession.open(url)
        waiting = asyncio.create_task(EnvSession.open(url, SessionSettings(wait_s=60)))
        await until(lambda: server.counts()["waiting"] == 1)
        waiting.cancel()
        await until(lambda: server.counts()["waiting"] == 0)
        await first.close()
        await until(lambda: server.counts()["leased"] == 0)


async def test_an_idle_session_loses_its_slot_and_is_refused_for_good() -> None:
    async with served(ttl_s=5, idle_s=0.3) as (server, url), await EnvSession.open(url) as session:
        await session.reset(TASK)
        await until(lambda: server.counts()["leased"] == 0)
        await until(lambda: session.is_dead)
        for _ in range(2):
            with pytest.raises(EnvironmentLost, match="the session was idle for too long"):
                await session.step({"tool": "add"})
        async with await EnvSession.open(url) as another:
            await another.reset(TASK)


async def test_a_long_step_is_neither_silence_nor_idleness() -> None:
    async with served(ttl_s=0.2, idle_s=0.2) as (_, url), await EnvSession.open(url) as session:
        await session.reset(TASK)
        assert (await session.step({"tool": "block"})).observation["failed"] is True


async def test_a_step_that_takes_too_long_ends_the_session() -> None:
    async with served(step_s=0.2) as (server, url):
        session = await EnvSession.open(url)
        await session.reset(TASK)
        with pytest.raises(EnvironmentLost, match=r"the step took longer than 0\.2 s"):
            await session.step({"tool": "hang"})
        await until(lambda: server.counts()["leased"] == 0)


async def test_an_environment_that_breaks_ends_the_session() -> None:
    async with served() as (server, url):
        session = await EnvSession.open(url)
        await session.reset(TASK)
        with pytest.raises(EnvironmentLost, match="its backend is gone"):
            await session.step({"tool": "break"})
        await until(lambda: server.counts()["leased"] == 0)


async def test_an_environment_that_cannot_be_opened_says_why_and_the_session_goes_on() -> None:
    async with served() as (_, url), await EnvSession.open(url) as session:
        with pytest.raises(ResetFailed, match="there is no such environment"):
            await session.reset({"fail": True})
        with pytest.raises(StepRefused, match="send a reset first"):
            await session.step({"tool": "add"})
        assert (await session.reset(TASK)).done is False
        with pytest.raises(ResetFailed, match="there is no such environment"):
            await session.reset({"fail": True})
        with pytest.raises(StepRefused, match="send a reset first"):  # that of the task before is not stepped in
            await session.step({"tool": "add"})


async def test_an_environment_that_cannot_be_made_is_told_at_the_handshake_and_holds_no_slot() -> None:
    async with served(Unmakeable) as (server, url):
        with pytest.raises(EnvironmentLost, match="500: RuntimeError: there is no disk"):
            await EnvSession.open(url)
        await until(lambda: server.counts()["leased"] == 0 and len(server.table.free) == 1)


class Leaving(Counter):
    """Ends the program as a script does, or so it thinks."""

    async def call(self, call: ToolCall) -> ToolOutcome:
        if call.name == "leave":
            sys.exit(3)
        if call.name == "cancel":
            raise asyncio.CancelledError
        return await super().call(call)

    async def close(self) -> None:
        sys.exit(4)


async def test_an_environment_that_leaves_the_program_ends_neither_the_server_nor_its_session() -> None:
    async with served(Leaving) as (server, url):
        async with await EnvSession.open(url) as session:
            await session.reset({})
            with pytest.raises(StepRefused, match=r"it raised SystemExit\(3\)"):
                await session.step({"tool": "leave"})
            with pytest.raises(StepRefused, match="raised a CancelledError, but it had not been cancelled"):
                await session.step({"tool": "cancel"})
            assert (await session.step({"tool": "add"})).observation["failed"] is False
        await until(lambda: server.counts()["leased"] == 0 and len(server.table.free) == 1)


@pytest.mark.parametrize("made", [Clinging, Stubborn])
async def test_an_environment_that_cannot_be_closed_does_not_keep_its_slot(
    made: type[Counter], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "CANCELLED_S", 0.05)
    async with served(made, close_s=0.2) as (server, url):
        async with await EnvSession.open(url) as session:
            await session.reset(TASK)
        await until(lambda: len(server.table.free) == 1)
    Stubborn.over.set()


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        ("{", "INVALID_JSON"),
        ("[]", "VALIDATION_ERROR"),
        ('{"type": "fly"}', "UNKNOWN_TYPE"),
        ('{"type": "step", "data": {"colour": 1}}', "VALIDATION_ERROR"),
        ('{"type": "reset", "data": {"task": 1}}', "VALIDATION_ERROR"),
        ('{"type": "reset", "data": {"fail": true}}', "EXECUTION_ERROR"),
    ],
)
async def test_what_makes_no_sense_is_answered_with_a_code_and_the_session_goes_on(sent: str, code: str) -> None:
    async with served() as (_, url), connect(url.replace("http", "ws") + "/ws", proxy=None) as socket:
        await socket.send(sent)
        assert f'"code":"{code}"' in str(await socket.recv())
        await socket.send('{"type": "state"}')
        assert '"type":"state"' in str(await socket.recv())


async def test_a_client_that_vanishes_in_the_middle_of_a_step_leaves_no_slot() -> None:
    async with served() as (server, url):
        session = await EnvSession.open(url)
        await session.reset(TASK)
        stepping = asyncio.create_task(session.step({"tool": "hang"}))
        await until(lambda: server.working() == 1)
        stepping.cancel()
        await until(lambda: server.counts()["leased"] == 0)
        assert session.is_dead


async def test_health_and_schema_are_there_and_strangers_are_not_let_in() -> None:
    async with served(slots=3) as (_, url), httpx.AsyncClient(base_url=url) as http:
        assert (await http.get("/health")).json() == {"status": "healthy", "slots": 3, "leased": 0, "waiting": 0}
        assert set((await http.get("/schema")).json()) == {"action", "observation", "state"}
        assert (await http.get("/metadata")).json() == {"name": "Counter", "description": inspect.getdoc(Counter)}
        described = (await http.get("/openapi.json")).json()
        assert described["info"]["title"] == "Counter"
        assert set(described["paths"]) == {"/health", "/metadata", "/schema", "/mcp", "/ws"}
        assert (await http.get("/nowhere")).status_code == 404
        assert (await http.get("/ws")).status_code == 426
        assert (await http.get("/health", headers={"Host": "evil.example"})).status_code == 421
        with pytest.raises(InvalidStatus, match="403"):
            await connect(url.replace("http", "ws") + "/ws", proxy=None, origin="http://evil.example")
        with pytest.raises(InvalidStatus, match="400"):
            await connect(url.replace("http", "ws") + "/ws?wait_s=soon", proxy=None)


async def test_a_server_with_a_key_lets_in_only_those_that_have_it() -> None:
    async with served(key="sesame") as (_, url):
        with pytest.raises(EnvironmentLost, match="401: this server needs its key"):
            await EnvSession.open(url)
        async with await EnvSession.open(url, SessionSettings(key="sesame")) as session:
            await session.reset(TASK)


ROUTES = {"/health", "/mcp", "/metadata", "/openapi.json", "/schema", "/ws"}


async def test_no_key_of_anybody_else_opens_a_route_of_a_server_with_a_key(bus: Bus) -> None:
    """A new route has to be added to the set above, which a server tells to whoever asks for an unknown one."""
    async with served(key="sesame-opens-this-one") as (server, url), httpx.AsyncClient(base_url=url) as http:
        right = {"authorization": "Bearer sesame-opens-this-one"}
        unknown = (await http.get("/no-such-page", headers=right)).json()["detail"]
        assert set(re.findall(r"/[a-z.]+", unknown)) == ROUTES
        foreign = await foreign_keys(bus, "sesame-opens-this-one")
        keys = [*foreign.items(), ("another case", "Sesame-opens-this-one")]
        for path in (*ROUTES, "/", "/no-such-page"):
            for method in ("GET", "POST"):
                for what, key in keys:
                    for headers in ({"authorization": f"Bearer {key}".strip()}, {"x-api-key": "sesame-opens-this-one"}):
                        refused = await http.request(method, path, headers=headers)
                        assert (refused.status_code, refused.json()["code"]) == (401, "bad_key"), (what, method, path)
            assert (await http.get(path, headers=right)).status_code != 401
        assert server.counts()["leased"] == 0
        for what, key in keys:
            bearer = {"authorization": f"Bearer {key}"}
            with pytest.raises(InvalidStatus) as status:
                await connect(f"{url.replace('http', 'ws')}/ws", additional_headers=bearer, proxy=None)
            assert status.value.response.status_code == 401, what


async def test_a_server_that_stops_ends_its_sessions() -> None:
    async with served() as (_, url):
        session = await EnvSession.open(url)
        await session.reset(TASK)
    with pytest.raises(EnvironmentLost):
        await session.step({"tool": "add"})
    with pytest.raises(EnvironmentLost, match="no environment server answers"):
        await EnvSession.open(url)


async def test_a_close_message_ends_the_connection() -> None:
    async with served() as (_, url), connect(url.replace("http", "ws") + "/ws", proxy=None) as socket:
        await socket.send('{"type": "close"}')
        with pytest.raises(ConnectionClosed):
            await socket.recv()
        assert socket.close_code == 1000


async def test_an_environment_whose_client_left_while_it_was_made_is_closed() -> None:
    async with served(Slow) as (server, url):
        opening = asyncio.create_task(EnvSession.open(url))
        await until(lambda: server.counts()["leased"] == 1)
        opening.cancel()
        await until(lambda: len(server.table.free) == 1)
        assert [environment.closed for environment in Slow.instances[-1:]] == [1]


async def test_a_server_that_is_stopping_opens_no_session() -> None:
    async with served(Clinging, slots=2, close_s=1) as (server, url):
        session = await EnvSession.open(url)
        await session.reset(TASK)
        stopping = asyncio.create_task(server.close())
        await until(lambda: server.counts()["leased"] == 0)
        with pytest.raises(EnvironmentsBusy, match="503: the server is stopping"):
            await EnvSession.open(url)
        await stopping
        assert len(server.table.free) == 2
