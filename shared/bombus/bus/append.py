"""Appends decisions to the event log, with many in flight, each accepted only directly after what it must follow (R2,
R4).

The log always holds a prefix of the decisions, and never part of a decision. After any failure, the last event on the
log shows how many decisions are stored, or that another coordinator is now the leader.
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
from bombus.bus.wire import EpochFence, PubAck, ServerRefused, StreamFull
from bombus.errors import BombusError, BusUnavailable, Deposed, Refused, StreamEndLost
from bombus.hive.events import HIVE, EpochOpened, kind_of

logger = logging.getLogger(__name__)

BATCH_MESSAGES_MAX = 1_000  # the server's limit
ACK_WAIT_S = 3.0
FULL_S = 1.0  # how long compacting a full log may take
_PAUSE_S = 0.05
_PAUSE_MAX_S = 1.0


class Outgoing(msgspec.Struct, frozen=True):
    """An event to append. `headers` have at least the epoch (`Bombus-Epoch`). A `msg_id` must be used only once.

    On the log, the id is prefixed with the connection's token, so that two coordinators that both believe they lead
    never write the same id.
    """

    subject: str
    body: bytes
    msg_id: str
    headers: Mapping[str, str]


AtomicWrite = Sequence[Outgoing]  # stored as a whole: one event, or a batch of one or more decisions


async def append(bus: Bus, decisions: Sequence[Sequence[Outgoing]], expected_last: int, timeout_s: float = 30.0) -> int:
    """Append the events of `decisions` after event `expected_last`. Return the new last sequence once all are stored.

    With `--durability power`, the events are on the disk by then. Each decision is stored as a whole or not at all.
    After a failure, the same call may be repeated over the same bus, since events that are already stored are
    recognised. The first append of an epoch must be its `epoch.opened`, alone. Raises `Deposed` if another coordinator
    has written, `BusUnavailable` if the log cannot be reached within `timeout_s`, `StreamFull` if the log is full for
    longer than a compaction in progress may take, `StreamEndLost` if the log is shorter than `expected_last`, and
    `ValueError` for a decision of more than 1,000 events.
    """
    wanted = _checked(decisions)
    loop = asyncio.get_running_loop()
    began = loop.time()
    deadline = began + timeout_s
    pause_s = _PAUSE_S
    stored = 0  # of these decisions
    while wanted:
        rest = wanted[stored:]
        failure = await _attempt(bus, rest, expected_last + sum(map(len, wanted[:stored]))) if rest else None
        if failure is None and bus.syncing.needed:
            failure = await _sync(bus, deadline)
        if failure is None:
            return expected_last + sum(map(len, wanted))
        if isinstance(failure, Refused):
            raise failure
        logger.warning("an append after event %d failed, checking how much is stored: %s", expected_last, failure)
        bus.epoch_fence = None
        before, stored = stored, await _count_stored(bus, wanted, expected_last)
        if stored == before and isinstance(failure, ServerRefused) and pause_s > _PAUSE_S:
            raise failure  # refused twice, so a server failure is not the reason
        if stored < len(wanted) and isinstance(failure, StreamFull) and loop.time() + pause_s > began + FULL_S:
            raise failure
        if loop.time() + pause_s > deadline and (stored < len(wanted) or bus.syncing.needed):
            raise BusUnavailable(f"an append was not stored within {timeout_s:g} s: {failure}") from failure
        if stored < len(wanted):
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _PAUSE_MAX_S)
    return expected_last


def _checked(decisions: Sequence[Sequence[Outgoing]]) -> list[Sequence[Outgoing]]:
    """Return the decisions that have events. Raises `ValueError` for one that has too many."""
    found = [decision for decision in decisions if decision]
    for decision in found:
        if len(decision) > BATCH_MESSAGES_MAX:
            raise ValueError(f"a decision of {len(decision)} events is over the limit of {BATCH_MESSAGES_MAX}")
    return found


async def _sync(bus: Bus, deadline: float) -> BombusError | None:
    """Wait until everything that is stored is on the disk. Return what prevented that, or None."""
    try:
        async with asyncio.timeout_at(deadline):
            await bus.syncing.wait()
    except TimeoutError:
        return BusUnavailable("the server's disk was not synced")
    except BusUnavailable as error:
        return error
    return None


async def _attempt(bus: Bus, decisions: Sequence[Sequence[Outgoing]], last: int) -> BombusError | None:
    """Send everything. Return the first failure, or None if every event is stored at its expected position."""
    if len(decisions) == 1:
        return await _append_step(bus, [decisions[0]], last, {})  # the expected sequence is a sufficient fence
    try:
        epoch_fence = await _epoch_fence(bus, int(decisions[0][0].headers[EPOCH]))
    except BusUnavailable as error:
        return error
    fence = {
        EXPECTED_LAST_OF_SUBJECT: str(epoch_fence.opened),
        EXPECTED_LAST_FILTER: _epoch_subject(bus),
    }
    for step in plan_steps(decisions, chained=epoch_fence.replicas == 1):
        failure = await _append_step(bus, step, last, fence)
        if failure is not None:
            return failure
        last += sum(map(len, step))
    return None


def plan_steps(decisions: Sequence[Sequence[Outgoing]], chained: bool) -> list[list[AtomicWrite]]:
    """Split an append into steps. Each step waits for the one before it; within a step, nothing waits.

    On one replica (`chained`), everything is one step. Single events are written as they are, but everything from the
    first to the last decision with several events goes into as few atomic batches as possible, because each batch costs
    a server without replication a disk sync. On three replicas, the server refuses a second message under the same
    fence while one is in flight, and batches cost little, so everything goes into batches, one per step.
    """
    several = [index for index, decision in enumerate(decisions) if len(decision) > 1]
    first, last = (several[0], several[-1]) if several else (len(decisions), -1)
    if not chained:
        first, last = 0, len(decisions) - 1
    writes: list[list[Outgoing]] = []
    for index, decision in enumerate(decisions):
        if first < index <= last and len(writes[-1]) + len(decision) <= BATCH_MESSAGES_MAX:
            writes[-1] += decision
        else:
            writes.append(list(decision))
    return [list(writes)] if chained else [[write] for write in writes]


async def _append_step(
    bus: Bus, step: Sequence[AtomicWrite], last: int, fence: Mapping[str, str]
) -> BombusError | None:
    """Send all writes without waiting, then wait for all of them. Return the first failure.

    After the first write, an expected sequence does not suffice as a fence. If earlier writes of the step were refused
    and another coordinator had appended just as many events, the sequence would match by accident. So each write also
    carries `fence`, which requires that the last `epoch.opened` is still ours. (Naming the previous event by its
    message id would work on one replica; on three, nats-server 2.15 treats the mismatch as a write error and stops the
    stream.)
    """
    acks: list[tuple[int, asyncio.Future[PubAck]]] = []
    failure: BombusError | None = None
    for write in step:
        try:
            future = await _send(bus, write, {EXPECTED_LAST: str(last), **fence})
        except BombusError as error:
            failure = error
            break
        last += len(write)
        acks.append((last, future))
    results = await _outcomes([future for _, future in acks])
    for (expected, _), result in zip(acks, results):
        if isinstance(result, BombusError):
            return result
        if result.duplicate or result.seq != expected:
            return BusUnavailable(f"event {expected} was stored before, at {result.seq}")
    return failure


async def _outcomes(acks: Sequence[asyncio.Future[PubAck]]) -> list[PubAck | BombusError]:
    """Wait for all acknowledgements, and return each of them, or the failure in its place. (`asyncio.gather` would need
    a callback for each.)"""
    results: list[PubAck | BombusError] = []
    try:
        for ack in acks:
            try:
                results.append(await ack)
            except BombusError as error:
                results.append(error)
    finally:
        for ack in acks[len(results) :]:
            ack.cancel()
    return results


async def _send(bus: Bus, write: AtomicWrite, fence: Mapping[str, str]) -> asyncio.Future[PubAck]:
    """Send a single event as it is, or several as an atomic batch, of which the server acknowledges only the last."""
    event = write[-1]
    if len(write) == 1:
        headers = {**event.headers, **fence}
    else:
        for each in write:
            bus.publisher.check(each.body)
        batch = secrets.token_hex(8)  # new for each attempt: the server may still hold part of the previous one
        for number, each in enumerate(write[:-1], start=1):
            headers = {MSG_ID: log_id(bus, each), BATCH_ID: batch, BATCH_SEQUENCE: str(number), **each.headers}
            await bus.publisher.send_without_ack(each.subject, each.body, {**headers, **fence})
            fence = {}
        headers = {**event.headers, BATCH_ID: batch, BATCH_SEQUENCE: str(len(write)), BATCH_COMMIT: "1"}
    return await bus.publisher.submit(
        event.subject,
        event.body,
        msg_id=log_id(bus, event),
        headers=headers,
        timeout_s=ACK_WAIT_S,
        repeat=False,
        synced=False,
    )


async def _count_stored(bus: Bus, decisions: Sequence[Sequence[Outgoing]], expected_last: int) -> int:
    """Return how many of the decisions the log has after `expected_last`, judging by the log's last event as read from
    the leader."""
    epoch = int(decisions[0][0].headers[EPOCH])
    stored = await bus.last(bus.subjects.events_stream)
    last = 0 if stored is None else stored.seq
    if last < expected_last:
        raise StreamEndLost(bus.subjects.events_stream, expected_last)
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
    raise Deposed(f"event {last} ({stored.headers.get(MSG_ID)}) is not ours: another coordinator is writing")


async def _epoch_fence(bus: Bus, epoch: int) -> EpochFence:
    """Return the epoch's opening position and the log's number of replicas. Both are read once per epoch, and again
    after a failure."""
    if bus.epoch_fence is None or bus.epoch_fence.epoch != epoch:
        opened = await bus.last(bus.subjects.events_stream, _epoch_subject(bus))
        if opened is not None and int(opened.headers.get(EPOCH, "0")) > epoch:
            raise Deposed(f"epoch {opened.headers[EPOCH]} is open, ours was {epoch}")
        state = await bus.state(bus.subjects.events_stream)
        bus.epoch_fence = EpochFence(epoch, 0 if opened is None else opened.seq, state.replicas)
    return bus.epoch_fence


def _epoch_subject(bus: Bus) -> str:
    return bus.subjects.event(HIVE, kind_of(EpochOpened))


def log_id(bus: Bus, event: Outgoing) -> str:
    """Return the message id under which the event is stored on the log."""
    return f"{bus.token}.{event.msg_id}"
