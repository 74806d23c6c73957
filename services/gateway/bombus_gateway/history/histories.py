"""The conversations of open episodes. They are cached, and are read from the log if another gateway served them
(R10)."""

import asyncio
import logging
import uuid
from collections import OrderedDict
from collections.abc import Callable, Sequence
from weakref import WeakValueDictionary

from bombus.bus import Bus
from bombus.errors import BombusError, BusUnavailable, Code, Refused
from bombus.hive.events import NotedCall
from bombus.hive.inbox import Found, Lookup
from bombus.hive.records import CallRecord, CallRef, decode_record
from bombus_gateway.call.workers import Workers
from bombus_gateway.history.conversation import Conversation
from bombus_gateway.keys import KeyClaims
from bombus_gateway.settings import GatewaySettings

log = logging.getLogger(__name__)

LOOKUP_S_MAX = 10.0
FEW = 128  # with fewer conversations than this, those of ended episodes are not dropped
READ_AT_ONCE = 16  # maximum number of calls read from the log in one request
_Key = tuple[str, int, str]  # (engine, run, episode)


class Histories:
    """A cache of conversations. If they take too much memory, the least recently used are dropped: they can be read
    again from the log.

    A dropped conversation to which a call still holds a reference is reused, so that an episode never has two.
    """

    def __init__(
        self, bus: Bus, settings: GatewaySettings, workers: Workers, is_over: Callable[[str, int, str], bool]
    ) -> None:
        """`is_over(engine, run, episode)` returns whether the episode is known to be over."""
        self._bus = bus
        self._workers = workers
        self._is_over = is_over
        self._many = FEW  # number of conversations at which those of ended episodes are dropped
        self._bytes_max = settings.history_mb_max << 20
        self._lookup_s_max = min(LOOKUP_S_MAX, settings.bus_timeout_s)
        self._conversations: OrderedDict[_Key, Conversation] = OrderedDict()
        self._alive: WeakValueDictionary[_Key, Conversation] = WeakValueDictionary()  # including dropped ones in use
        self._reading: WeakValueDictionary[_Key, asyncio.Lock] = WeakValueDictionary()
        self._counted: dict[_Key, int] = {}  # size in bytes of each cached conversation
        self.bytes = 0  # the sum of the sizes

    def conversation(self, claims: KeyClaims) -> Conversation:
        """Return the conversation of a key's episode, as far as it is known here."""
        key = _key(claims)
        found = self._conversations.get(key)
        if found is None:
            self._drop_those_over()
            found = self._alive.get(key) or Conversation()
            self._conversations[key] = self._alive[key] = found
            self._count(key, found)
        else:
            self._conversations.move_to_end(key)
        return found

    def _drop_those_over(self) -> None:
        """Drop the conversations of ended episodes, once there are twice as many conversations as remained the last
        time."""
        if len(self._conversations) < self._many:
            return
        for key in [key for key in self._conversations if self._is_over(*key)]:
            del self._conversations[key]
            self.bytes -= self._counted.pop(key)
        self._many = 2 * max(len(self._conversations), FEW // 2)

    def account_for(self, claims: KeyClaims) -> None:
        """Update the recorded size of a key's conversation if the conversation is cached. Drop other conversations
        while the cache is over its limit."""
        key = _key(claims)
        found = self._conversations.get(key)
        if found is not None:
            self._count(key, found)
        while self.bytes > self._bytes_max and len(self._conversations) > 1:
            oldest, _ = self._conversations.popitem(last=False)
            self.bytes -= self._counted.pop(oldest)

    def _count(self, key: _Key, conversation: Conversation) -> None:
        now = conversation.memory_bytes
        self.bytes += now - self._counted.get(key, 0)
        self._counted[key] = now

    async def read_log(self, claims: KeyClaims, traceparent: str = "") -> None:
        """Add those calls in a key's episode that are in the log but not known here. Raises `Refused` if the log cannot
        be read.

        Only one request per episode does this at a time. It reads a few calls at a time, so that other requests are not
        delayed.
        """
        conversation = self.conversation(claims)
        reading = self._reading.setdefault(_key(claims), asyncio.Lock())
        try:
            async with reading:
                calls = await self._calls_of(claims, traceparent)
                missing = [call.ref for call in calls if not conversation.knows(call.ref)]
                for first in range(0, len(missing), READ_AT_ONCE):
                    refs = missing[first : first + READ_AT_ONCE]
                    for ref, (record, size) in zip(refs, await self._stored(claims, refs)):
                        if not conversation.knows(ref):  # this gateway may have added it during the read
                            conversation.add_stored(ref, record)
                            conversation.stored_bytes += size
        except KeyError as error:
            raise Refused(
                Code.BUS_DOWN, f"A call of this episode continues a call that is not in the log: {error}"
            ) from error
        finally:
            self.account_for(claims)

    async def records(self, claims: KeyClaims, refs: Sequence[CallRef]) -> list[CallRecord]:
        """Return the records of these calls, checked against their digests.

        Raises `Refused` BUS_DOWN if the records cannot be read. Earlier turns are never re-rendered instead, since
        their tokens could differ.
        """
        return [record for record, _ in await self._stored(claims, refs)]

    async def _stored(self, claims: KeyClaims, refs: Sequence[CallRef]) -> list[tuple[CallRecord, int]]:
        """Return the records of these calls and their sizes in bytes. Raises the same errors as `records`."""
        try:
            stored = await self._bus.get_many(self._bus.subjects.calls_stream, [ref.seq for ref in refs])

            def work() -> list[tuple[CallRecord, int]]:
                return [(decode_record(found.data, ref), len(found.data)) for found, ref in zip(stored, refs)]

            return await self._workers.run(claims.episode, sum(len(found.data) for found in stored), work)
        except BombusError as error:
            raise _unreadable(error) from error

    async def _calls_of(self, claims: KeyClaims, traceparent: str) -> tuple[NotedCall, ...]:
        lookup = Lookup(id=uuid.uuid4().hex, engine=claims.engine, episode=claims.episode)
        try:
            found = await self._bus.inbox.request(lookup, self._lookup_s_max, traceparent=traceparent)
        except BusUnavailable as error:
            raise _unreadable(error) from error
        if not isinstance(found, Found):
            raise Refused(Code.INTERNAL, f"The coordinator answered a look-up with {type(found).__name__}.")
        if found.run != claims.run or not found.open:
            raise Refused(Code.EPISODE_OVER, f"Episode {claims.episode} has ended; claim another one.")
        return found.calls


def _key(claims: KeyClaims) -> _Key:
    return claims.engine, claims.run, claims.episode


def _unreadable(error: BombusError) -> Refused:
    log.warning("the earlier turns of an episode cannot be read", extra={"why": str(error)})
    return Refused(
        Code.BUS_DOWN, f"The earlier turns of this episode cannot be read from the log right now; try again. ({error})"
    )
