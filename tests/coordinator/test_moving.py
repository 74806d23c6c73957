"""Which bodies of rollout groups are stored once more: few, and only where much can be purged for them."""

import msgspec

from bombus.bus import StreamState
from bombus.hive.events import BatchDelivered, BatchHandedOut, GroupsPushed
from bombus.hive.fold.evolve import evolve
from bombus.hive.records import BodyRef
from bombus.hive.state import Hive
from bombus.hive.trajectories.queue import QueuedGroup
from bombus.hive.trajectories.state import HANDED_S
from bombus_coordinator.moving import BYTES_MAX, worth_moving
from tests.coordinator.core_in_memory import ENGINE, SECOND

MB = 1 << 20


def stream(messages: int, first: int = 1) -> StreamState:
    """Return the state of a stream whose messages have a megabyte each, and that has room."""
    return StreamState(
        messages=messages,
        bytes=messages * MB,
        first_seq=first,
        last_seq=first + messages - 1,
        max_bytes=4 * messages * MB,
        replicas=1,
    )


def with_groups(*bodies: tuple[int, int]) -> Hive:
    """Return a hive whose queue has groups, with these sequences of their bodies (first and last)."""
    hive = Hive()
    refs = [BodyRef(seqs=tuple(range(a, b + 1)), size=(b + 1 - a) * MB, digest=b"d") for a, b in bodies]
    groups = tuple(QueuedGroup(environment=None, sequences=1, body=ref) for ref in refs)
    evolve(hive, GroupsPushed(engine=ENGINE, groups=groups))
    return hive


def test_what_is_too_much_at_once_is_moved_in_portions_where_all_of_it_is_worth_it() -> None:
    hive = with_groups((1, 7), (8, 14), (15, 21))  # 21 MB; 200 MB can be purged once all of it is moved
    assert BYTES_MAX == 16 * MB
    assert [each.group for each in worth_moving(hive, 201, stream(200))] == [1, 2]
    assert worth_moving(hive, 61, stream(60)) == [], "21 MB are not copied to purge 60"


def test_nothing_is_moved_where_what_came_after_it_is_of_other_holders_and_needed() -> None:
    hive, kept = with_groups((1, 4)), BodyRef(seqs=tuple(range(151, 201)), size=50 * MB, digest=b"d")
    evolve(hive, GroupsPushed(engine=ENGINE, groups=(QueuedGroup(environment=None, sequences=1, body=kept),)))
    stored = msgspec.structs.replace(stream(200), messages=54, bytes=54 * MB)
    assert worth_moving(hive, 201, stored) == []
    assert [each.group for each in worth_moving(hive, 201, stream(200))] == [1]


def test_a_body_that_is_larger_than_a_portion_is_moved_alone() -> None:
    hive = with_groups((1, 20), (21, 21))
    assert [each.group for each in worth_moving(hive, 201, stream(200))] == [1]


def test_a_batch_that_has_not_arrived_is_moved_once_nobody_can_be_reading_it() -> None:
    hive = with_groups((1, 1))
    evolve(hive, BatchHandedOut(engine=ENGINE, run=0, number=1, groups=(1,), at_ns=5 * SECOND))
    hive.now_ns = int((5 + HANDED_S) * SECOND) - 1
    assert worth_moving(hive, 101, stream(100)) == []
    hive.now_ns += 1
    assert [each.group for each in worth_moving(hive, 101, stream(100))] == [1]
    hive.now_ns = 5 * SECOND
    evolve(hive, BatchDelivered(engine=ENGINE, run=0, number=1))
    assert [each.group for each in worth_moving(hive, 101, stream(100))] == [1]
