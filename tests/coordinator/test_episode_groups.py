"""Runs whose episodes become rollout groups: claims keep pace with the trainer, and no group waits for ever (R16)."""

import pytest

from bombus.errors import Code
from bombus.hive import events as ev
from bombus.hive import inbox
from bombus.hive.events import Collection, EpisodeType, EpochOpened
from bombus.hive.fold.evolve import evolve
from bombus.hive.inbox import Granted, Refusal
from bombus.hive.records import BodyRef, digest
from bombus.hive.state import Hive
from bombus.hive.status.text import render_status
from bombus.hive.trajectories.order import why_out_of_order
from bombus.hive.trajectories.state import HANDED_S
from tests.coordinator.core_in_memory import ENGINE
from tests.coordinator.groups_in_memory import GroupHarness
from tests.coordinator.test_trained_trajectories import TrainedHarness


class GroupsHarness(TrainedHarness):
    """A core whose job makes groups of two episodes, for batches of four sequences. The trainer may be ours."""

    def __init__(self, ours: bool = True, bound: int = 1) -> None:
        GroupHarness.__init__(self)
        self.configure(Collection(rollout_groups=ours, episode_groups=True, num_repeat=2, max_carry_staleness=bound))

    def why_not_granted(self, count: int = 1, type: EpisodeType = EpisodeType.TRAIN) -> str:
        """Claim. Return why nothing was granted, "" where it was."""
        answer = self.request(self.claim_message(count=count, type=type))
        if isinstance(answer, Granted):
            return ""
        assert isinstance(answer, Refusal), answer
        assert answer.code == Code.NO_EPISODES
        return answer.why

    def claim_all(self) -> int:
        """Claim one episode after another for as long as they are granted, and return how many were."""
        return next(number for number in range(100) if self.why_not_granted())

    def finish(self, *episodes: str, sequences: int = 2) -> None:
        """End two episodes of one task, and make the group of them."""
        for episode in episodes:
            self.call(episode)
            self.end(episode, f"t{self.stored}")
        group = self.group(sequences=sequences)
        self.send(
            inbox.EpisodesGrouped(
                id=self.id(), engine=ENGINE, run=self.engine.run, episodes=tuple(episodes), group=group
            )
        )

    def finish_all(self) -> None:
        opened = list(self.engine.open)
        for first, second in zip(opened[::2], opened[1::2], strict=True):
            self.finish(first, second)

    def make_step(self) -> None:
        assert self.engine.batch is not None
        self.train()

    def given_up(self) -> list[tuple[int, ...]]:
        return [event.groups for event in self.log if isinstance(event, ev.GroupsGivenUp)]


def rolling(ours: bool = True, bound: int = 1, batch_size: int = 4) -> GroupsHarness:
    harness = GroupsHarness(ours, bound)
    harness.roll(batch_size=batch_size, num_steps=1_000)
    return harness


# ---- pacing -------------------------------------------------------------------------------------------------------


def test_claims_wait_while_what_is_queued_and_played_would_be_too_old_for_our_trainer() -> None:
    harness = rolling()
    assert harness.claim_all() == 8, "one batch, and the one after it"
    first = list(harness.engine.open)
    harness.finish(*first[:2])
    harness.finish(*first[2:4])
    assert harness.engine.step == 1
    why = harness.why_not_granted()
    assert "batches that are under way (1) and those that queued groups and running episodes can make (1)" in why
    assert "collection.max_carry_staleness (1)" in why
    harness.finish_all()
    assert harness.why_not_granted(), "what is queued counts as what is played"
    harness.make_step()
    assert harness.engine.step == 2
    assert harness.claim_all() == 4


def test_claims_wait_while_an_outside_trainer_takes_nothing() -> None:
    harness = rolling(ours=False)
    assert harness.claim_all() == 8
    harness.finish_all()
    assert harness.why_not_granted()
    assert harness.ask() == 1
    assert harness.why_not_granted(), "the batch has not arrived, and another one is queued"
    harness.arrived(1)
    assert harness.claim_all() == 4
    assert (harness.ask(), harness.arrived(2) != []) == (2, True)
    assert harness.claim_all() == 4


