"""Requests to the server, its JetStream API and direct reads, repeated until they are answered or their time is up."""

import asyncio
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import msgspec
from nats.errors import ConnectionClosedError, ConnectionDrainingError, Error

from bombus.bus.headers import check_size
from bombus.bus.wire import NO_HEADERS, ApiReply, NotNow, ReceivedMessage, error_of
from bombus.errors import BusUnavailable

_ReplyT = TypeVar("_ReplyT", bound=ApiReply)
RETRY_S = 1.0  # a stream never answers requests that were sent before it had a leader
RETRY_S_MAX = 4.0  # used while much other data is arriving, since the answer may be queued behind it
MUCH_BYTES = 256 << 10
JETSTREAM_API = "$JS.API"
_PAUSE_S = 0.05


class _AttemptFailed(Exception):
    """This attempt failed, for the reason given, and another may succeed."""


class ApiCall(msgspec.Struct, Generic[_ReplyT], frozen=True):
    """A call to JetStream's API, `<api_prefix>.<subject>`. `what` names it in errors.

    `accept` is the code of an error that the caller handles.
    """

    what: str
    subject: str
    decode: Callable[[bytes], _ReplyT]
    body: bytes = b""
    accept: int = 0


class Requests:
    """Sends the requests of one connection. Answers arrive on `<inbox>.<token>`; the owner calls `connection_back`.

    Use it only for requests that may be repeated without harm: reads, creations under a fixed name, purges by position.
    """

    def __init__(self, client: Any, inbox: str, timeout_s: float = 10.0, *, api_prefix: str = JETSTREAM_API) -> None:
        self.api_prefix = api_prefix  # the subject below which this connection's account has JetStream's API
        self._client = client
        self._prefix = f"{inbox}."
        self._timeout_s = timeout_s
        self._pending: dict[int, asyncio.Future[ReceivedMessage | None]] = {}  # a result of None means: send it again
        self._batches: dict[int, list[ReceivedMessage]] = {}  # what has arrived of answers in many messages
        self._next = 0

    async def open(self) -> None:
        await self._client.subscribe(f"{self._prefix}*", cb=self._on_answer)

    async def request(self, subject: str, body: bytes = b"", timeout_s: float | None = None) -> ReceivedMessage:
        """Send a request, repeatedly if need be, and return its answer. Raises `BusUnavailable` if no answer arrives
        within `timeout_s`, and `Refused` if the request is over the server's size limit."""
        loop = asyncio.get_running_loop()
        allowed_s = self._timeout_s if timeout_s is None else timeout_s
        deadline = loop.time() + allowed_s
        token = self._next
        self._next = token + 1
        why = "not connected"
        try:
            while (now := loop.time()) < deadline:
                try:
                    return await self._attempt(token, subject, body, min(now + RETRY_S_MAX, deadline))
                except TimeoutError:
                    why = "no answer"
                except _AttemptFailed as reason:
                    why = str(reason)
                    await asyncio.sleep(min(_PAUSE_S, deadline - now))
        finally:
            self._pending.pop(token, None)
        raise BusUnavailable(f"{subject}: {why} within {allowed_s:g} s")

    async def request_batch(self, subject: str, body: bytes) -> list[ReceivedMessage]:
        """Send a request that is answered with many messages, and return those messages. The answer may end early, and
        if the request had to be repeated, messages may be repeated too. Raises the same errors as `request`."""
        token, batch = self._next, list[ReceivedMessage]()  # `request` takes this token before it waits
        self._batches[token] = batch
        try:
            await self.request(subject, body)
        finally:
            del self._batches[token]
        return batch

    async def api(self, call: ApiCall[_ReplyT], timeout_s: float | None = None) -> _ReplyT:
        """Make a call to JetStream's API and return the decoded answer.

        Raises the error that `error_of` returns; a temporary error is raised only after it has lasted for `timeout_s`.
        """
        deadline = asyncio.get_running_loop().time() + (self._timeout_s if timeout_s is None else timeout_s)
        while True:
            reply = call.decode((await self.request(f"{self.api_prefix}.{call.subject}", call.body, timeout_s)).data)
            if reply.error is None or reply.error.err_code == call.accept:
                return reply
            error = error_of(reply.error, call.what)
            if not isinstance(error, NotNow) or asyncio.get_running_loop().time() > deadline:
                raise error
            await asyncio.sleep(_PAUSE_S)

    def connection_back(self) -> None:
        """Resend every pending request: the earlier attempts will no longer be answered."""
        for answered in self._pending.values():
            if not answered.done():
                answered.set_result(None)

    async def _attempt(self, token: int, subject: str, body: bytes, until: float) -> ReceivedMessage:
        if self._client.is_closed:
            raise BusUnavailable(f"{subject}: the bus is closed")
        if not self._client.is_connected:
            raise _AttemptFailed("not connected")
        answered = self._pending.get(token)
        if answered is None or answered.done():
            answered = self._pending[token] = asyncio.get_running_loop().create_future()
        check_size(self._client.max_payload, subject, body, NO_HEADERS)
        try:
            await self._client.publish(subject, body, reply=f"{self._prefix}{token}")
            answer = await self._answer(answered, until)
        except (ConnectionClosedError, ConnectionDrainingError) as error:
            raise BusUnavailable(f"{subject}: the bus is closed") from error
        except Error as error:  # nats-py's base error: a broken connection raises one of several subclasses
            raise _AttemptFailed(str(error) or type(error).__name__) from error
        if answer is None:
            raise _AttemptFailed("the connection broke")
        if not answer.data and answer.headers is not None and answer.headers.get("Status") == "503":
            raise _AttemptFailed("no responder (there is no such stream, or it has no leader now)")
        return answer

    async def _answer(self, answered: asyncio.Future[ReceivedMessage | None], until: float) -> ReceivedMessage | None:
        """Wait for an answer until the time is up or too little data is arriving. Raises `TimeoutError`.

        Repeating a request whose answer is on its way would double the traffic, until the server dropped the connection
        as a slow consumer.
        """
        loop = asyncio.get_running_loop()
        while True:
            received = self._client.stats["in_bytes"]
            try:
                async with asyncio.timeout_at(min(loop.time() + RETRY_S, until)):
                    return await asyncio.shield(answered)
            except TimeoutError:
                if loop.time() >= until or self._client.stats["in_bytes"] - received < MUCH_BYTES:
                    raise

    async def _on_answer(self, message: ReceivedMessage) -> None:
        token = int(message.subject[len(self._prefix) :])
        batch = self._batches.get(token)
        if batch is not None and message.headers is not None and "Status" not in message.headers:
            batch.append(message)
            return
        answered = self._pending.get(token)
        if answered is not None and not answered.done():
            answered.set_result(message)
