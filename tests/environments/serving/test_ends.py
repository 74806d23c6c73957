"""How sessions end: whatever is under way then, no slot is lost, and no backend is shared."""

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import httpx
import pytest
from websockets.asyncio.client import connect

from bombus import Task, reward
from bombus.environments.backends.kinds import Backend
from bombus.environments.backends.pool import BackendPool
from bombus.environments.kinds import (
    AgentEnvironment,
    EnvironmentLost,
    EnvironmentsBusy,
    Opening,
    RolloutScores,
    ToolCall,
    ToolOutcome,
    ToolSchema,
    Transcript,
)
from bombus.environments.pools.session import EnvSession, SessionSettings
from bombus.environments.serving.admission import NotLetIn
from bombus.environments.serving.server import EnvironmentServer
from bombus.environments.serving.settings import ServingSettings
from bombus.machine.host_names import OwnHostNames
from tests.environments.serving.served import served
from tests.environments.serving.small_served import Clinging, Counter
from tests.patience import PATIENCE_S, until


class LeavingSource:
    """Makes counters. While it cleans what stood under the first one, the client that waits for the slot leaves."""

    exhausted = "Environment pool exhausted"

    def __init__(self, leaving: asyncio.Future[Any]) -> None:
        self._leaving = leaving

    async def make(self, session: str, is_stopped: Callable[[], bool]) -> AgentEnvironment:
        return Counter()

    async def renew(self, session: str) -> None: ...

    async def check(self, session: str) -> None: ...

    async def clean(self, session: str, in_use: bool) -> None:
        if not self._leaving.done():
            self._leaving.set_result(None)

    def tools(self) -> Sequence[ToolSchema]:
        return ()

    def metadata(self) -> dict[str, str]:
        return {}

    def schema(self) -> dict[str, object]:
        return {}


async def test_a_session_whose_environment_broke_gives_its_slot_back_while_its_client_is_still_there() -> None:
    async with served() as (server, url), connect(url.replace("http", "ws") + "/ws") as socket:
        for message in ('{"type": "reset"}', '{"type": "step", "data": {"tool": "break"}}'):
            await socket.send(message)
            told = await socket.recv()
        assert "SESSION_ERROR" in str(told)
        await until(lambda: len(server.table.free) == 1)
        await socket.wait_closed()
        assert (socket.close_code, socket.close_reason) == (4500, "the environment broke")


async def test_p5_a_client_that_leaves_in_the_moment_in_which_it_is_granted_a_slot_does_not_take_it_along() -> None:
    staying, leaving = asyncio.Future[Any](), asyncio.Future[Any]()
    server = EnvironmentServer(ServingSettings(), LeavingSource(leaving), OwnHostNames("127.0.0.1"))
    first = await server.open_by_post(0, staying)
    waiting = asyncio.create_task(server.open_by_post(60, leaving))
    await until(lambda: server.counts()["waiting"] == 1)
    server.close_by_post(first)
    with pytest.raises(NotLetIn):
        await waiting
    await until(lambda: not server.table.cleaning)
    assert (list(server.table.free), server.counts()["leased"]) == ([0], 0)
    second = await server.open_by_post(0, staying)
    server.close_by_post(second)
    await server.close()


async def test_a_client_that_is_cancelled_in_the_queue_leaves_it() -> None:
    staying = asyncio.Future[Any]()
    server = EnvironmentServer(ServingSettings(), LeavingSource(staying), OwnHostNames("127.0.0.1"))
    first = await server.open_by_post(0, asyncio.Future[Any]())
    waiting = asyncio.create_task(server.open_by_post(60, asyncio.Future[Any]()))
    await until(lambda: server.counts()["waiting"] == 1)
    waiting.cancel()
    await until(waiting.done)
    assert server.counts() == {"slots": 1, "leased": 1, "waiting": 0}
    server.close_by_post(first)
    await server.close()


