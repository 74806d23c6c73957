"""Runs of trajectories whose batches our own trainer takes: they boot, make steps, and end after the last (R16)."""

import msgspec
import pytest

from bombus.errors import Code
from bombus.hive import events as ev
from bombus.hive import inbox
from bombus.hive.events import AnyEvent, Collection, DropReason
from bombus.hive.fold.evolve import evolve
from bombus.hive.inbox import AnyAnswer, Done, Pushed, Refusal
from bombus.hive.state import Hive, Phase
from bombus.hive.status.text import render_status
from bombus.hive.trajectories.queue import GROUPS_MAX, QueuedGroup
from tests.coordinator.core_in_memory import ENGINE, CoreHarness
from tests.coordinator.groups_in_memory import GroupHarness


class TrainedHarness(GroupHarness):
    """A core whose engine has a job that trains rollout groups."""

    def __init__(self, **rules: object) -> None:
        super().__init__()
        self.configure(Collection(rollout_groups=True, **rules))  # type: ignore[arg-type]

    def register_ours(self, **more: object) -> AnyAnswer:
        return self.register(**{"checkpoint_dir": "atropos/a", **more})  # type: ignore[arg-type]

    def roll(self, **more: object) -> None:
        """Register a trainer for batches of 4 sequences, and boot."""
        answer = self.register_ours(**more)
        assert isinstance(answer, Done), answer
        self.send(inbox.ReplicaAlive(id=self.id(), engine=ENGINE, replica="r1", url="http://r1"))
        self.open_trainer()
        self.save_weights(0)
        self.load(0)
        assert self.phase() == Phase.ROLLING

    def push_batch(self) -> list[AnyEvent]:
        """Push two groups of two sequences, and return what was decided."""
        before = len(self.log)
        assert isinstance(self.push(self.group(), self.group()), Pushed)
        return self.log[before:]  # type: ignore[return-value]

    def folded(self) -> Hive:
        hive = Hive()
        for event in self.log:
            evolve(hive, event)
        return hive


def rolling(**more: object) -> TrainedHarness:
    harness = TrainedHarness()
    harness.roll(**more)
    return harness


def refused(answer: AnyAnswer) -> Refusal:
    assert isinstance(answer, Refusal), answer
    return answer


# ---- the run's beginning ----------------------------------------------------------------------------------------


def test_registering_begins_a_run_of_the_job_which_boots_with_our_trainer() -> None:
    harness = TrainedHarness()
    assert harness.register_ours() == Done(run=1)
    assert harness.phase() == Phase.BOOTING
    assert harness.engine.queues_groups
    assert harness.engine.makes_steps
    assert harness.engine.started is not None
    assert harness.engine.started.config_digest == "d"


def test_without_such_a_job_the_trainer_is_somebody_elses() -> None:
    harness = GroupHarness()
    harness.configure(Collection())
    harness.register()
    assert harness.phase() == Phase.ROLLING
    assert not harness.engine.makes_steps


def test_environments_wait_until_replicas_serve_the_model() -> None:
    harness = TrainedHarness()
    harness.register_ours()
    assert harness.join() is None
    harness = rolling()
    assert harness.join() == 0


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"checkpoint_dir": "/tmp/a"}, "checkpoint_dir is '/tmp/a', but this engine's own trainer keeps checkpoints"),
        ({"checkpoint_dir": "a/../../b"}, "checkpoint_dir is 'a/../../b'"),
        ({"starting_step": 3}, "starting_step is 3, but this engine's own trainer begins at step 0"),
        ({"num_steps": 0}, "num_steps is 0, but it must be above 0: it is the run's last step"),
        ({"max_token_len": 0}, "max_token_len is 0"),
    ],
)
def test_settings_that_our_trainer_cannot_have_are_refused_by_name(given: dict[str, object], why: str) -> None:
    harness = TrainedHarness()
    refusal = refused(harness.register_ours(**given))
    assert refusal.code == Code.MALFORMED
    assert refusal.why.startswith(why)
    assert harness.phase() == Phase.OFFLINE


def test_such_a_job_is_not_started_for_episodes() -> None:
    harness = TrainedHarness()
    refusal = refused(harness.request(inbox.Start(id=harness.id(), engine=ENGINE)))
    assert "POST /register begins its run" in refusal.why


