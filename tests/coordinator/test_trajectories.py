"""Runs of trajectories: a trainer registers, environments push rollout groups, and batches are handed out (R16)."""

import msgspec
import pytest

from bombus.errors import Code
from bombus.hive import events as ev
from bombus.hive import inbox
from bombus.hive.events import AnyEvent, EnvironmentEnd
from bombus.hive.fold.evolve import evolve
from bombus.hive.fold.trajectories import ANSWERS_KEPT, PUSHES_BETWEEN, push
from bombus.hive.inbox import BatchTaken, Done, Pushed, Refusal
from bombus.hive.records import BodyRef, digest
from bombus.hive.shares import ADMIN
from bombus.hive.state import Hive, Phase
from bombus.hive.status.data import hive_status
from bombus.hive.trajectories import queue
from bombus.hive.trajectories.queue import QueuedGroup
from bombus.hive.trajectories.state import REPEAT_S, Trajectories
from bombus.hive.trajectories.status import rollout_group_lines
from bombus_coordinator.core import Core
from bombus_coordinator.rules.trajectories.registering import ENVIRONMENT_IDLE_S
from tests.coordinator.core_in_memory import ENGINE, CoreHarness
from tests.coordinator.groups_in_memory import GroupHarness


@pytest.fixture
def harness() -> GroupHarness:
    return GroupHarness()


def rolling() -> GroupHarness:
    """Return a run whose trainer has asked for a batch of 4 sequences, and found none."""
    harness = GroupHarness()
    harness.register()
    assert harness.ask() == 0
    return harness


# ---- a run ----------------------------------------------------------------------------------------------------


def test_registering_begins_a_run_that_takes_groups_at_once(harness: GroupHarness) -> None:
    assert harness.register(starting_step=3) == Done(run=1)
    assert harness.phase() == Phase.ROLLING
    assert harness.engine.queues_groups
    assert harness.trajectories.current_step == 3


def test_a_second_trainer_begins_a_new_run_without_the_groups_of_the_first_and_with_its_environments() -> None:
    harness = rolling()
    environment = harness.join()
    harness.push(harness.group(environment), harness.group(environment))
    assert harness.register(batch_size=2) == Done(run=2)
    assert harness.ask() == 0
    harness.push(harness.group(environment))
    assert harness.ask() == 1
    assert [group.environment for group in harness.trajectories.batch.groups] == [environment]  # type: ignore[union-attr]


def test_r16_groups_that_come_before_any_trainer_wait_for_it(harness: GroupHarness) -> None:
    assert isinstance(harness.push(harness.group(), harness.group()), Pushed)
    harness.register(batch_size=4)
    assert harness.ask() == 1


def test_what_is_left_of_a_run_that_was_stopped_goes_with_it() -> None:
    harness = rolling()
    harness.push(harness.group(), harness.group())
    harness.request(inbox.Stop(id=harness.id(), engine=ENGINE))
    assert harness.phase() == Phase.OFFLINE
    harness.register()
    assert harness.ask() == 0


def test_an_engine_that_plays_episodes_takes_neither_a_trainer_nor_groups(harness: GroupHarness) -> None:
    harness.boot()
    for answer in (harness.register(), harness.push(harness.group())):
        assert isinstance(answer, Refusal)
        assert answer.code == Code.WRONG_PHASE
        assert "plays episodes: stop it, or use another engine" in answer.why


def test_a_run_of_trajectories_waits_neither_for_a_trainer_nor_for_replicas(harness: GroupHarness) -> None:
    harness.boot()
    harness.request(inbox.Stop(id=harness.id(), engine=ENGINE))
    harness.register()
    decided: list[AnyEvent] = []
    for _ in range(700):
        harness.send(inbox.ReplicaAlive(id=harness.id(), engine=ENGINE, replica="r1", url="http://r1"))
        decided += harness.tick()
    assert decided == []
    assert harness.phase() == Phase.ROLLING


def test_a_run_of_trajectories_grants_no_claims_and_says_so() -> None:
    harness = rolling()
    claim = inbox.Claim(id="c", engine=ENGINE, claim="c", client="me")
    answer = harness.request(claim)
    assert isinstance(answer, Refusal)
    assert "takes rollout groups and has no episodes" in answer.why


def test_a_batch_is_only_handed_out_to_a_trainer_that_has_registered(harness: GroupHarness) -> None:
    answer = harness.request(inbox.TakeBatch(id="t", engine=ENGINE))
    assert isinstance(answer, Refusal)
    assert answer.code == Code.WRONG_PHASE