async def test_a_server_that_stops_is_not_held_up_by_those_that_wait_for_a_slot_and_tells_them() -> None:
    body = {"id": 1, "method": "openenv/session/create"}
    async with asyncio.timeout(PATIENCE_S), httpx.AsyncClient(timeout=PATIENCE_S) as http:
        async with served() as (server, url):
            holding = await EnvSession.open(url)
            waiting = asyncio.create_task(EnvSession.open(url, SessionSettings(wait_s=600)))
            posting = asyncio.create_task(http.post(f"{url}/mcp?wait_s=600", json=body))
            await until(lambda: server.counts()["waiting"] == 2)
        with pytest.raises(EnvironmentsBusy, match="the server is stopping"):
            await waiting
        assert "the server is stopping" in (await posting).json()["error"]["message"]
        assert holding.is_dead


class Loud(Counter):
    async def call(self, call: ToolCall) -> ToolOutcome:
        return ToolOutcome(text="\1" * 1_000_000)  # in JSON six times as many bytes: more than sockets buffer


async def test_a_client_that_does_not_read_does_not_keep_a_server_from_stopping() -> None:
    async with asyncio.timeout(PATIENCE_S):
        async with served(Loud) as (server, url):
            narrow = socket.socket()
            narrow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            narrow.connect(("127.0.0.1", int(url.rpartition(":")[2])))
            client = await connect(f"{url.replace('http', 'ws')}/ws", sock=narrow)
            await client.send('{"type": "reset"}')
            await client.recv()
            client.transport.pause_reading()
            await client.send('{"type": "step", "data": {"tool": "shout"}}')
            (connection,) = server._sessions
            await until(lambda: connection.transport.get_write_buffer_size() > 1_000_000)
    client.transport.abort()


class Memory:
    """A backend in this process. It starts once it may."""

    def __init__(self, may_start: asyncio.Event) -> None:
        self.address = "here"
        self.is_stopped = False
        self.scrubs = 0
        self._may_start = may_start

    async def start(self) -> None:
        await self._may_start.wait()

    async def is_healthy(self) -> bool:
        return not self.is_stopped

    async def scrub(self) -> None:
        self.scrubs += 1

    async def stop(self) -> None:
        self.is_stopped = True


class Memories:
    """Makes backends in this process, and keeps them."""

    def __init__(self) -> None:
        self.made: list[Memory] = []
        self.may_start = asyncio.Event()
        self.may_start.set()

    def make(self, number: int) -> Backend:
        self.made.append(Memory(self.may_start))
        return self.made[-1]


class Blocking:
    """Its methods, which are no coroutines, end when they may."""

    may_end: ClassVar[threading.Event]
    is_slow_to_make: ClassVar[bool] = False
    made: ClassVar[list["Blocking"]]

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.is_closed = False
        if self.is_slow_to_make:
            self.may_end.wait()
        self.made.append(self)

    def reset(self, task: Task) -> str:
        return "go"

    def write(self) -> str:
        """Write something into the backend."""
        self.may_end.wait()
        return "written"

    @reward
    def always(self) -> float:
        return 1.0

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def blocking() -> type[Blocking]:
    class Fresh(Blocking):
        may_end = threading.Event()
        made: ClassVar[list[Blocking]] = []

    return Fresh


async def test_p3_a_backend_in_which_a_tool_goes_on_is_not_given_to_another_session(blocking: type[Blocking]) -> None:
    memories = Memories()
    async with BackendPool(memories.make, 1) as backends, served(blocking, backends, close_s=0.2) as (server, url):
        session = await EnvSession.open(url)
        await session.reset({})
        writing = asyncio.create_task(session.step({"tool": "write"}))
        await until(lambda: server.working() == 1)
        writing.cancel()
        async with await EnvSession.open(url, SessionSettings(wait_s=60)) as another:
            await another.reset({})
            assert len(memories.made) == 2
            assert memories.made[0].is_stopped, "what goes on there finds nothing any more"
            assert blocking.made[1].backend is memories.made[1]
        blocking.may_end.set()


