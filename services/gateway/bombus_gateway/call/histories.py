"""The conversations of open episodes: cached, and read from the log where another gateway served them (R10)."""

import logging
import uuid
from collections import OrderedDict
from collections.abc import Sequence

import msgspec

from bombus.bus import Bus
from bombus.errors import BombusError, BusUnavailable, Code, Refused
from bombus.hive.events import NotedCall
from bombus.hive.inbox import Found, Lookup
from bombus.hive.records import CallRecord, CallRef, decode_record
from bombus_gateway.call.conversation import Conversation, Node
from bombus_gateway.keys import KeyClaims
from bombus_gateway.settings import GatewaySettings
from bombus_gateway.text.message import ChatMessage

log = logging.getLogger(__name__)

LOOKUP_S_MAX = 10.0
NOT_OURS_MAX = 4096  # for each episode


class Match(msgspec.Struct, frozen=True):
    """The first `count` messages of a request are those of `node`. Without a node there is nothing to extend."""

    count: int = 0
    node: Node | None = None


class Histories:
    """A cache of conversations. The least recently used are dropped when they take too much memory: the log has all."""

    def __init__(self, bus: Bus, settings: GatewaySettings) -> None:
        self._bus = bus
        self._bytes_max = settings.history_mb_max << 20
        self._lookup_s_max = min(LOOKUP_S_MAX, settings.bus_timeout_s)
        self._conversations: OrderedDict[tuple[str, int, str], Conversation] = OrderedDict()
        self._bytes = 0

    def conversation(self, claims: KeyClaims) -> Conversation:
        """Return the conversation of a key's episode, as far as it is known here."""
        key = (claims.engine, claims.run, claims.episode)
        found = self._conversations.get(key)
        if found is None:
            found = self._conversations[key] = Conversation()
            self._bytes += found.bytes
        else:
            self._conversations.move_to_end(key)
        return found

    def account_for(self, before: int, conversation: Conversation) -> None:
        """Account for the growth of a conversation that had `before` bytes."""
        self._bytes += conversation.bytes - before
        while self._bytes > self._bytes_max and len(self._conversations) > 1:
            _, oldest = self._conversations.popitem(last=False)
            self._bytes -= oldest.bytes

    async def match(
        self, claims: KeyClaims, messages: Sequence[ChatMessage], digests: Sequence[bytes], traceparent: str = ""
    ) -> Match:
        """Find what a request with these messages extends.

        An assistant's message that is not known here may be one that another gateway sampled: the log is read before it
        counts as the harness's own. Raises `Refused` BUS_DOWN when the log cannot be read.
        """
        conversation = self.conversation(claims)
        match = _longest(conversation, digests, messages)
        beyond = [at for at in range(match.count, len(messages)) if messages[at]["role"] == "assistant"]
        if not beyond or digests[beyond[-1]] in conversation.not_ours:
            return match
        await self.read_log(claims, traceparent)
        match = _longest(conversation, digests, messages)
        if len(conversation.not_ours) < NOT_OURS_MAX:
            conversation.not_ours.update(digests[index] for index in beyond if index >= match.count)
        return match

    async def read_log(self, claims: KeyClaims, traceparent: str = "") -> None:
        """Add the calls that the log has and this conversation has not. Raises `Refused`."""
        conversation = self.conversation(claims)
        before = conversation.bytes
        try:
            calls = await self._calls_of(claims, traceparent)
            missing = [call.ref for call in calls if not conversation.knows(call.ref)]
            for ref, (record, size) in zip(missing, await self._stored(missing)):
                conversation.add_stored(ref, record)
                conversation.stored_bytes += size
        except KeyError as error:
            raise Refused(
                Code.BUS_DOWN, f"A call of this episode continues one that is not in the log: {error}"
            ) from error
        finally:
            self.account_for(before, conversation)

    async def records(self, refs: Sequence[CallRef]) -> list[CallRecord]:
        """Return the records at these places, checked against their digests.

        Raises `Refused` BUS_DOWN: earlier turns are never rendered again, since the tokens could differ.
        """
        return [record for record, _ in await self._stored(refs)]

    async def _stored(self, refs: Sequence[CallRef]) -> list[tuple[CallRecord, int]]:
        """Return the records at these places with their sizes in bytes. Raises `Refused` like `records`."""
        if not refs:
            return []
        try:
            stored = await self._bus.get_many(self._bus.subjects.calls_stream, [ref.seq for ref in refs])
            return [(decode_record(found.data, ref), len(found.data)) for found, ref in zip(stored, refs)]
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
            raise Refused(Code.EPISODE_OVER, f"Episode {claims.episode} is over; claim another one.")
        return found.calls


def _longest(conversation: Conversation, digests: Sequence[bytes], messages: Sequence[ChatMessage]) -> Match:
    found = conversation.longest(digests, messages)
    return Match(*found) if found is not None else Match()


def _unreadable(error: BombusError) -> Refused:
    log.warning("the earlier turns of an episode cannot be read", extra={"why": str(error)})
    return Refused(
        Code.BUS_DOWN, f"The earlier turns of this episode cannot be read from the log just now; try again. ({error})"
    )