def test_resetting_ends_the_run_and_forgets_groups_and_environments() -> None:
    harness = rolling()
    environment = harness.join()
    harness.push(harness.group(environment))
    assert harness.request(inbox.ResetGroups(id="r", engine=ENGINE)) == Done(run=1)
    assert harness.phase() == Phase.OFFLINE
    assert (harness.trajectories.queue.groups, harness.trajectories.queue.environments) == ({}, {})


# ---- batches --------------------------------------------------------------------------------------------------


def test_r16_a_batch_is_handed_out_again_until_it_was_delivered() -> None:
    harness = rolling()
    for _ in range(4):
        harness.push(harness.group())
    assert [harness.ask(), harness.ask()] == [1, 1]
    harness.arrived(1)
    assert [harness.ask(), harness.ask()] == [2, 2]
    assert harness.trajectories.current_step == 2
    harness.arrived(2)
    assert harness.ask() == 0


def test_a_batch_that_was_delivered_twice_or_of_another_run_is_not_taken_for_the_next_one() -> None:
    harness = rolling()
    for _ in range(4):
        harness.push(harness.group())
    harness.ask()
    assert harness.arrived(2) == []
    assert len(harness.arrived(1)) == 1
    assert harness.arrived(1) == []


def test_r16_a_leader_that_takes_over_hands_out_the_same_batch() -> None:
    harness = rolling()
    harness.push(harness.group(), harness.group())
    assert harness.ask() == 1
    hive = Hive()
    for event in harness.log:
        evolve(hive, event)
    assert hive.engines[ENGINE].trajectories == harness.trajectories
    answer = CoreHarness(Core(hive)).request(inbox.TakeBatch(id="again", engine=ENGINE))
    assert answer == BatchTaken(run=1, number=1, again=True)


# ---- environments ---------------------------------------------------------------------------------------------


def test_environments_wait_until_the_trainer_has_asked_for_a_batch(harness: GroupHarness) -> None:
    assert harness.join() is None
    harness.register()
    assert harness.join() is None
    harness.ask()
    assert [harness.join(), harness.join()] == [0, 1]
    assert [each.name for each in harness.trajectories.queue.environments.values()] == ["gsm_0", "gsm_1"]


def test_small_groups_are_held_until_they_make_up_the_size_of_their_environment() -> None:
    harness = rolling()
    environment = harness.join(group_size=4)
    assert harness.push(harness.group(environment)) == Pushed(held=(2,))
    assert harness.ask() == 0
    assert harness.push(harness.group(environment)) == Pushed(held=(0,))
    assert harness.ask() == 1


def test_a_group_that_no_batch_could_take_is_refused_with_its_position() -> None:
    harness = rolling()
    answer = harness.push(harness.group(), harness.group(sequences=5))
    assert isinstance(answer, Refusal)
    assert answer.why.startswith("Group 1 has 5 sequences, but a batch has 4")
    assert harness.trajectories.queue.groups == {}


def test_groups_that_only_have_to_wait_for_room_are_to_be_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = rolling()
    environment = harness.join(group_size=4)
    harness.push(harness.group(environment, 3))
    monkeypatch.setattr(queue, "HELD_MAX", 1)
    held = harness.push(harness.group(environment, 3))
    monkeypatch.setattr(queue, "GROUPS_MAX", 1)
    full = harness.push(harness.group())
    for answer, words in ((held, "are waiting for others to make up its group_size"), (full, "1 groups are queued")):
        assert isinstance(answer, Refusal)
        assert answer.code == Code.OVERLOADED, "a 503 is sent again by Atropos's environments, and a 400 is dropped"
        assert words in answer.why


def test_r16_an_environment_that_is_silent_for_long_is_taken_for_gone_and_blocks_nobody() -> None:
    harness = rolling()
    ghost = harness.join(minimum=0.5)
    assert ghost is not None
    harness.push(harness.group(), harness.group())
    assert harness.ask() == 0
    events = harness.let_pass(ENVIRONMENT_IDLE_S + 1)
    assert [event.reason for event in events if isinstance(event, ev.EnvironmentLeft)] == [EnvironmentEnd.SILENT]
    assert harness.ask() == 1


