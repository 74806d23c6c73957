"""Commands and their answers: a command goes through the inbox stream, its answer comes back on core NATS.

One subscription serves every command of a connection that waits. Core NATS delivers at most once, so a command that
stays unanswered is put into the inbox again: the same command id gets the same answer (R3).
"""

import asyncio
from collections.abc import Mapping
from typing import Any

from bombus.bus.headers import REPLY, TRACEPARENT
from bombus.bus.publisher import Publisher
from bombus.bus.wire import PubAck, ReceivedMessage
from bombus.errors import BusUnavailable, Code, Refused
from bombus.hive.inbox import AnyAnswer, Message, Refusal, decode_answer, encode_message, kind_of
from bombus.hive.subjects import Subjects

ASK_AGAIN_S = 3.0  # longer than a slice of a claim's wait and a coordinator's takeover
WAITING_MAX = 20_000


class Asker:
    """`inbox` is a subject of this connection's own; answers come to `<inbox>.<token>`."""

    def __init__(self, client: Any, publisher: Publisher, subjects: Subjects, inbox: str) -> None:
        self._client = client
        self._publisher = publisher
        self._subjects = subjects
        self._prefix = f"{inbox}."
        self._waiting: dict[int, asyncio.Future[bytes | None]] = {}  # None: ask again
        self._next = 0

    async def open(self) -> None:
        await self._client.subscribe(f"{self._prefix}*", cb=self._on_answer)

    async def send(self, message: Message, *, traceparent: str = "", timeout_s: float = 10.0) -> PubAck:
        """Put a fact into the inbox, once for its id."""
        return await self._publisher.publish(
            self._subjects.inbox(kind_of(message)),
            encode_message(message),
            msg_id=message.id,
            headers={TRACEPARENT: traceparent} if traceparent else None,
            timeout_s=timeout_s,
        )

    async def ask(self, message: Message, timeout_s: float, *, traceparent: str = "") -> AnyAnswer:
        """Put a command into the inbox and wait for the coordinator's answer.

        Raises `Refused` when the answer is a refusal, `BusUnavailable` when there is none within `timeout_s`.
        """
        if len(self._waiting) >= WAITING_MAX:
            raise Refused(Code.OVERLOADED, f"{WAITING_MAX} commands wait for their answers; ask again later")
        token = self._next
        self._next = token + 1
        reply = f"{self._prefix}{token}"
        headers = {REPLY: reply}
        if traceparent:
            headers[TRACEPARENT] = traceparent
        try:
            async with asyncio.timeout(timeout_s):
                body = await self._put_until_answered(message, token, headers, timeout_s)
        except TimeoutError:
            raise BusUnavailable(
                f"{kind_of(message)} {message.id}: no coordinator answered within {timeout_s:g} s"
            ) from None
        finally:
            self._waiting.pop(token, None)
        answer = decode_answer(body)
        if isinstance(answer, Refusal):
            raise Refused(answer.code, answer.why)
        return answer

    def connection_back(self) -> None:
        """Answers may have been lost meanwhile: whoever waits asks again."""
        for answered in self._waiting.values():
            if not answered.done():
                answered.set_result(None)

    async def _put_until_answered(
        self, message: Message, token: int, headers: Mapping[str, str], timeout_s: float
    ) -> bytes:
        subject = self._subjects.inbox(kind_of(message))
        body = encode_message(message)
        loop = asyncio.get_running_loop()
        attempt = 0
        while True:
            answered: asyncio.Future[bytes | None] = loop.create_future()
            self._waiting[token] = answered
            # Not the command's own id: the stream would drop the second asking as a duplicate, unanswered.
            msg_id = f"{message.id}@{headers[REPLY]}.{attempt}"
            await self._publisher.publish(subject, body, msg_id=msg_id, headers=headers, timeout_s=timeout_s)
            attempt += 1
            try:
                async with asyncio.timeout(ASK_AGAIN_S):
                    answer = await answered
            except TimeoutError:
                continue
            if answer is not None:
                return answer

    async def _on_answer(self, message: ReceivedMessage) -> None:
        answered = self._waiting.get(int(message.subject[len(self._prefix) :]))
        if answered is not None and not answered.done() and message.data:
            answered.set_result(message.data)
