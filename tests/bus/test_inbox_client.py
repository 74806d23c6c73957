import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from bombus.bus import REPLY, TRACEPARENT, Bus, EmbeddedServer, Reader
from bombus.errors import BusUnavailable, Code, Refused
from bombus.hive import inbox
from tests.conftest import kill


async def test_a_fact_is_stored_once_for_its_id(bus: Bus) -> None:
    assert await bus.inbox.send(inbox.Tick(id="t1")) == 1
    assert await bus.inbox.send(inbox.Tick(id="t2"), traceparent="00-1-2-01") == 2
    assert await bus.inbox.send(inbox.Tick(id="t1")) == 1
    stored = await bus.last(bus.subjects.inbox_stream)
    assert stored is not None
    assert stored.headers[TRACEPARENT] == "00-1-2-01"
    assert inbox.decode_message(stored.data) == inbox.Tick(id="t2")


async def test_an_answer_that_cannot_be_read_is_none(bus: Bus) -> None:
    requesting = asyncio.create_task(bus.inbox.request(inbox.Start(id="5")))
    async with Reader(bus, bus.subjects.inbox_stream) as reader:
        [stored] = await reader.read()
    for nonsense in (b"\xc1", b"\x81\xa4kind\xa2\xc3("):
        await bus.client.publish(stored.headers[REPLY], nonsense)
    await bus.answer(stored.headers[REPLY], inbox.Done(position=9))
    assert (await requesting).position == 9


@asynccontextmanager
async def coordinator(bus: Bus, start_seq: int = 1) -> AsyncIterator[None]:
    """Answer every command with its own id, and refuse claims."""

    async def serve() -> None:
        async with Reader(bus, bus.subjects.inbox_stream, start_seq) as reader:
            async for stored in reader:
                message = inbox.decode_message(stored.data)
                answer: inbox.Answer = inbox.Done(position=int(message.id))
                if isinstance(message, inbox.Claim):
                    answer = inbox.Refusal(code=Code.WRONG_PHASE, why="OFFLINE: start the engine first")
                await bus.answer(stored.headers[REPLY], answer)

    task = asyncio.create_task(serve())
    yield
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_thousand_commands_wait_at_once_and_each_gets_its_own_answer(bus: Bus) -> None:
    async with coordinator(bus):
        answers = await asyncio.gather(*(bus.inbox.request(inbox.Start(id=str(n), engine="e")) for n in range(1000)))
    assert [answer.position for answer in answers] == list(range(1000))


async def test_a_refusal_is_raised_with_its_code_and_reason(bus: Bus) -> None:
    async with coordinator(bus):
        with pytest.raises(Refused, match="start the engine first") as caught:
            await bus.inbox.request(inbox.Claim(id="1", claim="c", client="me"))
    assert caught.value.code is Code.WRONG_PHASE


async def test_a_command_without_an_answer_times_out(bus: Bus) -> None:
    with pytest.raises(BusUnavailable, match="no coordinator answered"):
        await bus.inbox.request(inbox.Start(id="1"), timeout_s=0.2)


async def test_the_same_command_is_answered_again_when_it_is_sent_again(bus: Bus) -> None:
    async with coordinator(bus):
        for _ in range(2):
            assert (await bus.inbox.request(inbox.Start(id="5"), timeout_s=2)).position == 5


async def test_a_pending_command_is_sent_again_after_the_server_was_killed(
    crashing: tuple[EmbeddedServer, Bus],
) -> None:
    server, bus = crashing
    requesting = asyncio.create_task(bus.inbox.request(inbox.Start(id="7"), timeout_s=20))
    async with Reader(bus, bus.subjects.inbox_stream) as reader:
        [first] = await reader.read()  # it is in the inbox, and its answer is lost:
        kill(server)
        server.start()
        [second] = await reader.read()
    assert second.data == first.data
    async with coordinator(bus, start_seq=second.seq):
        assert (await requesting).position == 7


async def test_an_answer_to_an_invalid_subject_is_not_sent(bus: Bus) -> None:
    await bus.answer("evil\r\nPUB x 0", inbox.Done())
    await bus.answer("$JS.API.>", inbox.Done())
    assert bus.is_connected