def test_one_that_shows_itself_stays_and_one_that_comes_back_is_connected_again() -> None:
    harness = rolling()
    environment = harness.join()
    assert environment is not None
    assert harness.let_pass(ENVIRONMENT_IDLE_S + 1, touching=environment) == []
    harness.let_pass(ENVIRONMENT_IDLE_S + 1)
    assert not harness.trajectories.queue.environments[environment].connected
    harness.touch(environment)
    (joined,) = harness.tick()
    assert isinstance(joined, ev.EnvironmentJoined)
    assert harness.trajectories.queue.environments[environment].connected
    harness.let_pass(ENVIRONMENT_IDLE_S + 1)
    harness.push(harness.group(environment))
    assert harness.trajectories.queue.environments[environment].connected


def test_one_that_fell_silent_in_the_run_before_comes_back_under_its_number_in_the_next() -> None:
    harness = rolling()
    silent, left = harness.join(), harness.join("other")
    assert silent is not None
    harness.request(inbox.LeaveEnvironment(id=harness.id(), engine=ENGINE, environment=left or 0))
    harness.let_pass(ENVIRONMENT_IDLE_S + 1)
    harness.register()
    assert list(harness.trajectories.queue.environments) == [silent]
    assert not harness.trajectories.queue.environments[silent].connected
    harness.push(harness.group(silent))
    assert harness.trajectories.queue.environments[silent].connected
    assert harness.trajectories.queue.environments[silent].share.sequences == 2


def test_an_environment_leaves_once_and_one_that_is_not_known_is_told_so() -> None:
    harness = rolling()
    environment = harness.join()
    assert environment is not None
    for _ in range(2):
        assert harness.request(inbox.LeaveEnvironment(id=harness.id(), engine=ENGINE, environment=environment)) == Done(
            run=1
        )
    assert sum(isinstance(event, ev.EnvironmentLeft) for event in harness.log) == 1
    answer = harness.request(inbox.LeaveEnvironment(id="l", engine=ENGINE, environment=9))
    assert isinstance(answer, Refusal)
    assert answer.code == Code.UNKNOWN_ENVIRONMENT


# ---- repeats and bodies ---------------------------------------------------------------------------------------


def test_r16_a_push_that_is_sent_again_counts_once_and_after_the_window_it_is_another_one() -> None:
    harness = rolling()
    group = harness.group()
    first = harness.push(group, key="k")
    assert harness.push(group, key="k") == first
    assert len(harness.trajectories.queue.groups) == 1
    harness.let_pass(REPEAT_S + 1)
    harness.push(harness.group(), key="k")
    assert len(harness.trajectories.queue.groups) == 2


def test_other_groups_under_the_key_of_a_recent_push_are_refused_and_not_taken_for_it() -> None:
    harness = rolling()
    harness.push(harness.group(), key="k")
    answer = harness.push(harness.group(), key="k")
    assert isinstance(answer, Refusal)
    assert answer.code == Code.OTHER_BODY
    assert len(harness.trajectories.queue.groups) == 1


def test_a_push_that_is_sent_again_to_the_next_run_is_queued_there() -> None:
    harness = rolling()
    harness.push(harness.group(), key="k")
    harness.register()
    harness.push(harness.group(), key="k")
    assert len(harness.trajectories.queue.groups) == 1


def test_r16_bodies_are_released_when_nothing_names_them_and_older_ones_are_refused() -> None:
    harness = rolling()
    for _ in range(3):
        harness.push(harness.group())
    assert harness.ask() == 1
    stored = inbox.TrajectoriesStored(id="s1", below=10)
    assert harness.send(stored) == [], "the batch was not delivered, and group 1 is in it"
    harness.arrived(1)
    harness.push(harness.group())
    assert harness.ask() == 2
    (released,) = harness.send(inbox.TrajectoriesStored(id="s2", below=10))
    assert isinstance(released, ev.TrajectoriesReleased)
    assert released.below == 3
    old = QueuedGroup(environment=None, sequences=2, body=BodyRef(seqs=(2,), size=9, digest=digest(b"old")))
    answer = harness.push(old)
    assert isinstance(answer, Refusal)
    assert answer.code == Code.BODY_GONE