async def test_p3_nor_is_that_of_a_call_by_post_whose_client_left(blocking: type[Blocking]) -> None:
    memories, gone = Memories(), asyncio.Future[Any]()
    async with BackendPool(memories.make, 1) as backends, served(blocking, backends, close_s=0.2) as (server, url):
        session = await server.open_by_post(0, asyncio.Future[Any]())
        async with connect(f"{url.replace('http', 'ws')}/ws?session_id={session}", proxy=None) as socket:
            await socket.send('{"type": "reset"}')
            await socket.recv()
            call = {"method": "tools/call", "params": {"name": "write"}}
            writing = asyncio.create_task(server.call_by_post(session, call, gone))
            await until(lambda: server.working() == 1)
            gone.set_result(None)
            with pytest.raises(NotLetIn, match="the session ended before the call was carried out"):
                await writing
            await until(lambda: len(server.table.free) == 1)
        assert memories.made[0].is_stopped, "the tool goes on there"
        blocking.may_end.set()


async def test_p3_a_backend_of_a_step_that_took_too_long_is_replaced(blocking: type[Blocking]) -> None:
    memories = Memories()
    async with BackendPool(memories.make, 1) as backends, served(blocking, backends, step_s=0.2) as (server, url):
        session = await EnvSession.open(url)
        await session.reset({})
        with pytest.raises(EnvironmentLost, match="took longer than"):
            await session.step({"tool": "write"})
        await until(lambda: len(server.table.free) == 1)
        assert memories.made[0].is_stopped
        blocking.may_end.set()


class Deaf(Blocking):
    """Its coroutines return when they are cancelled, and leave a thread that goes on."""

    may_end = threading.Event()
    made: ClassVar[list[Blocking]] = []

    async def _hold(self) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.to_thread(self.may_end.wait)

    async def reset(self, task: Task) -> str:  # type: ignore[override]
        if task.metadata.get("slow"):
            await self._hold()
        return "go"

    async def write(self) -> str:  # type: ignore[override]
        """Write something into the backend."""
        await self._hold()
        return "given up"

    @reward
    async def always(self) -> float:  # type: ignore[override]
        await self._hold()
        return 1.0


class DeafAsItStands:
    """The same, as an `AgentEnvironment`."""

    def __init__(self, backend: Backend) -> None:
        self._plain = Deaf(backend)

    async def open(self, task: Task) -> Opening:
        return Opening(messages=[{"role": "user", "content": await self._plain.reset(task)}])

    async def call(self, call: ToolCall) -> ToolOutcome:
        return ToolOutcome(text=await self._plain.write())

    async def is_over(self, transcript: Transcript) -> bool:
        return False

    async def score(self, transcript: Transcript) -> RolloutScores:
        return RolloutScores(reward=await self._plain.always())

    async def close(self) -> None: ...


@pytest.mark.parametrize("made", [Deaf, DeafAsItStands])
@pytest.mark.parametrize("late", ["reset", "tool", "score"])
async def test_p3_so_is_that_of_a_message_that_returned_when_it_was_cancelled(made: type, late: str) -> None:
    async def play(session: EnvSession) -> None:
        await session.reset({"slow": late == "reset"})
        await session.step({"tool": "write"} if late == "tool" else {"message": "done"})

    Deaf.may_end.clear()
    memories = Memories()
    async with BackendPool(memories.make, 1) as backends, served(made, backends, step_s=0.2) as (server, url):
        with pytest.raises(EnvironmentLost, match="took longer than"):
            await play(await EnvSession.open(url))
        await until(lambda: len(server.table.free) == 1)
        was_stopped = memories.made[0].is_stopped
        Deaf.may_end.set()
        assert was_stopped


