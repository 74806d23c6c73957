"""A replica of fixed answers, in place of a hive's own, so that only what stands before it is measured."""

import asyncio
import os
import signal
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from itertools import count
from typing import Literal, NamedTuple, cast

from bench.processes import process_of
from bombus.bus import Bus
from bombus.bus.follow import Follower
from bombus.errors import BusUnavailable
from bombus.hive.generation import Finished, Tokens, decode_request, encode_frame
from bombus.hive.inbox import ReplicaAlive, ReplicaLeaves, WeightsLoadedFact
from bombus.hive.records import pack_logprobs, pack_tokens
from bombus.hive.state import Hive

NAME = "scripted"
ALIVE_S = 1.0
LEAVES_S = 10.0
CAPACITY = 1024
Reason = Literal["length", "stop"]
PORTIONS = 8  # in which a streamed answer arrives


class _Answer(NamedTuple):
    """The bytes of one answer: whole, and in portions."""

    whole: bytes
    portions: list[bytes]


def _written(tokens: Sequence[int], reason: Reason, version: int) -> _Answer:
    whole = Tokens(version=version, tokens=pack_tokens(tokens), logprobs=pack_logprobs([-1.0] * len(tokens)))
    single = [Tokens(version=version, tokens=pack_tokens([each]), logprobs=pack_logprobs([-1.0])) for each in tokens]
    end = encode_frame(Finished(reason=reason))
    body = encode_frame(whole) + end
    size = -(-len(tokens) // PORTIONS)
    parts = [b"".join(map(encode_frame, single[at : at + size])) for at in range(0, len(single), size)]
    return _Answer(
        b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body),
        [b"%x\r\n%s\r\n" % (len(part), part) for part in [*parts[:-1], parts[-1] + end]],
    )


class ScriptedReplica(asyncio.Protocol):
    """One connection of a gateway: each `POST /generate` gets the next answer after `delay_s`, whole or in portions,
    one a frame."""

    def __init__(self, answers: Iterator[_Answer], delay_s: float) -> None:
        self._answers = answers
        self._delay_s = delay_s
        self._buffer = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is not a subclass of it

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head, found, rest = self._buffer.partition(b"\r\n\r\n")
        if not found:
            return
        lengths = [line.split(b":")[1] for line in head.lower().split(b"\r\n") if line.startswith(b"content-length")]
        if len(rest) < int(lengths[0]):
            return
        self._buffer = b""
        stream = decode_request(rest).stream
        if self._delay_s:
            asyncio.get_running_loop().call_later(self._delay_s, self._answer, stream)
        else:
            self._answer(stream)

    def _answer(self, stream: bool) -> None:
        assert self._transport is not None
        if self._transport.is_closing():
            return
        answer = next(self._answers)
        if stream:
            self._transport.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
            self._send(iter(answer.portions))
        else:
            self._transport.write(answer.whole)

    def _send(self, portions: Iterator[bytes]) -> None:
        """Send a portion, and the next one when everything else had its turn."""
        assert self._transport is not None
        portion = next(portions, None)
        self._transport.write(portion or b"0\r\n\r\n")
        if portion:
            asyncio.get_running_loop().call_later(0.001, self._send, portions)


@asynccontextmanager
async def scripted_replica(
    bus: Bus, engine: str, answers: Sequence[Sequence[int]], reason: Reason = "length", delay_s: float = 0.0
) -> AsyncIterator[int]:
    """Take the place of the only replica of a hive that this process has started, for the block; yield the port.

    Its engine rolls. The process of the replica stands still meanwhile, so that nobody starts another one. The calls
    get these answers (ids of tokens) in turn, and the first one again after the last.
    """
    follower = Follower(bus)

    def served() -> Iterator[_Answer]:
        version = -1
        for number in count():
            if version != max(0, follower.hive.engine(engine).version):
                version = max(0, follower.hive.engine(engine).version)
                written = [_written(tokens, reason, version) for tokens in answers]
            yield written[number % len(written)]

    script = served()
    server = await asyncio.get_running_loop().create_server(lambda: ScriptedReplica(script, delay_s), "127.0.0.1", 0)
    port = int(server.sockets[0].getsockname()[1])
    tasks = [asyncio.create_task(follower.run())]
    own = process_of(os.getpid(), "inference")
    try:
        await follower.wait_for(lambda hive: bool(hive.engine(engine).replicas), LEAVES_S)
        state = follower.hive.engine(engine)
        (name,) = state.replicas
        os.kill(own, signal.SIGSTOP)
        tasks.append(asyncio.create_task(_stay_alive(bus, engine, follower, port)))
        await bus.inbox.send(ReplicaLeaves(id=uuid.uuid4().hex, engine=engine, replica=name))
        await follower.wait_for(lambda hive: list(hive.engine(engine).usable) == [NAME], LEAVES_S)
        yield port
    finally:
        with suppress(ProcessLookupError):
            os.kill(own, signal.SIGCONT)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        server.close()


async def _stay_alive(bus: Bus, engine: str, follower: Follower, port: int) -> None:
    """Say every second that the replica is there, and at once that it serves each new version."""
    url = f"http://127.0.0.1:{port}"
    while True:
        state = follower.hive.engine(engine)
        newest = max(0, state.version)
        alive = ReplicaAlive(
            id=uuid.uuid4().hex, engine=engine, replica=NAME, url=url, run=state.run, version=newest, capacity=CAPACITY
        )
        loaded = WeightsLoadedFact(
            id=f"{NAME}-{state.run}-{newest}", engine=engine, run=state.run, version=newest, replica=NAME
        )
        with suppress(BusUnavailable, TimeoutError):  # a busy machine; like a replica, it goes on
            await bus.inbox.send(alive)
            await bus.inbox.send(loaded)
            await follower.wait_for(partial(_is_newer, engine, newest), ALIVE_S)


def _is_newer(engine: str, version: int, hive: Hive) -> bool:
    return hive.engine(engine).version > version
