"""Messages that a session cannot send, and servers that close while it sends."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from websockets.asyncio.server import ServerConnection, serve
from websockets.utils import accept_key

from bombus.environments.kinds import (
    EnvironmentLost,
    EnvironmentsBusy,
    Opening,
    RolloutScores,
    ToolCall,
    ToolOutcome,
    Transcript,
)
from bombus.environments.openenv.messages import MESSAGE_BYTES_MAX
from bombus.environments.pools.aio import AsyncEnvPool
from bombus.environments.pools.remote import RemoteEnvironment
from bombus.environments.pools.session import EnvSession, SessionSettings, StepRefused
from bombus.sdk.types import Task
from tests.environments.serving.served import CutLine, served
from tests.environments.serving.small_served import Counter

HALF = "\ud83d"


class Said(Counter):
    """Says again what it was told."""

    async def open(self, task: Task) -> Opening:
        return Opening(messages=[{"role": "user", "content": f"{task.main_query}{HALF}"}])

    async def call(self, call: ToolCall) -> ToolOutcome:
        return ToolOutcome(text=call.arguments)

    async def score(self, transcript: Transcript) -> RolloutScores:
        return RolloutScores(reward=1.0, metrics={"length": len(transcript.messages[-1]["content"])})


async def test_a_message_that_cannot_be_sent_is_refused_and_the_session_goes_on() -> None:
    async with served() as (_, url), await EnvSession.open(url) as session:
        await session.reset({})
        with pytest.raises(StepRefused, match="the step cannot be sent: it is not JSON: TypeError"):
            await session.step({"tool": "add", "arguments": {"x": object()}})
        with pytest.raises(StepRefused, match=f"but the limit is {MESSAGE_BYTES_MAX}: send less at a time"):
            await session.step({"tool": "add", "arguments": {"x": "x" * MESSAGE_BYTES_MAX}})
        assert (await session.step({"tool": "add"})).observation["text"].endswith(":1")


async def test_half_a_surrogate_pair_is_sent_as_a_question_mark_in_both_directions() -> None:
    async with served(Said) as (_, url):
        environment = RemoteEnvironment(await EnvSession.open(url))
        opened = await environment.open(Task(main_query=HALF))
        assert opened.messages[0]["content"] == "??"
        assert (await environment.session.step({"tool": "say", "arguments": {"x": HALF}})).observation["text"] == (
            '{"x":"?"}'
        )
        said = Transcript(messages=[{"role": "assistant", "content": f"a{HALF}b"}])
        assert (await environment.score(said)).metrics == {"length": 3}
        await environment.close()


async def test_a_transcript_that_is_too_large_for_a_message_is_infra_and_says_so() -> None:
    async with served(Said) as (_, url):
        environment = RemoteEnvironment(await EnvSession.open(url))
        await environment.open(Task())
        pictures = Transcript(messages=[{"role": "user", "content": "x" * MESSAGE_BYTES_MAX}])
        with pytest.raises(EnvironmentLost, match="the mcp cannot be sent: it has"):
            await environment.score(pictures)
        await environment.close()


async def test_a_server_that_closes_while_a_message_is_sent_to_it_is_infra() -> None:
    async def refuse(connection: ServerConnection) -> None:
        await connection.wait_closed()

    headers = {"x-bombus-session": "s"}

    def name(connection: ServerConnection, request: object, answer: object) -> None:
        answer.headers.update(headers)  # type: ignore[attr-defined]

    async with serve(refuse, "127.0.0.1", 0, max_size=1000, process_response=name) as server:
        session = await EnvSession.open(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        with pytest.raises(EnvironmentLost, match=r"code 1009|connection broke"):
            await session.step({"x": "x" * (MESSAGE_BYTES_MAX - 1000)})
        await session.close()


@pytest.mark.parametrize("size", [1, 12 << 20], ids=["in the answer", "in the sending"])
async def test_a_session_does_not_wait_for_an_answer_longer_than_it_was_told_to(size: int) -> None:
    async with served() as (_, url), CutLine(url) as line:
        session = await EnvSession.open(line.url, SessionSettings(step_s=0.3))
        line.cut()
        with pytest.raises(EnvironmentLost, match=r"the answer to a step took longer than 0\.3 s; open another one"):
            await session.step({"tool": "x" * size})
        assert session.is_dead
        with pytest.raises(EnvironmentLost, match="took longer than"):
            await session.step({})


async def test_an_answer_that_is_too_large_is_infra_and_says_so() -> None:
    async def say_much(connection: ServerConnection) -> None:
        async for text in connection:
            await connection.send("x" * (MESSAGE_BYTES_MAX + 1) if "step" in str(text) else '{"type": "state"}')

    async with serve(say_much, "127.0.0.1", 0) as server:
        session = await EnvSession.open(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        with pytest.raises(EnvironmentLost, match=f"code 1009, .* exceeds limit of {MESSAGE_BYTES_MAX} bytes"):
            await session.step({})


async def test_a_session_does_without_the_proxies_of_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "ws_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    async with served() as (_, url), await EnvSession.open(url) as session:
        assert session.is_ours


FULL = b'{"type":"error","data":{"message":"at capacity (2/2)","code":"CAPACITY_REACHED"}}'


@asynccontextmanager
async def full_at_first(times: int) -> AsyncIterator[tuple[str, list[int]]]:
    """Serve as OpenEnv's server does that is full: it accepts, says so and closes, here all in one packet."""
    turned_away: list[int] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked = (await reader.readuntil(b"\r\n\r\n")).decode()
        key = next(line.split(": ")[1] for line in asked.split("\r\n") if line.lower().startswith("sec-websocket-key"))
        accepted = f"Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: {accept_key(key)}\r\n\r\n"
        writer.write(f"HTTP/1.1 101 Switching Protocols\r\n{accepted}".encode())
        if len(turned_away) < times:
            turned_away.append(1)
            writer.write(bytes([0x81, len(FULL)]) + FULL + bytes([0x88, 2]) + (1000).to_bytes(2))
        else:
            state = b'{"type":"state","data":{}}'
            await reader.readexactly(1)
            writer.write(bytes([0x81, len(state)]) + state)
            await reader.read()
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", turned_away


async def test_a_server_that_is_full_and_has_closed_before_it_was_asked_anything_is_busy_and_waited_for() -> None:
    async with full_at_first(times=3) as (url, turned_away):
        with pytest.raises(EnvironmentsBusy, match=r"at capacity \(2/2\)"):
            await EnvSession.open(url)
        async with AsyncEnvPool(url, 1, group_size=1, settings=SessionSettings(wait_s=30)) as pool:
            assert not pool.session(0).is_dead
        assert len(turned_away) == 3
