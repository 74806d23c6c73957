"""Appending decisions to the event log: many in the air at once, each fenced by what it must follow (R2, R4).

What lands is a prefix of the flight, cut between decisions. After any failure the log's last event says how far it
came, or that somebody else leads.
"""

import asyncio
import logging
import secrets
from collections.abc import Mapping, Sequence

import msgspec

from bombus.bus.connection import Bus
from bombus.bus.headers import (
    BATCH_COMMIT,
    BATCH_ID,
    BATCH_SEQUENCE,
    EPOCH,
    EXPECTED_LAST,
    EXPECTED_LAST_FILTER,
    EXPECTED_LAST_OF_SUBJECT,
    MSG_ID,
)
from bombus.bus.wire import Ground, PubAck, ServerRefused
from bombus.errors import BombusError, BusUnavailable, Deposed, LogCorrupted, Refused
from bombus.hive.events import HIVE, EpochOpened

logger = logging.getLogger(__name__)

BATCH_MESSAGES_MAX = 1_000  # the server's limit
ACK_WAIT_S = 3.0
_PAUSE_S = 0.05
_PAUSE_MAX_S = 1.0


class Outgoing(msgspec.Struct, frozen=True):
    """An event on its way. `headers` carry at least the epoch (`Bombus-Epoch`); `msg_id` is used once by its author.

    On the log the id is prefixed by the connection's, so that two who believe they lead never write the same one.
    """

    subject: str
    body: bytes
    msg_id: str
    headers: Mapping[str, str]


Item = Sequence[Outgoing]  # what lands whole: one event, or a batch of one or more decisions


async def fly(bus: Bus, decisions: Sequence[Sequence[Outgoing]], expected_last: int, timeout_s: float = 30.0) -> int:
    """Append the events of `decisions` behind `expected_last`; return the new last sequence once all are stored.

    Each decision lands whole or not at all. The same call may be made again over the same bus after a failure: what
    is there already is recognised. The first flight of an epoch is its `epoch.opened`, alone. Raises `Deposed` when
    another coordinator has written, `BusUnavailable` when the log cannot be reached within `timeout_s` or is full,
    `LogCorrupted` when it is shorter than `expected_last`, `ValueError` for a decision of more than 1,000 events.
    """
    rest = [decision for decision in decisions if decision]
    for decision in rest:
        if len(decision) > BATCH_MESSAGES_MAX:
            raise ValueError(f"a decision of {len(decision)} events is over the limit of {BATCH_MESSAGES_MAX}")
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    pause_s = _PAUSE_S
    while rest:
        failure = await _attempt(bus, rest, expected_last)
        if failure is None:
            return expected_last + sum(map(len, rest))
        if isinstance(failure, Refused):
            raise failure
        logger.warning("a flight behind event %d must be looked after: %s", expected_last, failure)
        bus.ground = None
        landed = await _landed(bus, rest, expected_last)
        if landed == 0 and isinstance(failure, ServerRefused) and pause_s > _PAUSE_S:
            raise failure  # for the second time, so it is not something that the failure of a server left behind
        expected_last += sum(map(len, rest[:landed]))
        rest = rest[landed:]
        if rest:
            if loop.time() + pause_s > deadline:
                raise BusUnavailable(f"a flight did not land within {timeout_s:g} s: {failure}") from failure
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _PAUSE_MAX_S)
    return expected_last


async def _attempt(bus: Bus, decisions: Sequence[Sequence[Outgoing]], last: int) -> BombusError | None:
    """Send everything. The first failure, or None when all landed where they should."""
    if len(decisions) == 1:
        return await _fly_leg(bus, [decisions[0]], last, {})  # the expected sequence is fence enough
    try:
        ground = await _ground(bus, int(decisions[0][0].headers[EPOCH]))
    except BusUnavailable as error:
        return error
    fence = {
        EXPECTED_LAST_OF_SUBJECT: str(ground.opened),
        EXPECTED_LAST_FILTER: _epoch_subject(bus),
    }
    for leg in legs(decisions, chained=ground.replicas == 1):
        failure = await _fly_leg(bus, leg, last, fence)
        if failure is not None:
            return failure
        last += sum(map(len, leg))
    return None


def legs(decisions: Sequence[Sequence[Outgoing]], chained: bool) -> list[list[Item]]:
    """Cut a flight into legs; each waits for the one before, within one nothing waits.

    On one replica (`chained`) all is one leg, single events as they are and everything between the first and the
    last decision of several events in as few atomic batches as possible: there, each batch costs the server a sync
    of its disk. On three replicas the server refuses a second message under the same fence while one is on its way,
    and batches cost little: everything goes in batches, one to a leg.
    """
    several = [index for index, decision in enumerate(decisions) if len(decision) > 1]
    first, last = (several[0], several[-1]) if several else (len(decisions), -1)
    if not chained:
        first, last = 0, len(decisions) - 1
    items: list[list[Outgoing]] = []
    for index, decision in enumerate(decisions):
        if first < index <= last and len(items[-1]) + len(decision) <= BATCH_MESSAGES_MAX:
            items[-1] += decision
        else:
            items.append(list(decision))
    return [list(items)] if chained else [[item] for item in items]


