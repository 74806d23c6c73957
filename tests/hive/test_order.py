"""What no coordinator can have written about training operations is found before it is folded."""

import msgspec
import pytest

from bombus.hive import events as ev
from bombus.hive.events import AnyEvent
from bombus.hive.records import BodyRef
from bombus.hive.state import Hive, evolve
from bombus.hive.tenants.order import why_out_of_order
from tests.coordinator.core_in_memory import ENGINE
from tests.coordinator.tenants_in_memory import MODEL, TenantHarness
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


def covered(number: int) -> ev.ModelCovered:
    return ev.ModelCovered(engine=ENGINE, run=1, model=MODEL, number=number, trainer_epoch=1, folder="/c", digest="d")


@pytest.fixture
def hive() -> Hive:
    """A model with one operation that was executed and two that wait."""
    harness = TenantHarness().serving()
    for key in ("1", "2"):
        harness.operate(key)
    return harness.core.hive


@pytest.mark.parametrize(
    ("event", "why"),
    [
        (accepted(5, "5"), f"operation 5 of {MODEL} follows 3"),
        (accepted(4, "1"), f"operation 1 of {MODEL} is accepted twice"),
        (accepted(1, "0", "other"), "it accepts an operation of other, which is not there"),
        (completed(4, "9"), f"it completes operation 4 of {MODEL}, which was not accepted"),
        (completed(1, "0"), f"operation 1 of {MODEL} is completed twice"),
        (completed(3, "2"), f"operation 3 of {MODEL} is completed before 2"),
        (covered(2), f"a cover of {MODEL} has operation 2, which waits"),
        (covered(9), f"a cover of {MODEL} has operation 9, which cannot be"),
        (
            ev.EpisodesTaken(engine=ENGINE, run=1, client="c1", episodes=("main-1-7",)),
            "c1 takes main-1-7, which is not there",
        ),
    ],
)
def test_an_event_that_cannot_follow_is_told_from_the_others(hive: Hive, event: AnyEvent, why: str) -> None:
    assert why_out_of_order(hive, event) == why


def test_a_model_that_cannot_be_made_again_is_ended_before_what_waits_for_it() -> None:
    harness = TenantHarness().serving()
    harness.operate("1")
    harness.operate("2", "end_model")
    ended = msgspec.structs.replace(completed(3, "2"), op="end_model")
    assert why_out_of_order(harness.core.hive, ended) == f"operation 3 of {MODEL} is completed before 2"
    harness.model.suspended = "its cover is gone"
    assert not why_out_of_order(harness.core.hive, ended)


def test_what_a_coordinator_writes_is_in_order() -> None:
    harness = with_snapshot()
    take(harness, played(harness))
    harness.cover(2)
    for events in (harness.log, operating().events, rolling(2).events):
        hive = Hive()
        for event in events:
            assert not why_out_of_order(hive, event), event
            evolve(hive, event)
