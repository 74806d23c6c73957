"""Leases of slots, with time as an input."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bombus.environments.serving.slots import (
    SECOND,
    Acquire,
    Beat,
    Cleaned,
    Elapsed,
    LeaseEnd,
    LeaseEnded,
    LeaseGranted,
    LeaseQueued,
    LeaseRefused,
    LeaseRenewed,
    QueueLeft,
    Release,
    SlotCommand,
    SlotEvent,
    SlotFreed,
    SlotSettings,
    SlotTable,
    decide,
    evolve,
)

YEAR_S = 365 * 24 * 3600
SETTINGS = SlotSettings(slots=2, clean_ns=3 * SECOND, ttl_ns=20 * SECOND, idle_ns=600 * SECOND, queue_max=2)


class Run:
    """A table, and what follows from each command to it."""

    def __init__(self, given: SlotSettings = SETTINGS) -> None:
        self.table = SlotTable(given)

    def do(self, command: SlotCommand) -> list[SlotEvent]:
        events = decide(command, self.table)
        for event in events:
            evolve(self.table, event)
        return events

    def acquire(self, session: str, at_s: int = 0, wait_s: int = 0) -> list[SlotEvent]:
        return self.do(Acquire(session, at_s * SECOND, (at_s + wait_s) * SECOND))


@pytest.fixture
def full() -> Run:
    run = Run()
    run.acquire("a")
    run.acquire("b")
    return run


def test_each_session_gets_a_slot_of_its_own() -> None:
    run = Run()
    assert run.acquire("a") == [LeaseGranted("a", 0, 0)]
    assert run.acquire("b") == [LeaseGranted("b", 1, 0)]
    assert run.acquire("a") == []


def test_one_too_many_is_refused_and_one_that_waits_is_queued(full: Run) -> None:
    assert full.acquire("c") == [LeaseRefused("c")]
    assert full.acquire("d", wait_s=5) == [LeaseQueued("d", 5 * SECOND)]
    assert full.acquire("e", wait_s=5) == [LeaseQueued("e", 5 * SECOND)]
    assert full.acquire("f", wait_s=5) == [LeaseRefused("f")], "the queue has a limit"


def test_a_slot_goes_to_the_first_that_waits_once_it_is_clean(full: Run) -> None:
    full.acquire("c", wait_s=1)
    full.acquire("d", wait_s=9)
    assert full.do(Release("a")) == [LeaseEnded("a", 0, LeaseEnd.RELEASED)]
    assert full.do(Cleaned(0, 2 * SECOND)) == [SlotFreed(0), LeaseGranted("d", 0, 2 * SECOND)], "c waited for 1 s only"
    assert full.do(Cleaned(0, 2 * SECOND)) == []


def test_a_client_waits_unasked_for_a_slot_that_is_being_cleaned(full: Run) -> None:
    full.do(Release("a"))
    assert full.acquire("c") == [LeaseQueued("c", 3 * SECOND)]
    assert full.acquire("d") == [LeaseRefused("d")], "only one is being cleaned"
    assert full.do(Cleaned(0, SECOND)) == [SlotFreed(0), LeaseGranted("c", 0, SECOND)]


def test_one_that_asked_to_wait_for_longer_than_cleaning_takes_does_so(full: Run) -> None:
    full.do(Release("a"))
    assert full.acquire("c", wait_s=60) == [LeaseQueued("c", 60 * SECOND)]


def test_a_client_that_is_not_heard_of_loses_its_slot_after_the_ttl(full: Run) -> None:
    assert full.do(Beat("b", 15 * SECOND)) == [LeaseRenewed("b", 15 * SECOND, False)]
    assert full.do(Elapsed(20 * SECOND - 1)) == []
    assert full.do(Elapsed(20 * SECOND)) == [LeaseEnded("a", 0, LeaseEnd.LAPSED)]
    assert full.do(Elapsed(20 * SECOND)) == []


def test_a_lease_that_has_ended_never_comes_back(full: Run) -> None:
    full.do(Elapsed(20 * SECOND))
    assert full.do(Beat("a", 21 * SECOND)) == []
    assert full.do(Release("a")) == [], "a release is idempotent"
    assert "a" not in full.table.leases


def test_a_client_that_is_there_and_does_nothing_loses_its_slot_later() -> None:
    run = Run()
    run.acquire("a")
    for at_s in range(10, 600, 10):
        run.do(Beat("a", at_s * SECOND))
        assert run.do(Elapsed(at_s * SECOND)) == []
    assert run.do(Elapsed(600 * SECOND)) == [LeaseEnded("a", 0, LeaseEnd.IDLE)]


def test_work_keeps_a_session_for_a_year() -> None:
    run = Run(SlotSettings(slots=1, clean_ns=0, ttl_ns=86_400 * SECOND, idle_ns=86_400 * SECOND, queue_max=0))
    run.acquire("a")
    for at_s in range(0, YEAR_S, 80_000):
        run.do(Beat("a", at_s * SECOND, worked=True))
        assert run.do(Elapsed(at_s * SECOND)) == []


def test_one_that_waits_is_refused_at_its_deadline_and_may_leave_before(full: Run) -> None:
    full.acquire("c", wait_s=5)
    full.acquire("d", wait_s=5)
    assert full.do(Release("d")) == [QueueLeft("d")]
    assert full.do(Elapsed(5 * SECOND)) == [LeaseRefused("c")]
    assert full.table.queue == {}


SESSIONS = st.sampled_from(["a", "b", "c", "d"])
COMMANDS = st.one_of(
    st.tuples(st.just("acquire"), SESSIONS, st.integers(0, 30)),
    st.tuples(st.just("beat"), SESSIONS, st.integers(0, 1)),
    st.tuples(st.just("release"), SESSIONS, st.just(0)),
    st.tuples(st.just("cleaned"), st.just(""), st.integers(0, 2)),
    st.tuples(st.just("elapsed"), st.just(""), st.integers(0, 30)),
)


@given(st.lists(COMMANDS, max_size=60))
@settings(deadline=None, max_examples=200)
def test_no_slot_is_ever_leased_twice_or_lost(commands: list[tuple[str, str, int]]) -> None:
    run, now = Run(), 0
    for kind, session, number in commands:
        now += number * SECOND if kind == "elapsed" else 0
        made: dict[str, SlotCommand] = {
            "acquire": Acquire(session, now, now + number * SECOND),
            "beat": Beat(session, now, worked=bool(number)),
            "release": Release(session),
            "cleaned": Cleaned(number, now),
            "elapsed": Elapsed(now),
        }
        run.do(made[kind])
        held = [lease.slot for lease in run.table.leases.values()]
        assert sorted([*held, *run.table.free, *run.table.cleaning]) == [0, 1]
        assert not set(run.table.queue) & set(run.table.leases)
        assert len(run.table.queue) <= SETTINGS.queue_max + SETTINGS.slots
