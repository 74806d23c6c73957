"""The open requests of a backend that answers over HTTP. Each is a task that passes frames on as they arrive."""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, suppress

import httpx
import msgspec

from bombus.errors import BombusError, Code, Refused
from bombus.hive.generation import Fault, Finished, Frame, Generate, encode_frame
from bombus_inference.backends.limits import Limits
from bombus_inference.backends.protocol import Deliver, Delivery, failure, refusal_fault

log = logging.getLogger(__name__)

JSON = {"content-type": "application/json"}
ERROR_CHARS_MAX = 500
EVENT_BYTES_MAX = 64 << 20

FrameBatches = AsyncGenerator[list[Frame], None]
SendRequest = Callable[[Generate, list[int]], FrameBatches]


class BackendFailed(BombusError):
    """Raised if the backend's server cannot be reached, ends an answer early, or returns an invalid one.

    A retry on another replica may succeed.
    """


class HttpCalls:
    """A backend's open requests, at most `open_max` at a time. Each ends with its last choice's `Finished`, or with a
    fault."""

    def __init__(self, deliver: Deliver, open_max: int) -> None:
        self._deliver = deliver
        self._open_max = open_max
        self._open: dict[int, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._none_open = asyncio.Event()
        self._none_open.set()

    def __len__(self) -> int:
        return len(self._open)

    def add(self, ticket: int, request: Generate, run: int, limits: Limits, send: SendRequest) -> None:
        """Start a request by calling `send` with the request and its prompt. If `limits` or `run` forbid the request,
        refuse it."""
        try:
            prompt = limits.check(request, run)
            if len(self._open) >= self._open_max:
                raise Refused(Code.OVERLOADED, f"{len(self._open)} requests are open already; try again later")
        except Refused as refused:
            self.refuse(ticket, refusal_fault(refused))
            return
        task = asyncio.create_task(self._run(ticket, request.n, send(request, prompt)))
        self._open[ticket] = task
        self._none_open.clear()
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def refuse(self, ticket: int, fault: Fault) -> None:
        self._deliver([failure(ticket, fault)])

    def abort(self, ticket: int) -> None:
        """Close the request's connection, which tells the server to abort the request."""
        task = self._forget(ticket)
        if task is not None:
            task.cancel()

    def end_all(self, fault: Fault) -> None:
        for ticket in list(self._open):
            self.abort(ticket)
            self.refuse(ticket, fault)

    async def drain(self, timeout_s: float) -> bool:
        """Wait until no request is open. Return False if some requests are still open after `timeout_s`."""
        if self._open and timeout_s > 0:
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._none_open.wait()
        return not self._open

    async def stop(self, fault: Fault) -> None:
        self.end_all(fault)
        if self._tasks:
            await asyncio.wait(set(self._tasks))

    def _forget(self, ticket: int) -> asyncio.Task[None] | None:
        task = self._open.pop(ticket, None)
        if not self._open:
            self._none_open.set()
        return task

    async def _run(self, ticket: int, choices: int, frames: FrameBatches) -> None:
        try:
            async with aclosing(frames):
                async for made in frames:
                    choices -= sum(isinstance(frame, Finished) for frame in made)
                    done = choices == 0
                    if done:
                        self._forget(ticket)
                    self._deliver([Delivery(ticket, b"".join(map(encode_frame, made)), done)])
            if choices:
                raise BackendFailed("the engine broke off in the middle of an answer")
        except Refused as refused:
            self._fail(ticket, refusal_fault(refused))
        except (BackendFailed, httpx.HTTPError, msgspec.MsgspecError) as error:
            why = str(error) or type(error).__name__
            log.warning("a call failed: %s", why)
            self._fail(ticket, Fault(why=f"the replica's engine failed: {why}", code=Code.NO_REPLICA, retry=True))

    def _fail(self, ticket: int, fault: Fault) -> None:
        if self._forget(ticket) is not None:
            self.refuse(ticket, fault)


async def check_answer(response: httpx.Response) -> None:
    """Raise `Refused` for a request that the server does not accept, and `BackendFailed` for one that it cannot
    serve."""
    if response.status_code == 200:
        return
    body = await response.aread()
    why = f"the engine answered {response.status_code}: {body.decode(errors='replace')[:ERROR_CHARS_MAX]}"
    if response.status_code in (400, 413, 422):
        raise Refused(Code.MALFORMED, why)
    raise BackendFailed(why)


async def server_sent(response: httpx.Response) -> AsyncIterator[bytes]:
    """Yield the data of each server-sent event up to `[DONE]`. Raises `BackendFailed` if `[DONE]` is missing."""
    buffer = bytearray()
    done = False
    async for chunk in response.aiter_raw():
        buffer += chunk
        *lines, rest = buffer.split(b"\n")
        buffer = rest
        if len(buffer) > EVENT_BYTES_MAX:
            raise BackendFailed(f"an event is over {EVENT_BYTES_MAX} bytes")
        for line in lines:
            data = bytes(line[5:]).strip()
            if line[:5] != b"data:" or not data:
                continue
            if data == b"[DONE]":
                done = True  # keep reading to the end, so that the connection can be reused
            else:
                yield data
    if not done:
        raise BackendFailed("the engine broke off in the middle of a stream")
