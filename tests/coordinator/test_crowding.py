"""The stream of calls is shared by keys: what each pins of it, who is refused, and whose episodes are taken away."""

import pytest

from bombus.errors import Code
from bombus.hive import events as ev
from bombus.hive import inbox
from bombus.hive.events import AbortReason, DropReason, EpisodeType, NotedCall
from bombus.hive.records import CallRef
from bombus.hive.shares import ADMIN
from bombus.hive.state import CALLS
from bombus_coordinator.core import Core
from bombus_coordinator.retention import floors_of_holders
from tests.coordinator.core_in_memory import ENGINE, CoreHarness
from tests.coordinator.test_core import refused

SIZE = 1000  # of the stream, of which 750 are shared


@pytest.fixture
def harness() -> CoreHarness:
    core = Core()
    core.open_epoch("leader", SIZE)
    harness = CoreHarness(core)
    harness.boot(replay_steps=0)
    return harness


def claim(harness: CoreHarness, owner: str = "", **more: object) -> str:
    (episode,) = harness.claim(owner or "c1", owner=owner, **more)  # type: ignore[arg-type]
    return episode


def call(harness: CoreHarness, episode: str, size: int) -> None:
    noted = NotedCall(episode, CallRef(harness.seq, harness.id(), b"d" * 16), 5, 3, 0, 0, bytes=size)
    harness.send(inbox.CallRecorded(id=harness.id(), engine=ENGINE, run=harness.engine.run, call=noted))


def pinned(harness: CoreHarness) -> dict[str, int]:
    return +harness.core.hive.pinned_calls()


