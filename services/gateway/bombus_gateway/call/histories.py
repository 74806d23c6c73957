"""The conversations of open episodes: cached here, read again from the log where another gateway served them (R10)."""

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

log = logging.getLogger(__name__)

NOT_OURS_MAX = 4096  # for each episode


class Match(msgspec.Struct, frozen=True):
    """`count` messages of a request are those of `node`; without a node there is nothing to extend."""

    count: int = 0
    node: Node | None = None


class Histories:
    """Least recently used conversations go when there are too many bytes of them: the log has them all."""

    def __init__(self, bus: Bus, settings: GatewaySettings) -> None:
        self._bus = bus
        self._settings = settings
        self._known: OrderedDict[tuple[str, int, str], Conversation] = OrderedDict()
        self._bytes = 0

    def of(self, claims: KeyClaims) -> Conversation:
        """The conversation of a key's episode, as far as it is known here."""
        key = (claims.engine, claims.run, claims.episode)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = Conversation()
            self._bytes += found.bytes
        else:
            self._known.move_to_end(key)
        return found

    def grown(self, before: int, conversation: Conversation) -> None:
        """Account for a conversation that had `before` bytes."""
        self._bytes += conversation.bytes - before
        while self._bytes > self._settings.history_bytes_max and len(self._known) > 1:
            _, oldest = self._known.popitem(last=False)
            self._bytes -= oldest.bytes

    async def match(
        self, claims: KeyClaims, roles: Sequence[str], digests: Sequence[bytes], traceparent: str = ""
    ) -> Match:
        """What a request with these messages extends.

        Where it has an assistant's message that no conversation here ends with, the log is asked before the message is
        taken for the harness's own. Raises `Refused` BUS_DOWN when the log cannot be asked.
        """
        conversation = self.of(claims)
        match = _longest(conversation, digests)
        beyond = [index for index in range(match.count, len(roles)) if roles[index] == "assistant"]
        if not beyond or digests[beyond[-1]] in conversation.not_ours:
            return match
        await self.read_log(claims, traceparent)
        match = _longest(conversation, digests)
        if len(conversation.not_ours) < NOT_OURS_MAX:
            conversation.not_ours.update(digests[index] for index in beyond if index >= match.count)
        return match

    async def read_log(self, claims: KeyClaims, traceparent: str = "") -> None:
        """Bring the conversation up to what the log has. Raises `Refused`."""
        conversation = self.of(claims)
        before = conversation.bytes
        try:
            calls = await self._calls_of(claims, traceparent)
            missing = [call.ref for call in calls if not conversation.knows(call.ref)]
            for ref, record in zip(missing, await self.records(missing)):
                conversation.add_stored(ref, record)
        except KeyError as error:
            raise Refused(
                Code.BUS_DOWN, f"A call of this episode continues one that is not in the log: {error}"
            ) from error
        finally:
            self.grown(before, conversation)

    async def records(self, refs: Sequence[CallRef]) -> list[CallRecord]:
        """The records at these places, checked. Raises `Refused` BUS_DOWN: rendering anew would be drift."""
        if not refs:
            return []
        try:
            stored = await self._bus.get_many(self._bus.subjects.calls_stream, [ref.seq for ref in refs])
            return [decode_record(found.data, ref) for found, ref in zip(stored, refs)]
        except BombusError as error:
            raise _cannot(error) from error

    async def _calls_of(self, claims: KeyClaims, traceparent: str) -> tuple[NotedCall, ...]:
        lookup = Lookup(id=uuid.uuid4().hex, engine=claims.engine, episode=claims.episode)
        try:
            found = await self._bus.inbox.request(lookup, self._settings.lookup_s_max, traceparent=traceparent)
        except BusUnavailable as error:
            raise _cannot(error) from error
        if not isinstance(found, Found):
            raise Refused(Code.INTERNAL, f"The coordinator answered a look-up with {type(found).__name__}.")
        if found.run != claims.run or not found.open:
            raise Refused(Code.EPISODE_OVER, f"Episode {claims.episode} is over; claim another one.")
        return found.calls


def _longest(conversation: Conversation, digests: Sequence[bytes]) -> Match:
    found = conversation.longest(digests)
    return Match(*found) if found is not None else Match()


def _cannot(error: BombusError) -> Refused:
    log.warning("the earlier turns of an episode cannot be read", extra={"why": str(error)})
    return Refused(
        Code.BUS_DOWN, f"The earlier turns of this episode cannot be read from the log just now; try again. ({error})"
    )
