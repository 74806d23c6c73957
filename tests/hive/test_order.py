"""What no coordinator can have written about operations and rollout groups is found before it is folded."""

import msgspec
import pytest

from bombus.hive import events as ev
from bombus.hive import inbox
from bombus.hive.events import AnyEvent
from bombus.hive.fold.evolve import evolve
from bombus.hive.operations.order import why_out_of_order
from bombus.hive.records import BodyRef
from bombus.hive.state import Hive
from bombus.hive.trajectories import order
from tests.coordinator.core_in_memory import ENGINE
from tests.coordinator.groups_in_memory import GroupHarness
from tests.coordinator.operations_in_memory import MODEL, OperationHarness
from tests.coordinator.test_sampled_episodes import played, take, with_snapshot
from tests.overwatch.story import operating, rolling

BODY = BodyRef(seqs=(1,), size=1, digest=b"d" * 16)


def accepted(number: int, key: str, model: str = MODEL) -> ev.OperationAccepted:
    return ev.OperationAccepted(
        engine=ENGINE, run=1, model=model, number=number, key=key, op="forward_backward", body=BODY
    )


def completed(number: int, key: str) -> ev.OperationCompleted:
    return ev.OperationCompleted(
        engine=ENGINE, run=1, model=MODEL, number=number, key=key, op="optim_step", trainer_epoch=1, result=BODY
    )


def checkpointed(number: int) -> ev.ModelCheckpointed:
    return ev.ModelCheckpointed(
        engine=ENGINE, run=1, model=MODEL, number=number, trainer_epoch=1, folder="/c", digest="d"
    )


@pytest.fixture
def hive() -> Hive:
    """A model with one operation that was executed and two that wait."""
    harness = OperationHarness().serving()
    for key in ("1", "2"):
        harness.operate(key)
    return harness.core.hive


@pytest.mark.parametrize(
    ("event", "why"),
    [
        (accepted(5, "5"), f"operation 5 of {MODEL} follows operation 3"),
        (accepted(4, "1"), f"operation 1 of {MODEL} is accepted twice"),
        (accepted(1, "0", "other"), "an operation of other is accepted, but there is no such model"),
        (completed(4, "9"), f"operation 4 of {MODEL} is completed, but was not accepted"),
        (completed(1, "0"), f"operation 1 of {MODEL} is completed twice"),
        (completed(3, "2"), f"operation 3 of {MODEL} is completed before 2"),
        (checkpointed(2), f"a recovery checkpoint of {MODEL} covers operation 2, which is waiting"),
        (checkpointed(9), f"a recovery checkpoint of {MODEL} covers operation 9, which is out of range"),
        (
            ev.EpisodesTaken(engine=ENGINE, run=1, client="c1", episodes=("main-1-7",)),
            "c1 takes main-1-7, which is not in the pool",
        ),
    ],
)
def test_an_event_that_cannot_follow_is_told_from_the_others(hive: Hive, event: AnyEvent, why: str) -> None:
    assert why_out_of_order(hive, event) == why


def test_a_model_that_cannot_be_made_again_is_ended_before_what_waits_for_it() -> None:
    harness = OperationHarness().serving()
    harness.operate("1")
    harness.operate("2", "end_model")
    ended = msgspec.structs.replace(completed(3, "2"), op="end_model")
    assert why_out_of_order(harness.core.hive, ended) == f"operation 3 of {MODEL} is completed before 2"
    harness.model.suspended = "its recovery checkpoint is gone"
    assert not why_out_of_order(harness.core.hive, ended)


def test_what_a_coordinator_writes_is_in_order() -> None:
    harness = with_snapshot()
    take(harness, played(harness))
    harness.checkpoint(2)
    for events in (harness.log, operating().events, rolling(2).events):
        hive = Hive()
        for event in events:
            assert not why_out_of_order(hive, event), event
            evolve(hive, event)


# ---- rollout groups --------------------------------------------------------------------------------------------


@pytest.fixture
def taken() -> GroupHarness:
    """A run whose batch 1, of groups 1 and 2, is handed out, and group 3 is queued."""
    harness = GroupHarness()
    harness.register()
    harness.push(*[harness.group() for _ in range(3)])
    assert harness.ask() == 1
    return harness


@pytest.mark.parametrize(
    ("event", "why"),
    [
        (ev.BatchHandedOut(engine=ENGINE, run=1, number=3, groups=(3,)), "batch 3 of run 1 follows batch 1"),
        (
            ev.BatchHandedOut(engine=ENGINE, run=1, number=2, groups=(3,)),
            "batch 2 is handed out before batch 1 is delivered",
        ),
        (ev.BatchDelivered(engine=ENGINE, run=1, number=2), "batch 2 of run 1 is delivered, but was not handed out"),
        (
            ev.GroupsGivenUp(engine=ENGINE, run=1, number=1, groups=(1, 3), why="w"),
            "group 3 is given up, but is not in that batch or the queue",
        ),
        (
            ev.GroupsGivenUp(engine=ENGINE, run=1, number=0, groups=(1,), why="w"),
            "group 1 is given up, but is not in that batch or the queue",
        ),
        (
            ev.BatchReady(engine=ENGINE, run=1, step=1, groups=(), config_digest="", taken=(2,)),
            "step 1 takes group 2, which is not queued",
        ),
    ],
)
def test_an_event_about_groups_that_cannot_follow_is_told_from_the_others(
    taken: GroupHarness, event: AnyEvent, why: str
) -> None:
    assert order.why_out_of_order(taken.core.hive, event) == why


def test_a_batch_that_is_not_exact_is_told_from_the_others(taken: GroupHarness) -> None:
    taken.arrived(1)
    short = ev.BatchHandedOut(engine=ENGINE, run=1, number=2, groups=(3,))
    assert order.why_out_of_order(taken.core.hive, short) == "batch 2 has 2 sequences instead of 4"
    again = ev.BatchHandedOut(engine=ENGINE, run=1, number=2, groups=(1, 3))
    assert order.why_out_of_order(taken.core.hive, again) == "batch 2 has group 1, which is not queued"


def test_what_a_coordinator_writes_of_groups_is_in_order(taken: GroupHarness) -> None:
    lost = inbox.LostGroup(1, 1)
    taken.request(inbox.GiveUpGroups(id=taken.id(), engine=ENGINE, run=1, number=1, groups=(lost,), why="gone"))
    assert taken.ask() == 2
    taken.arrived(2)
    hive = Hive()
    for event in taken.log:
        assert not order.why_out_of_order(hive, event), event
        evolve(hive, event)
    assert hive.engine(ENGINE).trajectories.given_up == 1
