"""Decides which session gets which slot of an environment server: leases with a time to live, and a queue with
deadlines.

Pure: commands in, events out; commands carry the time. A session whose lease has ended never gets it back.
"""

from collections import deque
from enum import StrEnum
from typing import assert_never

import msgspec

SECOND = 1_000_000_000


class LeaseEnd(StrEnum):
    """Why a session lost its slot."""

    RELEASED = "released"  # its client closed it, or the connection ended
    LAPSED = "lapsed"  # nothing came from its client for a lease's time to live
    IDLE = "idle"  # its client was connected, but did not use it
    BROKEN = "broken"  # its environment broke, or a step took too long


class SlotSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings for the slots: how many environments there are, and how long a silent or idle session keeps its slot.

    A slot that is being cleaned will soon be free, so a client waits up to `clean_ns` for such a slot even if it did
    not ask to wait.
    """

    slots: int
    clean_ns: int
    ttl_ns: int
    idle_ns: int
    queue_max: int


# ---- commands -----------------------------------------------------------------------------------------------------


class Acquire(msgspec.Struct, frozen=True):
    """A client requests a slot, and waits for it until `deadline_ns`."""

    session: str
    now_ns: int
    deadline_ns: int


class Beat(msgspec.Struct, frozen=True):
    """A session's client gave a sign of life. `worked` says that the client used its environment, rather than merely
    being connected."""

    session: str
    now_ns: int
    worked: bool = False


class Release(msgspec.Struct, frozen=True):
    """A session gives up its slot, or stops waiting for one."""

    session: str
    reason: LeaseEnd = LeaseEnd.RELEASED


class Cleaned(msgspec.Struct, frozen=True):
    """A slot's environment is gone, and its backend has been cleaned or replaced."""

    slot: int
    now_ns: int


class Elapsed(msgspec.Struct, frozen=True):
    """Time has passed."""

    now_ns: int


SlotCommand = Acquire | Beat | Release | Cleaned | Elapsed


# ---- events -------------------------------------------------------------------------------------------------------


class LeaseGranted(msgspec.Struct, frozen=True):
    session: str
    slot: int
    at_ns: int


class LeaseQueued(msgspec.Struct, frozen=True):
    session: str
    deadline_ns: int


class LeaseRenewed(msgspec.Struct, frozen=True):
    session: str
    at_ns: int
    worked: bool


class LeaseEnded(msgspec.Struct, frozen=True):
    """A session has lost its slot. The slot is not free until it has been cleaned."""

    session: str
    slot: int
    reason: LeaseEnd


class LeaseRefused(msgspec.Struct, frozen=True):
    """No slot became free in time, or too many clients were waiting already."""

    session: str


class QueueLeft(msgspec.Struct, frozen=True):
    session: str


class SlotFreed(msgspec.Struct, frozen=True):
    slot: int


SlotEvent = LeaseGranted | LeaseQueued | LeaseRenewed | LeaseEnded | LeaseRefused | QueueLeft | SlotFreed


# ---- state --------------------------------------------------------------------------------------------------------


class SlotLease(msgspec.Struct):
    slot: int
    heard_ns: int
    worked_ns: int


class SlotTable:
    """The state of all slots, folded from the events. Each slot is free, leased to one session, or being cleaned."""

    def __init__(self, settings: SlotSettings) -> None:
        self.settings = settings
        self.free = deque(range(settings.slots))
        self.leases: dict[str, SlotLease] = {}
        self.cleaning: set[int] = set()
        self.queue: dict[str, int] = {}  # session -> deadline, in the order in which they arrived


def decide(command: SlotCommand, table: SlotTable) -> list[SlotEvent]:
    """Return the events that a command causes. A repeated command that changes nothing causes none."""
    match command:
        case Acquire():
            return _acquire(command, table)
        case Beat(session, now_ns, worked):
            return [LeaseRenewed(session, now_ns, worked)] if session in table.leases else []
        case Release(session, reason):
            if session in table.queue:
                return [QueueLeft(session)]
            lease = table.leases.get(session)
            return [] if lease is None else [LeaseEnded(session, lease.slot, reason)]
        case Cleaned(slot, now_ns):
            if slot not in table.cleaning:
                return []
            freed: list[SlotEvent] = [SlotFreed(slot)]
            waiting = next((session for session, deadline in table.queue.items() if deadline > now_ns), None)
            return freed if waiting is None else [*freed, LeaseGranted(waiting, slot, now_ns)]
        case Elapsed(now_ns):
            return _elapsed(now_ns, table)
    assert_never(command)


def _acquire(command: Acquire, table: SlotTable) -> list[SlotEvent]:
    session = command.session
    if session in table.leases or session in table.queue:
        return []
    if table.free:
        return [LeaseGranted(session, table.free[0], command.now_ns)]
    deadline_ns = command.deadline_ns
    if len(table.queue) < len(table.cleaning):
        deadline_ns = max(deadline_ns, command.now_ns + table.settings.clean_ns)
    elif len(table.queue) >= table.settings.queue_max:
        return [LeaseRefused(session)]
    return [LeaseQueued(session, deadline_ns) if deadline_ns > command.now_ns else LeaseRefused(session)]


def _elapsed(now_ns: int, table: SlotTable) -> list[SlotEvent]:
    events: list[SlotEvent] = []
    for session, lease in table.leases.items():
        if now_ns - lease.heard_ns >= table.settings.ttl_ns:
            events.append(LeaseEnded(session, lease.slot, LeaseEnd.LAPSED))
        elif now_ns - lease.worked_ns >= table.settings.idle_ns:
            events.append(LeaseEnded(session, lease.slot, LeaseEnd.IDLE))
    return events + [LeaseRefused(session) for session, deadline in table.queue.items() if deadline <= now_ns]


def evolve(table: SlotTable, event: SlotEvent) -> None:
    """Apply an event to the table."""
    match event:
        case LeaseGranted(session, slot, at_ns):
            table.queue.pop(session, None)
            table.free.remove(slot)
            table.leases[session] = SlotLease(slot=slot, heard_ns=at_ns, worked_ns=at_ns)
        case LeaseQueued(session, deadline_ns):
            table.queue[session] = deadline_ns
        case LeaseRenewed(session, at_ns, worked):
            lease = table.leases[session]
            lease.heard_ns = at_ns
            lease.worked_ns = at_ns if worked else lease.worked_ns
        case LeaseEnded(session, slot):
            del table.leases[session]
            table.cleaning.add(slot)
        case LeaseRefused(session) | QueueLeft(session):
            table.queue.pop(session, None)
        case SlotFreed(slot):
            table.cleaning.remove(slot)
            table.free.append(slot)
        case _:
            assert_never(event)