def fill(harness: CoreHarness) -> list[ev.AnyEvent]:
    """Let the stream be seen as full, and time pass."""
    harness.send(inbox.StorageSeen(id=harness.id(), what=CALLS, used=SIZE, size=SIZE, reserve=SIZE // 10))
    return harness.tick()


def sample(harness: CoreHarness, holder: str, size: int, run: int = 1) -> int:
    """Note recorded samples of a training client, and return their sequence."""
    seq = harness.seq
    noted = NotedCall("", CallRef(seq, harness.id(), b"d" * 16), 5, 3, 0, 0, bytes=size, holder=holder)
    harness.send(inbox.CallRecorded(id=harness.id(), engine=ENGINE, run=run, call=noted))
    return seq


def test_r12_recorded_samples_are_needed_by_nobody_and_pinned_only_by_an_open_episode_of_the_same_key(
    harness: CoreHarness,
) -> None:
    newest = sample(harness, "ann", 100)
    assert pinned(harness) == {}
    assert floors_of_holders(harness.core.hive)[ENGINE, "ann"].needed == newest
    claim(harness, "bob")
    later = sample(harness, "ann", 50)
    sample(harness, "bob", 7)
    assert sample(harness, "ann", 900, run=2) > later, "of another run: it is not noted"
    assert pinned(harness) == {"bob": 7}
    held = floors_of_holders(harness.core.hive)
    assert held[ENGINE, "bob"].needed == newest
    assert held[ENGINE, "ann"].needed == harness.engine.newest_call > later
    assert (harness.engine.counters.calls, harness.engine.counters.calls_late) == (3, 0)


def test_r12_an_episode_pins_all_that_its_holder_stores_after_its_claim_and_nothing_of_others(
    harness: CoreHarness,
) -> None:
    first, of_bob = claim(harness, "ann"), claim(harness, "bob")
    call(harness, of_bob, 7)
    second = claim(harness, "ann")
    call(harness, second, 100)
    harness.send(inbox.Abort(id="abort", engine=ENGINE, client="ann", episodes=(second,)))
    call(harness, second, 10)  # late
    assert pinned(harness) == {"ann": 110, "bob": 7}, "what became of it does not matter"
    third = claim(harness, "ann")
    call(harness, third, 1)
    harness.send(inbox.Abort(id="again", engine=ENGINE, client="ann", episodes=(first,)))
    assert pinned(harness) == {"ann": 1, "bob": 7}
    floors = floors_of_holders(harness.core.hive)
    pins = harness.engine.calls.holders["ann"].pins
    assert floors[ENGINE, "ann"].needed == pins[third].calls_from > floors[ENGINE, "bob"].needed


def test_ended_episodes_pin_for_as_long_as_their_step_may_have_to_be_made_again(harness: CoreHarness) -> None:
    evaluation = claim(harness, "ann", type=EpisodeType.EVAL)
    call(harness, evaluation, 5)
    harness.end(evaluation, client="ann")
    assert not pinned(harness)
    for step in range(3):
        for task in ("t1", "t1", "t2", "t2"):
            episode = claim(harness, "ann")
            call(harness, episode, 10)
            harness.end(episode, task, client="ann")
        assert pinned(harness) == {"ann": 40 * min(step + 1, 2)}, "two steps may have to be made again"
        harness.train()
    harness.send(inbox.Stop(id="stop", engine=ENGINE))
    harness.send(inbox.Start(id="start", engine=ENGINE))
    assert pinned(harness).get("ann", 0) in (0, 80), "a new run may go on from a checkpoint"


def test_r20_who_pins_more_than_a_share_claims_nothing_and_all_others_and_the_admin_do(harness: CoreHarness) -> None:
    greedy = claim(harness, "greedy")
    call(harness, greedy, 760)
    more = harness.claim_message("greedy", owner="greedy")
    why = refused(harness.request(more), Code.NO_EPISODES)
    assert why.startswith("No available episodes to claim. The episodes of this key keep 760 B")
    assert "--calls-bytes-max" in why
    admin = claim(harness, admin=True)
    call(harness, admin, 1)
    modest = claim(harness, "modest")
    call(harness, modest, 249)
    claim(harness, "modest")
    claim(harness)
    assert pinned(harness) == {"greedy": 760, ADMIN: 1, "modest": 249}
    harness.send(inbox.Abort(id="abort", engine=ENGINE, client="greedy", episodes=(greedy,)))
    claim(harness, "greedy")


def test_while_the_stream_is_full_who_pins_most_loses_the_oldest_episodes_and_no_more_than_needed(
    harness: CoreHarness,
) -> None:
    ended = claim(harness, "greedy")
    call(harness, ended, 100)
    harness.end(ended, client="greedy")
    modest = claim(harness, "modest")
    call(harness, modest, 210)
    opened = claim(harness, "greedy")
    call(harness, opened, 430)
    newest = claim(harness, "greedy")
    call(harness, newest, 60)
    call(harness, opened, 70)
    assert not harness.tick(), "it is not full"
    first, second = fill(harness)
    assert isinstance(first, ev.GroupDropped)
    assert (first.reason, first.episodes) == (DropReason.OVERFLOW, (ended,))
    assert isinstance(second, ev.EpisodeAborted), "770 of the 750 that are shared are pinned still"
    assert (second.reason, second.episodes) == (AbortReason.CROWDED, (opened,))
    assert "The episodes of this key keep 560 B" in second.detail
    assert pinned(harness) == {"greedy": 130, "modest": 210}, "what came after the claim of the next one"
    assert not harness.tick()
    why = refused(harness.end(opened, client="greedy"), Code.UNKNOWN_EPISODE)
    assert "its key pinned more than its share" in why


def test_what_steps_need_stays_while_the_stream_is_full_for_training_releases_it(harness: CoreHarness) -> None:
    for task in ("t1", "t1", "t2", "t2"):
        episode = claim(harness, "greedy")
        call(harness, episode, 180)
        harness.end(episode, task, client="greedy")
    harness.train()
    episode = claim(harness, "greedy")
    call(harness, episode, 100)
    assert pinned(harness) == {"greedy": 820}
    assert not fill(harness)