def test_r16_in_an_overfull_stream_a_group_that_waits_keeps_nothing_of_other_keys() -> None:
    harness = rolling()
    harness.push(harness.group(sequences=3, holder="ann"))  # fits no batch of 4 with groups of 2
    for number in (1, 2):
        harness.push(harness.group(holder="eve"), harness.group(holder="eve"))
        assert harness.ask() == number
        harness.arrived(number)
    assert harness.send(inbox.TrajectoriesStored(id="s1", below=10)) == []
    (released,) = harness.send(inbox.TrajectoriesStored(id="s2", below=10, overfull=True))
    assert isinstance(released, ev.TrajectoriesReleased)
    assert (released.below, released.holders) == (1, (ev.HolderFloor(ENGINE, "eve", 4),))
    assert harness.send(inbox.TrajectoriesStored(id="s3", below=10, overfull=True)) == []
    harness.stored = 2
    old = harness.group(holder="eve")
    answer = harness.push(old)
    assert isinstance(answer, Refusal)
    assert answer.code == Code.BODY_GONE
    assert isinstance(harness.push(msgspec.structs.replace(old, holder="ann")), Pushed)
    (back,) = harness.send(inbox.TrajectoriesStored(id="s4", below=3, shrunk=True))
    assert isinstance(back, ev.TrajectoriesReleased)
    assert back.holders == (ev.HolderFloor(ENGINE, "eve", 3),)
    assert isinstance(harness.push(old), Pushed), "its sequence was used again"


def test_r20_a_key_whose_groups_have_more_bytes_than_its_share_pushes_again_once_batches_are_taken() -> None:
    harness = rolling()
    harness.core.open_epoch("x", trajectories_bytes_max=1_000)
    for number in range(7):
        assert isinstance(harness.push(harness.group(holder="ann"), key=f"{number}"), Pushed)
    answer = harness.push(harness.group(holder="ann"))
    assert isinstance(answer, Refusal)
    assert (answer.code, answer.why) == (
        Code.OVERLOADED,
        "The queued groups of this key take 700 B, and those of all keys 700 B of 1 kB. With 100 B more, this "
        "key would have more than its share. Send them again after the trainer has taken batches, or raise the limit "
        "with --trajectories-bytes-max.",
    )
    for holder in ("", "eve", ADMIN):
        assert isinstance(harness.push(harness.group(holder=holder)), Pushed)
    assert isinstance(harness.push(harness.group(holder="ann")), Refusal)
    for _ in range(2):
        harness.arrived(harness.ask())
    assert isinstance(harness.push(harness.group(holder="ann")), Pushed)


def test_while_the_stream_is_full_and_no_batch_can_be_made_who_has_most_queued_loses_the_oldest_groups() -> None:
    harness = rolling()
    harness.core.open_epoch("x", trajectories_bytes_max=1_000)
    for holder in ["ann"] * 7 + ["bob"] * 2 + ["eve"]:
        assert isinstance(harness.push(harness.group(sequences=3, holder=holder)), Pushed)
    assert not harness.tick(), "it is not full"
    harness.send(inbox.StorageSeen(id="full", what="trajectories", used=950, size=1_000, reserve=100))
    (given_up,) = harness.tick()
    assert isinstance(given_up, ev.GroupsGivenUp)
    assert given_up.groups == (1, 2, 3), "the 250 bytes beyond the 750 that are shared"
    assert "this key's groups took more than their share" in harness.trajectories.given_up_why
    assert not harness.tick()
    harness.send(inbox.StorageSeen(id="room", what="trajectories", used=700, size=1_000, reserve=100))
    assert isinstance(harness.push(harness.group(sequences=1, holder="dan")), Pushed)
    assert harness.ask() == 1


def test_groups_of_which_a_batch_can_be_made_stay_while_the_stream_is_full_and_so_do_those_before_a_trainer() -> None:
    for registered in (True, False):
        harness = rolling() if registered else GroupHarness()
        harness.core.open_epoch("x", trajectories_bytes_max=1_000)
        for holder in ["ann"] * 7 + ["bob"] * 2:
            assert isinstance(harness.push(harness.group(sequences=2 if registered else 3, holder=holder)), Pushed)
        harness.send(inbox.StorageSeen(id="full", what="trajectories", used=950, size=1_000, reserve=100))
        assert not harness.tick()
        assert len(harness.trajectories.queue.groups) == 9


def test_a_full_stream_of_rollout_groups_refuses_groups_and_nothing_else(harness: GroupHarness) -> None:
    harness.boot()
    full = inbox.StorageSeen(id="full", what="trajectories", used=95, size=100, reserve=10)
    harness.send(full)
    assert harness.claim()
    harness.request(inbox.Stop(id=harness.id(), engine=ENGINE))
    assert harness.register() == Done(run=2)
    answer = harness.push(harness.group())
    assert isinstance(answer, Refusal)
    assert answer.code == Code.STORAGE_FULL
    assert "of stream trajectories" in answer.why
    for shown in (hive_status(harness.core.hive), hive_status(harness.core.hive).engines[0]):
        assert "of stream trajectories" in str(shown)