def test_a_claim_that_waits_is_granted_as_soon_as_its_trainer_has_room() -> None:
    harness = rolling(ours=False)
    harness.claim_all()
    harness.finish_all()
    waiting = harness.claim_message(wait_s=60.0)
    harness.send(waiting)
    harness.ask()
    assert waiting.id not in harness.answers
    harness.arrived(1)
    assert isinstance(harness.answers[waiting.id], Granted)


@pytest.mark.parametrize("ours", [True, False])
def test_groups_that_fit_no_batch_count_for_less_than_one(ours: bool) -> None:
    harness = rolling(ours)
    harness.push(*(harness.group(sequences=3) for _ in range(60)))
    assert harness.claim_all() == 6, "3 groups of 2, and 3 of what is queued, are two batches"
    for episode in list(harness.engine.open):
        harness.send(inbox.Abort(id=harness.id(), engine=ENGINE, client="c1", episodes=(episode,)))
    harness.push(harness.group(sequences=1))
    assert harness.why_not_granted(), "now there is a batch, and what is queued goes on"


def test_without_anything_to_come_a_claim_of_any_size_is_granted() -> None:
    harness = rolling(bound=0)
    assert harness.why_not_granted(count=9) == ""
    assert harness.why_not_granted(count=9)
    episodes = list(harness.engine.open)
    for episode in episodes[1:]:
        harness.send(inbox.Abort(id=harness.id(), engine=ENGINE, client="c1", episodes=(episode,)))
    harness.call(episodes[0])
    harness.end(episodes[0], "t")
    assert harness.why_not_granted(count=9) == "", "an episode that waits for others of its task makes no batch"


def test_claims_wait_for_a_batch_of_complete_tasks_that_the_leader_has_not_made_into_groups_yet() -> None:
    harness = rolling(bound=0)
    for task in ("a", "a", "b", "b"):
        (episode,) = harness.claim(task_hint=task)
        harness.call(episode)
        harness.end(episode, task)
    assert not harness.engine.open
    assert harness.why_not_granted()


def test_after_the_last_step_claims_wait_and_say_why() -> None:
    harness = GroupsHarness()
    harness.roll(num_steps=1)
    for _ in range(2):
        harness.claim_all()
        harness.finish_all()
        if harness.engine.batch is not None:
            harness.make_step()
    assert harness.engine.version == 1
    assert "Wait: the run has made its last step (num_steps)" in harness.why_not_granted()
    assert harness.why_not_granted(type=EpisodeType.EVAL) == ""


def test_evaluation_does_not_wait_for_the_trainer() -> None:
    harness = rolling()
    harness.claim_all()
    assert harness.why_not_granted(type=EpisodeType.EVAL) == ""


def test_episodes_count_for_as_many_sequences_as_those_before_them_had() -> None:
    harness = rolling(batch_size=8)
    harness.finish(*(harness.claim()[0] for _ in range(2)), sequences=4)
    assert harness.claim_all() == 6, "with two sequences each they are 12, and 4 are queued: two batches of 8"


def test_open_episodes_count_for_the_task_that_their_claim_named() -> None:
    harness = rolling(bound=0)
    for task in ("a", "b", "c", "d"):
        harness.claim(task_hint=task)
    assert harness.why_not_granted() == "", "no group can be made of them"
    harness.claim(task_hint="a")
    assert harness.why_not_granted(), "one of two, and another with the one that may be of any task"


def test_groups_of_episodes_have_their_share_of_a_batch_beside_those_of_environments() -> None:
    harness = rolling(ours=False)
    harness.ask()
    environment = harness.join()
    harness.push(*(harness.group(environment) for _ in range(100)))
    assert harness.claim_all() == 4, "half of each batch is theirs, however many others are queued"


def test_clients_that_are_faster_than_the_trainer_keep_it_busy_and_lose_nothing() -> None:
    harness = rolling()
    for _ in range(30):
        harness.claim_all()
        harness.finish_all()
        assert len(harness.trajectories.queue.groups) <= 4, "two batches"
        harness.make_step()
    assert harness.engine.batch is not None
    assert harness.given_up() == []
    assert harness.engine.counters.dropped == 0
    assert harness.folded() == harness.core.hive


