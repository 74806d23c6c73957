"""The messages of a session in its environment: what cancels one of them, and what that leaves of the session."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from bombus.environments.kinds import (
    AgentEnvironment,
    EnvironmentLost,
    Opening,
    RolloutScores,
    ToolCall,
    ToolOutcome,
    Transcript,
)
from bombus.environments.openenv.messages import WireMessage
from bombus.environments.plain.marks import metric, reward
from bombus.environments.pools.remote import RemoteEnvironment
from bombus.environments.pools.session import EnvSession
from bombus.environments.serving.server import EnvironmentServer
from bombus.environments.serving.work import SessionWork
from bombus.sdk.types import Task
from tests.environments.serving.served import served
from tests.environments.serving.small_served import Counter
from tests.patience import until


async def cancel_itself() -> str:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    return "done"


async def await_one_that_it_cancelled() -> str:
    other = asyncio.create_task(asyncio.sleep(3600))
    other.cancel()
    await other
    return "done"


async def do_so_after_a_group_that_failed() -> str:
    async def fail() -> None:
        raise ValueError("it fails")

    async def fail_together() -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(fail())
            await asyncio.sleep(3600)

    with pytest.raises(ExceptionGroup):
        await fail_together()
    task = asyncio.current_task()
    assert task is not None
    if not task.cancelling():  # as some versions of Python leave it
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.sleep(3600)
    return await await_one_that_it_cancelled()


async def cancel_itself_later() -> str:
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().call_soon(task.cancel)
    return "done"


WAYS = [cancel_itself, await_one_that_it_cancelled, do_so_after_a_group_that_failed]


async def messages_of(socket: ClientConnection) -> AsyncIterator[str]:
    """Yield what comes until the connection ends, however it does."""
    with contextlib.suppress(ConnectionClosed):
        while True:
            yield str(await socket.recv())


class Cancelling:
    """An environment that cancels itself in one of the ways. `well` works."""

    def __init__(self) -> None:
        self.way = 0

    async def reset(self, task: Task) -> str:
        self.way = int(task.metadata.get("way", 0))
        if task.metadata.get("at_once"):
            await WAYS[self.way]()
        return "go"

    async def cancel(self) -> str:
        """Cancel itself."""
        return await WAYS[self.way]()

    async def cancel_later(self) -> str:
        """Cancel itself when it has returned."""
        return await cancel_itself_later()

    async def well(self) -> str:
        """Take a moment."""
        await asyncio.sleep(0.01)
        return "well"

    @reward
    def always(self) -> float:
        return 1.0

    @metric
    def failures(self, transcript: Transcript) -> int:
        return transcript.tool_failures


class CancellingAsItStands:
    """The same, as an `AgentEnvironment`."""

    def __init__(self) -> None:
        self._plain = Cancelling()

    async def open(self, task: Task) -> Opening:
        return Opening(messages=[{"role": "user", "content": await self._plain.reset(task)}])

    async def call(self, call: ToolCall) -> ToolOutcome:
        return ToolOutcome(text=await getattr(self._plain, call.name)())

    async def is_over(self, transcript: Transcript) -> bool:
        return False

    async def score(self, transcript: Transcript) -> RolloutScores:
        return RolloutScores(reward=1.0)

    async def close(self) -> None: ...


async def check_that_it_goes_on(server: EnvironmentServer, session: EnvSession) -> None:
    found = await session.rpc("tools/call", {"name": "well", "arguments": {}})
    assert found["content"][0]["text"] == "well"
    assert server.counts()["leased"] == 1


@pytest.mark.parametrize("made", [Cancelling, CancellingAsItStands])
@pytest.mark.parametrize("way", range(len(WAYS)))
async def test_a_tool_that_cancels_itself_fails_alone(made: type[AgentEnvironment], way: int) -> None:
    async with served(made) as (server, url), await EnvSession.open(url) as session:
        await session.reset({"way": way})
        for _ in range(2):
            outcome = await RemoteEnvironment(session).call(ToolCall(id="1", name="cancel", arguments="{}"))
            assert outcome.failed
            assert "CancelledError" in outcome.text
            await check_that_it_goes_on(server, session)


@pytest.mark.parametrize("way", range(len(WAYS)))
async def test_a_tool_of_a_plain_class_that_cancels_itself_has_failed_and_counts_for_the_reward(way: int) -> None:
    async with served(Cancelling) as (_, url), await EnvSession.open(url) as session:
        await session.reset({"way": way})
        told = await session.rpc("tools/call", {"name": "cancel", "arguments": {}})
        assert told["isError"]
        seen = await session.step({"tool": "cancel", "arguments": {}})
        assert seen.observation["failed"]
        assert seen.observation["text"] == told["content"][0]["text"]
        last = await session.step({"message": "done"})
        assert last.metadata["scores"]["metrics"] == {"failures": 1}


class Measured(Cancelling):
    """One of its metrics cancels itself in one of the ways."""

    @metric
    async def odd(self) -> int:
        await WAYS[self.way]()
        return 1


@pytest.mark.parametrize("way", range(len(WAYS)))
async def test_a_metric_that_cancels_itself_is_left_out(way: int) -> None:
    async with served(Measured) as (_, url), await EnvSession.open(url) as session:
        await session.reset({"way": way})
        last = await session.step({"message": "done"})
        assert (last.reward, last.metadata["scores"]["metrics"]) == (1.0, {"failures": 0})


@pytest.mark.parametrize("made", [Cancelling, CancellingAsItStands])
@pytest.mark.parametrize("way", range(len(WAYS)))
async def test_a_reset_that_cancels_itself_fails_alone(made: type[AgentEnvironment], way: int) -> None:
    async with served(made) as (server, url), await EnvSession.open(url) as session:
        with pytest.raises(Exception, match="CancelledError"):
            await session.reset({"way": way, "at_once": True})
        await session.reset({})
        await check_that_it_goes_on(server, session)


@pytest.mark.parametrize("made", [Cancelling, CancellingAsItStands])
async def test_a_cancellation_that_comes_after_its_tool_has_returned_meets_no_other_message(
    made: type[AgentEnvironment],
) -> None:
    async with served(made) as (server, url), await EnvSession.open(url) as session:
        await session.reset({})
        for _ in range(3):
            await session.rpc("tools/call", {"name": "cancel_later", "arguments": {}})
            await check_that_it_goes_on(server, session)


class Stubborn(Cancelling):
    """Its tool goes on until it may end, however often it is cancelled."""

    may_end = asyncio.Event()

    async def well(self) -> str:
        """Go on."""
        while not self.may_end.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await self.may_end.wait()
        return "well"


async def test_one_that_goes_on_after_its_time_is_answered_and_holds_up_neither_its_slot_nor_the_server() -> None:
    async with served(Stubborn, step_s=0.2, close_s=0.1) as (server, url):
        session = await EnvSession.open(url)
        await session.reset({})
        with pytest.raises(EnvironmentLost, match=r"the mcp took longer than 0\.2 s"):
            await session.rpc("tools/call", {"name": "well", "arguments": {}})
        await until(lambda: server.counts() == {"slots": 1, "leased": 0, "waiting": 0})
        await until(lambda: len(server.table.free) == 1)
        Stubborn.may_end.set()


class Returning(Cancelling):
    """Its tool returns when it is cancelled."""

    async def well(self) -> str:
        """Return when it is cancelled."""
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        return "well"


async def test_a_message_that_took_too_long_has_one_answer_also_where_its_tool_has_returned_then() -> None:
    async with served(Returning, step_s=0.2) as (_, url), connect(f"{url.replace('http', 'ws')}/ws") as socket:
        for message in ('{"type": "reset"}', '{"type": "step", "data": {"tool": "well"}}'):
            await socket.send(message)
        _, *answers = [message async for message in messages_of(socket)]
        assert len(answers) == 1
        assert "took longer than" in answers[0]


async def opened(server: EnvironmentServer) -> tuple[SessionWork, Counter]:
    """Open a session with a counter that was reset. Returns its work and the counter."""
    seat = server._seats[await server.open_by_post(0, asyncio.Future())]
    environment = seat.made()
    assert seat.work is not None
    assert isinstance(environment, Counter)
    await seat.work.carry_out(WireMessage(type="reset"))
    return seat.work, environment


def called(tool: str) -> WireMessage:
    return WireMessage(type="mcp", data={"id": 1, "method": "tools/call", "params": {"name": tool}})


async def test_no_message_is_carried_out_after_one_that_broke_its_environment() -> None:
    async with served() as (server, _):
        work, environment = await opened(server)
        broken, after = await asyncio.gather(work.carry_out(called("break")), work.carry_out(called("add")))
        assert broken is not None
        assert "the environment failed" in broken.data["message"]
        assert (after, environment.count) == (None, 0)


async def test_no_message_that_waits_is_carried_out_once_its_session_has_ended() -> None:
    async with served() as (server, _):
        work, environment = await opened(server)
        hanging, waiting = (asyncio.create_task(work.carry_out(called(tool))) for tool in ("hang", "add"))
        await until(lambda: server.working() == 1)
        work.end()
        assert await waiting is None
        assert hanging.cancelled()
        assert environment.count == 0


class Yielding(Counter):
    """Returns when it is cancelled."""

    async def call(self, call: ToolCall) -> ToolOutcome:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        return ToolOutcome(text="given up")


async def test_what_an_environment_returns_once_its_session_has_ended_is_no_answer() -> None:
    async with served(Yielding) as (server, _):
        work, _environment = await opened(server)
        yielding = asyncio.create_task(work.carry_out(called("wait")))
        await until(lambda: server.working() == 1)
        work.end()
        assert await yielding is None