def test_a_full_stream_of_rollout_groups_names_the_group_that_keeps_it_from_being_trimmed() -> None:
    harness = rolling()
    environment = harness.join(group_size=3)
    harness.push(harness.group(), harness.group())
    harness.push(harness.group(environment, 3))
    harness.ask()
    (filled,) = harness.send(inbox.StorageSeen(id="full", what="trajectories", used=95, size=100, reserve=10))
    assert isinstance(filled, ev.StorageFilled)
    assert f"after group 3 of engine {ENGINE} (3 sequences, of environment 0) is trimmed" in filled.why


def test_the_group_that_was_pushed_last_is_not_kept_in_a_stream_that_is_full() -> None:
    harness = GroupHarness()
    harness.register(batch_size=2)
    harness.push(harness.group())
    harness.ask()
    harness.register(batch_size=2)
    assert harness.send(inbox.TrajectoriesStored(id="s1", below=10)) == [], "it is the newest example"
    harness.send(inbox.StorageSeen(id="full", what="trajectories", used=95, size=100, reserve=10))
    (released,) = harness.send(inbox.TrajectoriesStored(id="s2", below=10))
    assert isinstance(released, ev.TrajectoriesReleased)
    assert released.below == 10
    harness.send(inbox.StorageSeen(id="room", what="trajectories", used=5, size=100, reserve=10))
    assert list(harness.core.hive.bodies_needed()) == [], "what may be gone is not missed"


def test_a_body_is_not_moved_to_a_place_that_was_released_meanwhile() -> None:
    harness = GroupHarness()
    harness.register()
    harness.stored = 49
    group = harness.group()
    harness.push(group)
    harness.send(inbox.TrajectoriesStored(id="s", below=40))
    assert group.body is not None
    for place, moved in ((39, 50), (40, 40)):
        body = msgspec.structs.replace(group.body, seqs=(place,))
        stored = inbox.BodiesStored(id=harness.id(), engine=ENGINE, moved=(ev.MovedBody(1, body),), was=(50,))
        harness.send(stored)
        for known in (harness.trajectories.queue.groups[1], harness.trajectories.latest):
            assert known is not None
            assert known.body is not None
            assert known.body.first == moved


def test_a_new_run_does_not_know_what_the_trainer_of_the_last_one_had() -> None:
    harness = GroupHarness()
    harness.register(batch_size=2)
    harness.push(harness.group(), harness.group())
    for number in (1, 2):
        assert harness.ask() == number
        harness.arrived(number)
    harness.push(harness.group())
    assert harness.ask() == 3
    assert harness.trajectories.before == 2
    harness.register(batch_size=2)
    assert harness.trajectories.before == 0
    assert harness.ask(after=0) == 0


def test_after_a_power_cut_what_is_released_goes_back_to_the_end_of_the_stream() -> None:
    harness = rolling()
    harness.send(inbox.TrajectoriesStored(id="s1", below=10))
    (back,) = harness.send(inbox.TrajectoriesStored(id="s2", below=4, shrunk=True))
    assert isinstance(back, ev.TrajectoriesReleased)
    assert back.below == 4


# ---- groups that are lost -------------------------------------------------------------------------------------


def give_up(harness: GroupHarness, number: int, *lost: tuple[int, int]) -> list[ev.GroupsGivenUp]:
    """Say that these groups, with the places of their bodies, are lost; return what was decided about groups."""
    message = inbox.GiveUpGroups(
        id=harness.id(),
        engine=ENGINE,
        run=harness.engine.run,
        number=number,
        groups=tuple(inbox.LostGroup(group, first) for group, first in lost),
        why="the stream has no message at 1",
    )
    return [event for event in harness.send(message) if isinstance(event, ev.GroupsGivenUp)]


def test_a_lost_group_is_given_up_and_the_others_of_its_batch_are_in_the_next_at_the_same_step() -> None:
    harness = rolling()
    harness.push(*[harness.group() for _ in range(3)])
    assert harness.ask() == 1
    (given_up,) = give_up(harness, 1, (1, 1))
    assert given_up.groups == (1,)
    assert harness.trajectories.current_step == 0
    assert harness.ask() == 2
    assert harness.trajectories.batch is not None
    assert harness.trajectories.batch.numbers == (2, 3)
    assert harness.trajectories.current_step == 1
    harness.arrived(1)
    assert not harness.trajectories.batch.delivered, "what was said of the batch that is gone is not about the next one"
    harness.arrived(2)
    assert harness.trajectories.batch.delivered
    status = hive_status(harness.core.hive).engines[0].rollout_groups
    assert status is not None
    assert "  1 group was given up, the last because the stream has no message at 1" in rollout_group_lines(status)