async def _fly_leg(bus: Bus, leg: Sequence[Item], last: int, fence: Mapping[str, str]) -> BombusError | None:
    """Send all items without waiting, then wait for all.

    An expected sequence alone is no fence behind the first item: when another coordinator has appended as many
    events as the refused items before it were, it holds by accident. So each carries `fence` too, which says that
    the last `epoch.opened` is still ours. (Naming the event before by its message id would do on one replica; on
    three, nats-server 2.15 takes the mismatch for a write error and stops the stream.)
    """
    acks: list[tuple[int, asyncio.Future[PubAck]]] = []
    failure: BombusError | None = None
    for item in leg:
        try:
            future = await _send(bus, item, {EXPECTED_LAST: str(last), **fence})
        except BombusError as error:
            failure = error
            break
        last += len(item)
        acks.append((last, future))
    results = await asyncio.gather(*(future for _, future in acks), return_exceptions=True)
    for (expected, _), result in zip(acks, results):
        if isinstance(result, BombusError):
            return result
        if isinstance(result, BaseException):
            raise result
        if result.duplicate or result.seq != expected:
            return BusUnavailable(f"event {expected} was stored before, at {result.seq}")
    return failure


async def _send(bus: Bus, item: Item, fence: Mapping[str, str]) -> asyncio.Future[PubAck]:
    """One event goes as it is. Several go as an atomic batch, of which the server acknowledges only the last."""
    event = item[-1]
    if len(item) == 1:
        headers = {**event.headers, **fence}
    else:
        for each in item:
            bus.publisher.check(each.body)
        batch = secrets.token_hex(8)  # a new one for each attempt: the server may hold the start of the last
        for number, each in enumerate(item[:-1], start=1):
            headers = {MSG_ID: log_id(bus, each), BATCH_ID: batch, BATCH_SEQUENCE: str(number), **each.headers}
            await bus.publisher.send_without_ack(each.subject, each.body, {**headers, **fence})
            fence = {}
        headers = {**event.headers, BATCH_ID: batch, BATCH_SEQUENCE: str(len(item)), BATCH_COMMIT: "1"}
    return await bus.publisher.submit(
        event.subject, event.body, msg_id=log_id(bus, event), headers=headers, timeout_s=ACK_WAIT_S, again=False
    )


async def _landed(bus: Bus, decisions: Sequence[Sequence[Outgoing]], expected_last: int) -> int:
    """How many of these decisions are on the log behind `expected_last`, by a leader read of its last event."""
    epoch = int(decisions[0][0].headers[EPOCH])
    stored = await bus.last(bus.subjects.events_stream)
    last = 0 if stored is None else stored.seq
    if last < expected_last:
        raise LogCorrupted(f"the event log ends at {last}; {expected_last} was acknowledged before")
    if stored is not None and int(stored.headers.get(EPOCH, "0")) > epoch:
        raise Deposed(f"epoch {stored.headers[EPOCH]} is open, ours was {epoch}")
    if last == expected_last or stored is None:
        return 0
    position = expected_last
    for count, decision in enumerate(decisions, start=1):
        position += len(decision)
        event = decision[-1]
        if position == last and log_id(bus, event) == stored.headers.get(MSG_ID) and event.body == stored.data:
            return count
        if position >= last:
            break
    raise Deposed(f"event {last} ({stored.headers.get(MSG_ID)}) is not ours: another coordinator writes")


async def _ground(bus: Bus, epoch: int) -> Ground:
    """Where this epoch was opened, and how many replicas the log has; read once for an epoch and after failures."""
    if bus.ground is None or bus.ground.epoch != epoch:
        opened = await bus.last(bus.subjects.events_stream, _epoch_subject(bus))
        if opened is not None and int(opened.headers.get(EPOCH, "0")) > epoch:
            raise Deposed(f"epoch {opened.headers[EPOCH]} is open, ours was {epoch}")
        state = await bus.state(bus.subjects.events_stream)
        bus.ground = Ground(epoch, 0 if opened is None else opened.seq, state.replicas)
    return bus.ground


def _epoch_subject(bus: Bus) -> str:
    return bus.subjects.event(HIVE, str(EpochOpened.__struct_config__.tag))


def log_id(bus: Bus, event: Outgoing) -> str:
    """The message id under which the event lies on the log."""
    return f"{bus.token}.{event.msg_id}"
