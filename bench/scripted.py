"""A replica of fixed answers, in place of a hive's own, so that only what stands before it is measured."""

import asyncio
import os
import signal
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from itertools import cycle
from typing import Literal, NamedTuple, cast

from bench.processes import process_of
from bombus.bus import Bus
from bombus.bus.follow import Follower
from bombus.hive.generation import Finished, Tokens, decode_request, encode_frame
from bombus.hive.inbox import ReplicaAlive, ReplicaLeaves
from bombus.hive.records import pack_logprobs, pack_tokens

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


def _written(tokens: Sequence[int], reason: Reason) -> _Answer:
    whole = Tokens(version=0, tokens=pack_tokens(tokens), logprobs=pack_logprobs([-1.0] * len(tokens)))
    single = [Tokens(version=0, tokens=pack_tokens([each]), logprobs=pack_logprobs([-1.0])) for each in tokens]
    end = encode_frame(Finished(reason=reason))
    body = encode_frame(whole) + end
    size = -(-len(tokens) // PORTIONS)
    parts = [b"".join(map(encode_frame, single[at : at + size])) for at in range(0, len(single), size)]
    return _Answer(
        b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body),
        [b"%x\r\n%s\r\n" % (len(part), part) for part in [*parts[:-1], parts[-1] + end]],
    )


class ScriptedReplica(asyncio.Protocol):
    """One connection of a gateway: each `POST /generate` gets the next answer at once, or in portions, one a frame."""

    def __init__(self, answers: Iterator[_Answer]) -> None:
        self._answers = answers
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
        assert self._transport is not None
        answer = next(self._answers)
        if decode_request(rest).stream:
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
    bus: Bus, engine: str, answers: Sequence[Sequence[int]], reason: Reason = "length"
) -> AsyncIterator[int]:
    """Take the place of the only replica of a hive that this process has started, for the block; yield the port.

    Its engine rolls. The process of the replica stands still meanwhile, so that nobody starts another one. The calls
    get these answers (ids of tokens) in turn, and the first one again after the last.
    """
    served = cycle([_written(tokens, reason) for tokens in answers])
    server = await asyncio.get_running_loop().create_server(lambda: ScriptedReplica(served), "127.0.0.1", 0)
    port = int(server.sockets[0].getsockname()[1])
    follower = Follower(bus)
    tasks = [asyncio.create_task(follower.run())]
    own = process_of(os.getpid(), "inference")
    try:
        await follower.wait_for(lambda hive: bool(hive.engine(engine).replicas), LEAVES_S)
        state = follower.hive.engine(engine)
        (name,) = state.replicas
        os.kill(own, signal.SIGSTOP)
        tasks.append(asyncio.create_task(_stay_alive(bus, engine, state.run, port)))
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


async def _stay_alive(bus: Bus, engine: str, run: int, port: int) -> None:
    url = f"http://127.0.0.1:{port}"
    while True:
        await bus.inbox.send(
            ReplicaAlive(
                id=uuid.uuid4().hex, engine=engine, replica=NAME, url=url, run=run, version=0, capacity=CAPACITY
            )
        )
        await asyncio.sleep(ALIVE_S)