def test_a_run_that_resumes_wants_the_step_of_its_checkpoint_as_starting_step() -> None:
    harness = rolling()
    harness.push_batch()
    harness.step_done(1)
    harness.request(inbox.Stop(id=harness.id(), engine=ENGINE))
    harness.configure(Collection(rollout_groups=True, resume="from 1"))
    assert "begins at step 1" in refused(harness.register_ours(starting_step=0)).why
    assert harness.register_ours(starting_step=1) == Done(run=2)
    assert harness.trajectories.current_step == 1


# ---- steps ------------------------------------------------------------------------------------------------------


def test_a_batch_is_taken_for_one_step_as_soon_as_there_is_one() -> None:
    harness = rolling()
    (pushed, ready) = harness.push_batch()
    assert isinstance(pushed, ev.GroupsPushed)
    assert isinstance(ready, ev.BatchReady)
    assert (ready.step, ready.taken, ready.groups, ready.rollout_groups) == (1, (1, 2), (), ())
    assert harness.engine.batch is not None
    assert [group.body.first for group in harness.engine.batch.rollout_groups if group.body] == [1, 2]
    assert not harness.trajectories.queue.groups
    assert (harness.trajectories.current_step, harness.phase()) == (1, Phase.ROLLING)


def test_the_next_batch_waits_for_the_step_its_weights_and_a_replica_that_serves_them() -> None:
    harness = rolling()
    harness.push_batch()
    assert [type(event) for event in harness.push_batch()] == [ev.GroupsPushed]
    harness.step_done(1)
    harness.save_weights(1)
    assert harness.engine.batch is None
    assert any(isinstance(event, ev.BatchReady) for event in harness.load(1))
    assert harness.engine.step == 2


def test_groups_that_came_before_the_run_are_in_its_first_batch() -> None:
    harness = TrainedHarness()
    harness.push(harness.group(), harness.group())
    harness.roll()
    assert harness.engine.step == 1


def test_after_the_last_step_nothing_is_taken() -> None:
    harness = rolling(num_steps=1)
    harness.push_batch()
    harness.step_done(1)
    harness.save_weights(1)
    harness.load(1)
    assert [type(event) for event in harness.push_batch()] == [ev.GroupsPushed]
    assert "trained here: step 1 of 1, batches of 4 sequences" in render_status(harness.core.hive)


def test_nobody_else_gets_a_batch_of_it() -> None:
    harness = rolling()
    refusal = refused(harness.request(inbox.TakeBatch(id=harness.id(), engine=ENGINE)))
    assert refusal.code == Code.UNSUPPORTED
    assert "is trained by the engine's own trainer" in refusal.why


def test_a_suspended_run_takes_groups_and_makes_no_batch() -> None:
    harness = rolling()
    harness.send(inbox.EngineBroke(id=harness.id(), engine=ENGINE, run=1, reason="the disk is full", may_pass=True))
    assert harness.engine.suspended
    assert [type(event) for event in harness.push_batch()] == [ev.GroupsPushed]
    harness.request(inbox.Resume(id=harness.id(), engine=ENGINE))
    assert harness.engine.step == 1


def test_a_queue_without_a_batch_is_looked_through_once() -> None:
    harness = rolling()
    harness.push(harness.group(sequences=3), harness.group(sequences=3))
    assert harness.core.live.unfilled.keys() == {ENGINE}
    seen = harness.core.live.unfilled[ENGINE]
    harness.let_pass(3)
    assert harness.core.live.unfilled[ENGINE] == seen
    harness.push(harness.group(sequences=1))
    assert harness.engine.step == 1


# ---- what is kept -----------------------------------------------------------------------------------------------


def test_bodies_of_steps_that_may_have_to_be_made_again_are_not_released() -> None:
    harness = rolling()
    for step in (1, 2, 3):
        harness.push_batch()
        harness.step_done(step)
        harness.save_weights(step)
        harness.load(step)
    needed = [group.body.first for group in harness.engine.groups_needed() if group.body is not None]
    assert needed[-4:] == [3, 4, 5, 6]  # of steps 2 and 3
    harness.send(inbox.TrajectoriesStored(id=harness.id(), engine=ev.HIVE, below=100))
    assert harness.core.hive.trajectories_released == 3


def test_a_run_that_is_over_needs_no_bodies() -> None:
    harness = rolling()
    harness.push_batch()
    harness.request(inbox.Stop(id=harness.id(), engine=ENGINE))
    assert list(harness.engine.groups_needed()) == []
    assert [body.first for *_, body in harness.core.hive.bodies_needed()] == [2], "the newest example"


