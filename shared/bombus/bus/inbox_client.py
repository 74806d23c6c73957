"""The client side of the inbox: puts facts and commands into the stream, and receives commands' answers over core NATS.

One subscription serves all of a connection's commands that wait for answers. Core NATS delivers at most once, so a
command that gets no answer is put into the inbox again: the same command id gets the same answer (R3).
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec
from nats.errors import Error

from bombus.bus.headers import REPLY, TRACEPARENT
from bombus.bus.publisher import Publisher
from bombus.bus.wire import ReceivedMessage
from bombus.errors import BusUnavailable, Code, Refused
from bombus.hive.events import kind_of
from bombus.hive.inbox import AnyAnswer, Message, Refusal, decode_answer, encode_message
from bombus.hive.subjects import Subjects

logger = logging.getLogger(__name__)

RETRY_S = 3.0  # longer than one slice of a claim's wait, and than a coordinator's takeover
PENDING_MAX = 20_000


class InboxClient:
    """Sends facts and commands to a hive's inbox. Answers arrive on `<reply_inbox>.<token>`."""

    def __init__(self, client: Any, publisher: Publisher, subjects: Subjects, reply_inbox: str) -> None:
        self._client = client
        self._publisher = publisher
        self._subjects = subjects
        self._prefix = f"{reply_inbox}."
        # A result of None means: send the command again. An error means that the leader decides nothing for now.
        self._pending: dict[int, asyncio.Future[AnyAnswer | BusUnavailable | None]] = {}
        self._next = 0

    async def open(self) -> None:
        await self._client.receive(f"{self._prefix}*", self._on_answer)
        await self._client.subscribe(self._subjects.undecided, cb=self._on_undecided)

    async def send(self, message: Message, *, traceparent: str = "", timeout_s: float = 10.0) -> int:
        """Put a fact into the inbox, where each id is stored only once, and return its sequence there."""
        ack = await self._publisher.publish(
            self._subjects.inbox(kind_of(message)),
            encode_message(message),
            msg_id=message.id,
            headers={TRACEPARENT: traceparent} if traceparent else None,
            timeout_s=timeout_s,
        )
        return ack.seq

    async def send_when_back(self, message: Message, pause: Callable[[], Awaitable[None]] | None = None) -> None:
        """Put a fact into the inbox, waiting for as long as the bus is unavailable.

        `pause` is awaited after each failed attempt; if it raises, the fact is not sent.
        """
        while True:
            try:
                await self.send(message)
                return
            except BusUnavailable as error:
                logger.warning("waiting for the bus to send a fact: %s", error)
            if pause is not None:
                await pause()

    async def request(self, message: Message, timeout_s: float = 10.0, *, traceparent: str = "") -> AnyAnswer:
        """Put a command into the inbox and return the coordinator's answer, which comes once the resulting events are
        durable.

        Raises `Refused` if the answer is a refusal. Raises `BusUnavailable` if there is no answer within `timeout_s`,
        or as soon as the leader reports that it is not deciding anything for now. The command may still be decided
        later.
        """
        if len(self._pending) >= PENDING_MAX:
            raise Refused(Code.OVERLOADED, f"{PENDING_MAX} commands are waiting for answers; try again later")
        token = self._next
        self._next = token + 1
        headers = {REPLY: f"{self._prefix}{token}"}
        if traceparent:
            headers[TRACEPARENT] = traceparent
        try:
            async with asyncio.timeout(timeout_s):
                answer = await self._send_until_answered(message, token, headers, timeout_s)
        except TimeoutError:
            raise BusUnavailable(
                f"{kind_of(message)} {message.id}: no coordinator answered within {timeout_s:g} s"
            ) from None
        finally:
            self._pending.pop(token, None)
        if isinstance(answer, Refusal):
            raise Refused(answer.code, answer.why)
        return answer

    def connection_back(self) -> None:
        """Resend every pending command, since its answer may have been lost while the connection was down."""
        for answered in self._pending.values():
            if not answered.done():
                answered.set_result(None)

    async def _send_until_answered(
        self, message: Message, token: int, headers: Mapping[str, str], timeout_s: float
    ) -> AnyAnswer:
        subject = self._subjects.inbox(kind_of(message))
        body = encode_message(message)
        loop = asyncio.get_running_loop()
        attempt = 0
        while True:
            answered: asyncio.Future[AnyAnswer | BusUnavailable | None] = loop.create_future()
            self._pending[token] = answered
            # Do not use the command's own id: the stream would drop a second attempt as a duplicate, and it would get
            # no answer.
            msg_id = f"{message.id}@{headers[REPLY]}.{attempt}"
            await self._publisher.publish(
                subject, body, msg_id=msg_id, headers=headers, timeout_s=timeout_s, synced=False
            )
            attempt += 1
            try:
                async with asyncio.timeout(RETRY_S):
                    answer = await answered
            except TimeoutError:
                continue
            if isinstance(answer, BusUnavailable):
                raise answer
            if answer is not None:
                return answer

    async def say_undecided(self, why: str) -> None:
        """Tell all callers that wait for an answer, on any connection, that no command is being decided for now, and
        why."""
        try:
            await self._client.publish(self._subjects.undecided, why.encode())
        except Error as error:
            logger.warning("the callers waiting for answers could not be told why (%s)", error or type(error).__name__)

    async def _on_undecided(self, message: ReceivedMessage) -> None:
        for answered in self._pending.values():
            if not answered.done():
                answered.set_result(BusUnavailable(message.data.decode(errors="replace")))

    def _on_answer(self, subject: str, _reply: str, body: bytes, _head: bytes) -> None:
        answered = self._pending.get(int(subject[len(self._prefix) :]))
        if answered is None or answered.done() or not body:
            return
        try:
            answered.set_result(decode_answer(body))
        except msgspec.MsgspecError as error:
            logger.warning("an answer cannot be read; its command will be sent again: %s", error)