def test_a_group_is_not_given_up_that_was_delivered_or_is_somewhere_else_now() -> None:
    harness = rolling()
    harness.push(*[harness.group() for _ in range(3)])
    harness.ask()
    assert give_up(harness, 1, (1, 7)) == [], "its body is not where it was looked for"
    assert give_up(harness, 1, (3, 3)) == [], "it is not of that batch"
    assert give_up(harness, 2, (1, 1)) == [], "there is no such batch"
    harness.arrived(1)
    assert give_up(harness, 1, (1, 1)) == [], "its trainer has it"
    (given_up,) = give_up(harness, 0, (3, 3))
    assert given_up.groups == (3,)
    assert harness.trajectories.queue.groups == {}


# ---- trainers that say what they have -------------------------------------------------------------------------


def test_a_trainer_that_says_which_batch_it_has_gets_the_next_one_until_it_has_that() -> None:
    harness = rolling()
    harness.push(*[harness.group() for _ in range(6)])
    assert [harness.ask(after=0), harness.ask(after=0)] == [1, 1]
    harness.arrived(1)
    assert harness.ask(after=0) == 1, "it died before it could save that it has the batch"
    assert harness.ask(after=1) == 2
    assert harness.ask(after=1) == 2
    assert harness.ask() == 2, "who does not say what it has gets what is not delivered"
    assert harness.ask(after=2) == 3
    assert [harness.ask(after=3), harness.ask(after=3)] == [0, 0]
    delivered = [event.number for event in harness.log if isinstance(event, ev.BatchDelivered)]
    assert delivered == [1, 2, 3]
    assert harness.trajectories.current_step == 3


def test_a_trainer_that_says_what_it_cannot_have_is_told_what_there_is() -> None:
    harness = rolling()
    harness.push(*[harness.group() for _ in range(4)])
    for after in (1, 2):
        answer = harness.request(inbox.TakeBatch(id=harness.id(), engine=ENGINE, after=after))
        assert isinstance(answer, Refusal)
        assert "its trainer has batch 0." in answer.why
    assert [harness.ask(after=0), harness.ask(after=1)] == [1, 2]
    answer = harness.request(inbox.TakeBatch(id=harness.id(), engine=ENGINE, after=0))
    assert isinstance(answer, Refusal)
    assert "cannot continue after batch 0: its trainer has batch 1 or 2." in answer.why


def test_a_trainer_that_says_what_it_has_goes_on_after_a_batch_with_a_lost_group() -> None:
    harness = rolling()
    harness.push(*[harness.group() for _ in range(4)])
    assert [harness.ask(after=0), harness.ask(after=1)] == [1, 2]
    assert give_up(harness, 2, (3, 3))
    assert harness.ask(after=1) == 0
    harness.push(harness.group())
    assert [harness.ask(after=1), harness.ask(after=3)] == [3, 0]


# ---- what is remembered of pushes -----------------------------------------------------------------------------


def test_a_push_is_known_for_a_minute_however_many_others_come_in_it() -> None:
    harness = rolling()
    group = harness.group(sequences=4)
    first = harness.push(group, key="mine")
    for number in range(5_000):
        harness.push(harness.group(sequences=4), key=str(number))
    assert harness.push(group, key="mine") == first
    assert len(harness.trajectories.queue.groups) == 5_001


def test_pushes_that_are_too_old_to_be_sent_again_are_forgotten_and_many_in_a_minute_are_bounded() -> None:
    state = Trajectories()
    groups = tuple(QueuedGroup(None, 1) for _ in range(16))
    for number in range(10_000):
        push(state, ev.GroupsPushed(engine=ENGINE, at_ns=1, groups=groups, key=str(number)))
    assert len(state.pushes) <= ANSWERS_KEPT / 16 + PUSHES_BETWEEN
    assert next(reversed(state.pushes)) == "9999"
    late = 2 + int(REPEAT_S * 1e9)
    for number in range(2 * PUSHES_BETWEEN):
        push(state, ev.GroupsPushed(engine=ENGINE, at_ns=late, groups=groups, key=f"late {number}"))
    assert sum(kept.at_ns == late for kept in state.pushes.values()) == 2 * PUSHES_BETWEEN
    assert len(state.pushes) < 3 * PUSHES_BETWEEN