def test_the_fold_of_the_log_is_the_cores_state() -> None:
    harness = rolling()
    harness.push_batch()
    harness.step_done(1)
    assert harness.folded() == harness.core.hive


def test_a_group_of_a_step_that_is_lost_is_on_the_log_and_stays_out_of_the_step_whoever_makes_it() -> None:
    harness = rolling()
    harness.push_batch()
    lost = inbox.GiveUpGroups(
        id=harness.id(), engine=ENGINE, run=1, number=1, groups=(inbox.LostGroup(2, 2),), why="it is gone"
    )
    (given_up,) = harness.send(lost)
    assert isinstance(given_up, ev.GroupsGivenUp)
    assert harness.send(lost) == [], "the same command"
    assert harness.send(msgspec.structs.replace(lost, id=harness.id())) == [], "it is known"
    for batch in (harness.engine.batch, harness.engine.steps[-1].batch):
        assert batch is not None
        assert [group.body is None for group in batch.rollout_groups] == [False, True]
    assert harness.trajectories.current_step == 1, "the step is made"
    assert harness.folded() == harness.core.hive


# ---- groups of episodes -----------------------------------------------------------------------------------------


def pooled(**more: object) -> TrainedHarness:
    """Return a run whose job makes groups of two episodes of a task, with one task ended."""
    harness = TrainedHarness(episode_groups=True, num_repeat=2)
    harness.roll(**more)
    for _ in range(2):
        harness.play("t1")
    return harness


def grouped(harness: TrainedHarness, group: QueuedGroup | None, **more: object) -> list[AnyEvent]:
    given: dict[str, object] = {"run": harness.engine.run, "episodes": tuple(harness.engine.pool), **more}
    return harness.send(inbox.EpisodesGrouped(id=harness.id(), engine=ENGINE, group=group, **given))  # type: ignore[arg-type]


def test_a_group_of_episodes_takes_them_from_the_pool_once() -> None:
    harness = pooled()
    episodes = tuple(harness.engine.pool)
    (pushed,) = grouped(harness, harness.group())
    assert isinstance(pushed, ev.GroupsPushed)
    assert (pushed.episodes, harness.engine.pool) == (episodes, {})
    assert grouped(harness, harness.group(), episodes=episodes) == [], "another leader has made the same"
    assert len(harness.trajectories.queue.groups) == 1
    assert harness.folded() == harness.core.hive
    *_, ready = harness.send(inbox.PushGroups(id=harness.id(), engine=ENGINE, groups=(harness.group(),)))
    assert isinstance(ready, ev.BatchReady)
    assert ready.taken == (1, 2), "it is one pool"


def test_a_group_of_episodes_without_room_or_with_a_body_that_is_gone_is_made_again() -> None:
    harness = pooled()
    harness.send(inbox.StorageSeen(id="full", what="trajectories", used=95, size=100, reserve=10))
    assert grouped(harness, harness.group()) == []
    harness.send(inbox.StorageSeen(id="room", what="trajectories", used=5, size=100, reserve=10))
    old = harness.group()
    harness.send(inbox.TrajectoriesStored(id="s", below=100))
    assert grouped(harness, old) == []
    assert grouped(harness, harness.group(), run=9) == []
    assert len(harness.engine.pool) == 2


def test_episodes_that_cannot_be_a_group_are_dropped_with_their_reason() -> None:
    harness = pooled()
    (dropped,) = grouped(harness, None, why="their calls are lost")
    assert isinstance(dropped, ev.GroupDropped)
    assert (dropped.reason, dropped.tasks) == (DropReason.UNFIT, ("t1",))
    assert (harness.engine.pool, harness.engine.counters.dropped) == ({}, 2)


def test_open_episodes_end_with_the_run_that_another_register_or_a_reset_ends() -> None:
    for ends in ("register", "reset"):
        harness = pooled()
        (episode,) = harness.claim()
        if ends == "register":
            harness.register_ours()
        else:
            harness.request(inbox.ResetGroups(id=harness.id(), engine=ENGINE))
        aborted = [event for event in harness.log if isinstance(event, ev.EpisodeAborted)]
        assert [event.episodes for event in aborted] == [(episode,)]


def test_a_run_without_such_a_job_still_has_no_episodes() -> None:
    harness = rolling()
    assert "takes rollout groups and has no episodes" in refused(harness.request(harness.claim_message())).why