async def test_p3_no_message_follows_one_that_took_too_long_in_its_session(
    blocking: type[Blocking],
) -> None:
    memories = Memories()
    async with BackendPool(memories.make, 1) as backends, served(blocking, backends, step_s=0.2) as (server, url):
        session = await server.open_by_post(0, asyncio.Future[Any]())
        async with connect(f"{url.replace('http', 'ws')}/ws?session_id={session}", proxy=None) as socket:
            await socket.send('{"type": "reset"}')
            await socket.recv()
            call = {"method": "tools/call", "params": {"name": "write"}}
            writing = asyncio.create_task(server.call_by_post(session, call, asyncio.Future[Any]()))
            await until(lambda: server.working() == 1)
            with pytest.raises(NotLetIn, match="the session ended before the call was carried out"):
                await server.call_by_post(session, {"method": "tools/list"}, asyncio.Future[Any]())
            assert "took longer than" in (await writing).data["message"]
            await until(lambda: len(server.table.free) == 1)
        assert memories.made[0].is_stopped, "the tool goes on there"
        blocking.may_end.set()


async def test_a_backend_of_a_session_that_was_idle_at_its_end_is_scrubbed_and_kept(blocking: type[Blocking]) -> None:
    memories = Memories()
    blocking.may_end.set()
    async with BackendPool(memories.make, 1) as backends, served(blocking, backends) as (server, url):
        async with await EnvSession.open(url) as session:
            await session.reset({})
            await session.step({"tool": "write"})
        await until(lambda: len(server.table.free) == 1)
        assert (len(memories.made), memories.made[0].scrubs) == (1, 2), "at the reset, and at the end"
        assert blocking.made[0].is_closed


async def test_p3_a_backend_of_an_environment_that_was_not_closed_is_replaced() -> None:
    class ClingingTo(Clinging):
        def __init__(self, backend: Backend) -> None:
            super().__init__()

    memories = Memories()
    async with BackendPool(memories.make, 1) as backends, served(ClingingTo, backends, close_s=0.2) as (_, url):
        await (await EnvSession.open(url)).close()
        async with await EnvSession.open(url, SessionSettings(wait_s=60)):
            assert memories.made[0].is_stopped


async def test_a_client_that_leaves_while_its_environment_is_made_by_post_leaves_no_slot(
    blocking: type[Blocking],
) -> None:
    blocking.is_slow_to_make = True
    leaving = asyncio.Future[Any]()
    async with BackendPool(Memories().make, 1) as backends, served(blocking, backends) as (server, _):
        opening = asyncio.create_task(server.open_by_post(0, leaving))
        await until(lambda: server.counts()["leased"] == 1)
        leaving.set_result(None)
        blocking.may_end.set()
        await opening
        assert server.counts()["leased"] == 0


async def test_a_session_that_was_over_before_its_backend_had_started_does_not_keep_it(
    blocking: type[Blocking],
) -> None:
    memories = Memories()
    async with BackendPool(memories.make, 1) as backends, served(blocking, backends, close_s=0.2) as (server, url):
        memories.may_start.clear()
        session = await EnvSession.open(url)
        memories.made[0].is_stopped = True
        await session.close()
        await until(lambda: backends.counts()["replacing"] == 1)
        opening = asyncio.create_task(EnvSession.open(url, SessionSettings(wait_s=60)))
        await until(lambda: server.counts()["leased"] == 1)
        opening.cancel()
        await until(lambda: len(server.table.free) == 1)
        memories.may_start.set()
        await until(lambda: backends.counts() == {"ready": 1, "bound": 0, "replacing": 0})
        async with await EnvSession.open(url) as another:
            await another.reset({})


async def test_an_environment_that_is_made_after_its_session_was_over_is_closed(blocking: type[Blocking]) -> None:
    memories = Memories()
    blocking.is_slow_to_make = True
    async with BackendPool(memories.make, 1) as backends, served(blocking, backends, close_s=0.2) as (server, url):
        opening = asyncio.create_task(EnvSession.open(url))
        await until(lambda: server.counts()["leased"] == 1)
        opening.cancel()
        await until(lambda: len(server.table.free) == 1)
        assert memories.made[0].is_stopped, "the class may still use it"
        blocking.may_end.set()
        await until(lambda: blocking.made and blocking.made[0].is_closed)