def test_a_status_says_that_new_episodes_wait() -> None:
    harness = rolling()
    harness.claim_all()
    shown = render_status(harness.core.hive)
    assert "ahead of training: 0 unfinished and 2 sealable batches, limit 1, new episodes are waiting" in shown
    assert "\n  waiting for client c1: engine main has waited for 0.0 s for a batch: 0 of 4 sequences" in shown


# ---- the bound ----------------------------------------------------------------------------------------------------


def test_a_group_that_has_waited_for_too_many_versions_is_given_up_with_its_reason() -> None:
    harness = rolling()
    harness.push(harness.group(sequences=3))
    harness.finish(*(harness.claim()[0] for _ in range(2)), sequences=3)
    assert list(harness.trajectories.queue.groups) == [1, 2], "3 and 3 are not 4"
    for _ in range(2):
        assert harness.given_up() == []
        harness.push_batch()
        harness.make_step()
    assert harness.given_up() == [(2,)]
    assert list(harness.trajectories.queue.groups) == [1], "nobody knows the age of what is pushed"
    assert not harness.trajectories.queued_at
    shown = render_status(harness.core.hive)
    assert "1 group was given up, the last because they have waited in the queue for more than" in shown
    assert "max_carry_staleness (1) policy versions" in shown
    hive = Hive()
    for event in harness.log:
        if not isinstance(event, EpochOpened):
            assert why_out_of_order(hive, event) == ""
        evolve(hive, event)
    assert hive == harness.core.hive


def test_the_time_for_which_episodes_were_played_is_not_time_in_the_queue() -> None:
    harness = rolling()
    episodes = [harness.claim()[0] for _ in range(2)]
    for episode in episodes:
        harness.call(episode)
    for _ in range(3):
        harness.push_batch()
        harness.make_step()
    harness.finish(*episodes)
    harness.push_batch()
    assert harness.engine.batch is not None
    assert harness.engine.batch.taken[0] == 7
    assert harness.given_up() == []


def test_an_outside_trainer_finds_each_group_however_long_it_has_waited() -> None:
    harness = rolling(ours=False)
    harness.finish(*(harness.claim()[0] for _ in range(2)), sequences=3)
    for number in range(1, 5):
        harness.push(harness.group(), harness.group())
        assert harness.ask() == number
        harness.arrived(number)
    assert harness.given_up() == []
    harness.push(harness.group(sequences=1))
    assert harness.ask() == 5
    assert harness.trajectories.batch is not None
    assert harness.trajectories.batch.numbers[0] == 1
    assert not harness.trajectories.queued_at


def test_a_new_run_has_no_group_that_has_waited() -> None:
    harness = rolling()
    harness.finish(*(harness.claim()[0] for _ in range(2)), sequences=3)
    harness.roll(num_steps=1_000)
    assert (harness.trajectories.queued_at, harness.trajectories.grouped, harness.trajectories.grouped_sequences) == (
        {},
        0,
        0,
    )


# ---- a batch that does not arrive -----------------------------------------------------------------------------------


def test_the_bodies_of_a_batch_that_was_handed_out_long_ago_are_moved_and_it_is_handed_out_from_there() -> None:
    harness = GroupHarness()
    harness.register()
    harness.push(harness.group(sequences=4))
    assert harness.ask(after=0) == 1
    moved = ev.MovedBody(1, BodyRef(seqs=(50,), size=100, digest=digest(b"1")))

    def store() -> list[ev.AnyEvent]:
        return harness.send(inbox.BodiesStored(id=harness.id(), engine=ENGINE, moved=(moved,), was=(1,)))

    assert store() == [], "whoever took it may be reading it"
    harness.now_ns += int(HANDED_S * 1e9)
    assert [type(event) for event in store()] == [ev.BodiesMoved]
    lost = inbox.GiveUpGroups(
        id=harness.id(), engine=ENGINE, run=1, number=1, groups=(inbox.LostGroup(1, 1),), why="it is not there"
    )
    assert harness.send(lost) == [], "it was looked for where it is no more"
    assert harness.ask(after=0) == 1
    assert harness.trajectories.batch is not None
    assert [group.body.first for group in harness.trajectories.batch.groups if group.body] == [50]
    assert [group.body.first for group in harness.trajectories.needed() if group.body] == [50]