def test_ended_episodes_that_wait_for_others_of_their_task_are_dropped_when_they_are_too_old() -> None:
    harness = TrainedHarness(episode_groups=True, num_repeat=2, max_carry_staleness=1)
    harness.roll()
    old = harness.play("t1")
    for step in (1, 2):
        assert list(harness.engine.pool) == [old]
        harness.push_batch()
        harness.step_done(step)
        harness.save_weights(step)
        harness.load(step)
    (dropped,) = [event for event in harness.log if isinstance(event, ev.GroupDropped)]
    assert (dropped.reason, dropped.episodes) == (DropReason.STALE, (old,))


def make_steps(harness: TrainedHarness, *steps: int) -> None:
    for step in steps:
        if harness.engine.batch is None:
            harness.push_batch()
        harness.step_done(step)
        harness.save_weights(step)
        harness.load(step)


def dropped_from(harness: TrainedHarness) -> list[tuple[str, ...]]:
    return [event.episodes for event in harness.log if isinstance(event, ev.GroupDropped)]


def test_a_complete_task_waits_for_room_however_old_it_is() -> None:
    harness = pooled()
    for _ in range(2):
        harness.push_batch()
    harness.send(inbox.StorageSeen(id="full", what="trajectories", used=95, size=100, reserve=10))
    make_steps(harness, 1, 2)
    assert harness.engine.version == 2
    assert len(harness.engine.pool) == 2
    assert dropped_from(harness) == []


def test_ended_episodes_wait_for_open_ones_that_were_claimed_before_they_ended() -> None:
    harness = TrainedHarness(episode_groups=True, num_repeat=2, max_carry_staleness=1)
    harness.roll()
    quick, slow = (harness.claim()[0] for _ in range(2))
    for episode in (quick, slow):
        harness.call(episode)
    harness.end(quick, "t1")
    make_steps(harness, 1, 2)
    harness.end(slow, "t1")
    assert list(harness.engine.pool) == [quick, slow], "the task is complete"
    assert dropped_from(harness) == []


def test_ended_episodes_do_not_wait_for_those_of_another_task_nor_for_later_ones() -> None:
    harness = TrainedHarness(episode_groups=True, num_repeat=2, max_carry_staleness=1)
    harness.roll()
    ((other,), (quick,)) = (harness.claim(task_hint="t2"), harness.claim())
    harness.call(quick)
    harness.end(quick, "t1")
    harness.tick()
    harness.claim()
    make_steps(harness, 1, 2)
    assert other in harness.engine.open
    assert dropped_from(harness) == [(quick,)]


def test_no_episode_is_handed_out_while_there_is_no_room_for_its_group() -> None:
    harness = pooled()
    full = inbox.StorageSeen(id="full", what="trajectories", used=95, size=100, reserve=10)
    harness.send(full)
    refusal = refused(harness.request(harness.claim_message()))
    assert refusal.code == Code.STORAGE_FULL
    assert "of stream trajectories" in refusal.why
    harness.send(msgspec.structs.replace(full, id="room", used=5))
    assert harness.claim()
    episodes = CoreHarness()
    episodes.boot()
    episodes.send(full)
    assert episodes.claim(), "nothing else needs that stream"


def test_a_full_pool_of_incomplete_tasks_is_cleared() -> None:
    harness = TrainedHarness(episode_groups=True, num_repeat=2, max_pool_episodes=2)
    harness.roll()
    for task in ("t1", "t2"):
        harness.play(task)
    assert len(harness.engine.pool) == 2
    harness.play("t3")
    assert harness.engine.pool == {}
    assert any(isinstance(event, ev.PoolCleared) for event in harness.log)


def test_a_group_of_episodes_waits_while_the_queue_is_full() -> None:
    harness = pooled()
    harness.trajectories.queue.groups.update(dict.fromkeys(range(GROUPS_MAX), harness.group()))
    harness.trajectories.queue.kept_of("").groups = GROUPS_MAX
    assert grouped(harness, harness.group()) == []
    assert len(harness.engine.pool) == 2
    harness.trajectories.queue.groups.clear()
    assert len(grouped(harness, harness.group())) == 1


def test_a_queue_without_a_batch_is_looked_through_again_when_an_environment_has_left() -> None:
    harness = rolling()
    environment = harness.join(minimum=0.5)
    assert environment is not None
    harness.push_batch()
    assert harness.engine.step == 0, "half of the batch is to be the environment's"
    harness.request(inbox.LeaveEnvironment(id=harness.id(), engine=ENGINE, environment=environment))
    assert harness.engine.step == 1
