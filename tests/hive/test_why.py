"""Stalls that the coordinator's core is driven into: the last link of the chain names the cause, and who can end it."""

import re
from collections.abc import Iterator

import pytest

from bombus.hive import inbox
from bombus.hive.events import Collection, EpisodeType, Event, Method
from bombus.hive.failures import FailureKind
from bombus.hive.fold.evolve import evolve
from bombus.hive.state import LOAD_FAILED, Hive, Phase
from bombus.hive.status.text import render_status
from bombus.hive.why.chains import chain
from bombus.hive.why.links import ChainLink, LastEvents
from bombus_coordinator.core import Core
from bombus_coordinator.rules.trainers import UNSAID_PATIENCE_S
from tests.coordinator.core_in_memory import ENGINE, PATIENCE_S, SECOND, CoreHarness
from tests.coordinator.groups_in_memory import GroupHarness
from tests.coordinator.multi_model_in_memory import BIG, SMALL, MultiModelHarness
from tests.coordinator.operations_in_memory import MODEL, OperationHarness
from tests.coordinator.test_core import sees
from tests.coordinator.test_core_properties import run
from tests.coordinator.test_crowding import call as stored_call
from tests.coordinator.test_episode_groups import GroupsHarness
from tests.coordinator.test_led_time import booting, draining, holding, syncing
from tests.coordinator.test_quarantine import alive, cannot_load, suspended_for_want_of_replicas
from tests.coordinator.test_quarantine import rolling as rolling_with
from tests.coordinator.test_quarantine import train as publish
from tests.coordinator.test_rebuilding import executed, rebuild, say_away
from tests.coordinator.test_serving import rest, rests
from tests.coordinator.test_suspending import REASON, break_step, resume, suspend
from tests.coordinator.test_trained_trajectories import TrainedHarness
from tests.effort import effort
from tests.sim.server import EVENTS_STREAM
from tests.sim.world import OPERATING, simulate


def rolling(**rules: object) -> CoreHarness:
    harness = CoreHarness()
    harness.boot(**rules)  # type: ignore[arg-type]
    return harness


def later(harness: CoreHarness, seconds: float) -> None:
    """Let time pass. The answers to claims have arrived, and replicas stay alive, with what they serve."""
    for name, engine in harness.core.hive.engines.items():
        harness.send(inbox.Touch(id=harness.id(), engine=name, confirmed=tuple(engine.claims)))
    harness.now_ns += int(seconds * SECOND)
    for name in harness.core.hive.engines:
        with harness.on(name) as engine:
            for replica, each in list(engine.replicas.items()):
                serves = {"run": each.run, "version": each.version} if replica in engine.loaded else {}
                harness.send(inbox.ReplicaAlive(id=harness.id(), engine=name, replica=replica, url=each.url, **serves))  # type: ignore[arg-type]
    harness.tick(after_s=0)


def last_events(log: list[Event]) -> LastEvents:
    last = LastEvents()
    for event in log:
        last.note(event)  # type: ignore[arg-type]
    return last


def chained(harness: CoreHarness, name: str = ENGINE, led_ns: int = 0) -> list[ChainLink]:
    found = chain(harness.core.hive, harness.now_ns, last_events(harness.log), name, led_ns)
    assert found is not None, f"there is no {name}"
    return found


def cause(harness: CoreHarness, who: str, name: str = ENGINE) -> str:
    """Return the last sentence of a chain, and check who can end it."""
    *_, last = chained(harness, name)
    assert last.who == who, last
    return last.what


# ---- clients and their episodes -----------------------------------------------------------------------------------


def test_a_client_that_sleeps_in_an_episode_is_named_by_the_batch_that_waits_for_it() -> None:
    harness = rolling()
    harness.play("a", client="quick")
    (episode,) = harness.claim("slow", task_hint="a", discard_timeout_s=600.0)
    harness.call(episode)
    later(harness, 60)
    first, group, last = chained(harness)
    assert first.what == "engine main is rolling: the batch of step 1 has waited for 1 m 00 s for 2 of 2 tasks"
    assert group.what == (
        f"the group of task a is waiting for episode {episode}, claimed by client slow 1 m 00 s ago, with a last "
        "call recorded 1 m 00 s ago"
    )
    assert last.what == (
        "it will be aborted as idle in 9 m 00 s unless client slow has a call in progress, makes one, or "
        "reports its reward"
    )
    assert (last.who, last.until_ns) == ("client slow", harness.now_ns + 540 * SECOND)
    assert chained(harness, "main-1") == [first, group, last], "the run waits for what its engine waits for"
    alone, same = chained(harness, episode)
    assert (
        alone.what
        == f"episode {episode} was claimed by client slow 1 m 00 s ago, and has a last call recorded 1 m 00 s ago"
    )
    assert same == last


def test_an_idle_episode_ends_at_the_deadline_that_the_chain_names_unless_a_call_is_in_progress() -> None:
    harness = rolling()
    (episode,) = harness.claim("slow", discard_timeout_s=100.0)
    later(harness, 90)
    assert "aborted as idle in 10 s" in cause(harness, "client slow")
    until_ns = chained(harness)[-1].until_ns
    harness.send(inbox.Touch(id=harness.id(), engine=ENGINE, episodes=(episode,)))
    later(harness, 20)
    assert "so one must be in progress" in cause(harness, "client slow")
    later(harness, 90)
    assert episode not in harness.engine.open
    assert until_ns < harness.now_ns


def test_a_client_that_sends_heartbeats_is_not_called_alive_as_it_may_have_just_died() -> None:
    harness = rolling()
    harness.claim("slow", touches=True)
    assert cause(harness, "client slow").endswith(
        "; its process sends heartbeats: 15 s after the last one it is aborted"
    )


def test_the_episode_that_failed_last_is_named_while_others_are_open() -> None:
    harness = rolling()
    (failed,) = harness.claim("c")
    detail = "InternalServerError('Error code: 503 - the replica answered 500; try again in a moment.')"
    abort = inbox.Abort(
        id=harness.id(),
        engine=ENGINE,
        client="c",
        episodes=(failed,),
        failure=FailureKind.CLIENT,
        detail=detail,
    )
    harness.send(abort)
    harness.claim("c")
    later(harness, 5)
    whats = [link.what for link in chained(harness)]
    assert f"episode {failed} was aborted 5.0 s ago (as failed: client, {detail})" in whats
    cause(harness, "client c")


def test_an_abort_by_the_hive_has_its_reason() -> None:
    harness = rolling()
    harness.claim("slow", discard_timeout_s=20.0)
    later(harness, 30)
    later(harness, 30)
    assert cause(harness, "a client").endswith("s ago (as failed: client, idle)")


def test_the_silence_of_a_client_is_counted_anew_after_a_pause_without_a_leader() -> None:
    harness = rolling()
    harness.claim("slow", discard_timeout_s=100.0)
    later(harness, 90)
    harness.send(inbox.Tick(id=harness.id(), answered=0))
    harness.send(inbox.Tick(id=harness.id(), answered=0, after_ns=harness.now_ns), after_s=6)
    assert "aborted as idle in 1 m 40 s" in cause(harness, "client slow")
    assert "aborted as idle in 1 m 40 s" in render_status(harness.core.hive, now_ns=harness.now_ns)


def test_a_claim_waits_because_all_places_are_taken_and_the_chain_says_by_whom() -> None:
    harness = rolling(max_open_claims=3)
    harness.claim("greedy", 2)
    harness.claim("modest", type=EpisodeType.EVAL)
    _, places, longest, last = chained(harness)
    assert places.what.endswith("all 3 (rollout.max_env_worker) are open, 2 by client greedy, 1 by client modest")
    assert longest.what.startswith("the longest idle is episode main-1-1, claimed by client greedy")
    assert last.who == "client greedy"


def test_claims_of_a_key_that_pins_more_than_its_share_wait_for_its_oldest_episode() -> None:
    core = Core()
    core.open_epoch("leader", 1000)
    harness = CoreHarness(core)
    harness.boot()
    harness.claim("c2", owner="bob")
    (oldest,) = harness.claim("c1", owner="ann")
    stored_call(harness, oldest, 900)
    _, share, its_oldest, _ = chained(harness)
    assert share.what.startswith("claims of key ann are refused: The episodes of this key keep 900 B")
    assert its_oldest.what.startswith(f"its oldest is episode {oldest}, claimed by client c1 of key ann")
    assert "aborted as idle" in cause(harness, "client c1 of key ann")


def test_a_group_has_too_few_episodes_and_nobody_claims_another() -> None:
    harness = rolling()
    harness.play("a")
    later(harness, 50)
    _, group, _ = chained(harness)
    assert group.what == "the group of task a has 1 of 2 episodes"
    assert cause(harness, "a client") == "no training episode is open, and no client has claimed one for 50 s"


def test_groups_with_equal_rewards_are_named_as_such() -> None:
    harness = rolling(method=Method.ENOUGH_NON_DUMMY_TASKS)
    for reward in (1.0, 1.0):
        harness.play("a", reward)
    assert chained(harness)[0].what.endswith(
        "2 of 2 non-dummy tasks; 1 complete group with equal rewards cannot be in it"
    )


def test_clients_that_have_not_agreed_to_sync_are_named() -> None:
    harness = rolling(method=Method.ALL_CLIENTS_AGREE)
    for client in ("c1", "c2", "c3"):
        harness.play("a", client=client)
    harness.request(inbox.AgreeSync(id=harness.id(), engine=ENGINE, client="c1"))
    later(harness, 60)
    what = cause(harness, "clients c2 and c3")
    assert what == (
        "the sync needs the agreement of clients c2 and c3, or that they end no episode for another 9 m 00 s; 1 client "
        "agreed"
    )
    later(harness, 541)
    assert harness.phase() != Phase.ROLLING, "time has ended it"


def test_the_drain_waits_for_an_open_episode_until_its_deadline() -> None:
    harness = draining()
    later(harness, 20)
    first, _, last = chained(harness)
    assert first.what.endswith("the batch of step 1 has waited for 20 s for 1 open episode")
    assert last.what == "the drain will end and abort it in 40 s unless client c1 reports its reward"
    assert (last.who, last.until_ns) == ("client c1", harness.now_ns + 40 * SECOND)
    later(harness, 41)
    assert harness.phase() == Phase.WEIGHT_SYNCING


def test_a_complete_batch_is_held_for_an_episode_that_would_be_too_old_for_the_next() -> None:
    harness = holding()
    first, _, last = chained(harness)
    assert "is complete, and is waiting for 1 episode" in first.what
    assert last.what == "the batch is sealed without it in 1 m 00 s unless client c1 reports its reward"
    assert last.who == "client c1"


def test_a_pool_that_is_too_small_for_a_batch_was_cleared() -> None:
    harness = rolling(max_pool_episodes=2, batch_size=5, num_repeat=3)
    for task in "abc":
        harness.play(task)
    later(harness, 5)
    assert cause(harness, "the operator") == (
        "the pool was cleared of 3 episodes 5.0 s ago, as it was full (collection.max_cached_episodes is 2)"
    )


@pytest.mark.parametrize(
    ("failure", "why"),
    [(None, "by its client"), (FailureKind.SANDBOX, "as failed: sandbox")],
    ids=["given up", "failed"],
)
def test_a_batch_waits_because_every_episode_is_aborted(failure: FailureKind | None, why: str) -> None:
    harness = rolling()
    (episode,) = harness.claim("flaky")
    harness.send(inbox.Abort(id=harness.id(), engine=ENGINE, client="flaky", episodes=(episode,), failure=failure))
    later(harness, 30)
    assert cause(harness, "a client").endswith(f"; the last one was aborted 30 s ago ({why})")


def test_how_long_ago_the_last_claim_was_is_not_said_if_it_is_not_known() -> None:
    harness = rolling()
    harness.play("a")
    later(harness, 50)
    links = chain(harness.core.hive, harness.now_ns, LastEvents(), ENGINE) or []
    assert links[-1].what == "no training episode is open, and no client has claimed one"


def test_an_episode_that_has_ended_waits_with_its_batch_or_for_nothing() -> None:
    harness = rolling(batch_size=1, num_repeat=1)
    pooled = harness.play("a")
    assert chained(harness, pooled)[0].what == f"episode {pooled} has ended, and is in the batch of step 1"
    assert cause(harness, "trainer t1", pooled).startswith("trainer t1 has had step 1 pending")
    harness.train()
    (gone,) = harness.claim()
    harness.send(inbox.Abort(id=harness.id(), engine=ENGINE, client="c1", episodes=(gone,)))
    assert cause(harness, "nobody", gone) == f"episode {gone} is not waiting for anything: it was aborted (client)"
    assert cause(harness, "nobody", pooled) == f"episode {pooled} is not waiting for anything: it ended"


# ---- replicas -----------------------------------------------------------------------------------------------------


def test_every_replica_is_gone_so_the_calls_of_an_episode_wait() -> None:
    harness = rolling()
    (episode,) = harness.claim("c1", discard_timeout_s=600.0)
    harness.call(episode)
    harness.tick(after_s=60)
    assert (
        cause(harness, "a replica") == "engine main has no replica: replica r1 left 0.0 s ago (not heard from for 10 s)"
    )
    assert cause(harness, "a replica", episode).startswith("engine main has no replica")


@pytest.mark.parametrize("reason", ["no weights at /shared", "CUDA out of memory"])
def test_a_replica_that_cannot_load_is_named_with_its_reason(reason: str) -> None:
    harness = rolling_with(1)
    publish(harness)
    cannot_load(harness, "r1", why=reason)
    later(harness, 60)
    first, _ = chained(harness)
    assert first.what.startswith(
        "the run of engine main has been suspended for 1 m 00 s: no replica can serve version 1"
    )
    what = cause(harness, "replica r1, or the operator, with `bombus resume`")
    assert what == f"replica r1 has been quarantined for 1 m 00 s: it cannot load version 1: {reason}"


def test_a_replica_that_did_not_load_in_time_is_quarantined_for_that() -> None:
    harness = rolling_with(1, sync_s=60.0)
    publish(harness)
    later(harness, 61)
    what = cause(harness, "replica r1, or the operator, with `bombus resume`")
    assert what.endswith("it cannot load version 1: not loaded within 60 s")


def test_a_replica_whose_answers_are_wrong_is_named_with_what_is_wrong() -> None:
    harness = rolling_with(1)
    said = inbox.AnswersBroke(id="x", engine=ENGINE, run=1, version=0, replica="r1", reason="a logprob is NaN")
    harness.send(said)
    what = cause(harness, "replica r1, or the operator, with `bombus resume`")
    assert what.endswith("its answers are wrong at version 0: a logprob is NaN")


def test_no_replica_serves_the_newest_version_yet() -> None:
    harness = rolling_with(2)
    publish(harness)
    later(harness, 30)
    first, last = chained(harness)
    assert first.what == "engine main has handed out no episodes for 30 s: it is waiting until version 1 is served"
    assert last.what == (
        "replica r1 has had version 1 to load for 30 s, as has 1 other; it will be quarantined in 9 m 30 s "
        "unless it does"
    )
    assert last.who == "replica r1"


def test_a_replica_that_hangs_while_it_loads_is_named_while_the_others_serve() -> None:
    harness = syncing()
    later(harness, 50)
    what = cause(harness, "replica r2")
    assert what == "replica r2 has had version 1 to load for 50 s; it will be quarantined in 10 s unless it does"


# ---- the trainer --------------------------------------------------------------------------------------------------


def test_no_trainer_has_opened_the_run() -> None:
    harness = booting()
    later(harness, 20)
    first, last = chained(harness)
    assert first.what == (
        "engine main has been booting for 20 s; its run will be suspended in 40 s unless it boots by then"
    )
    assert last.what == "no trainer has opened run 1 of engine main for 20 s"
    assert last.who == "a trainer"


def trained(**rules: object) -> CoreHarness:
    """Return a hive whose trainer has a batch."""
    harness = rolling(batch_size=1, num_repeat=1, **rules)
    harness.play("a")
    assert harness.engine.batch is not None
    return harness


def test_a_trainer_that_hangs_in_a_step_has_lost_its_epoch() -> None:
    harness = trained()
    said = inbox.TrainerHangs(id="x", engine=ENGINE, run=1, trainer_epoch=1, doing="step 1", still_s=600.0)
    harness.send(said)
    later(harness, 30)
    assert cause(harness, "a trainer") == "no trainer for 30 s: t1 made no progress at step 1 for 10 m 00 s"


def test_a_trainer_that_is_silent_has_lost_its_epoch() -> None:
    harness = trained()
    later(harness, PATIENCE_S + 1)
    assert cause(harness, "a trainer").startswith("no trainer for 0.0 s: t1 was not heard from for ")


def test_a_trainer_has_worked_on_a_step_for_long() -> None:
    harness = trained()
    later(harness, 1200)
    what = cause(harness, "trainer t1")
    assert what.startswith(
        "trainer t1 has had step 1 pending for 20 m 00 s; it will be replaced if it gives no sign of life for"
    )


def test_a_trainer_that_names_no_patience_is_said_to_have_none() -> None:
    harness = trained()
    harness.send(inbox.TrainerOpens(id="x", engine=ENGINE, run=1, trainer="t2"))
    later(harness, UNSAID_PATIENCE_S / 2)
    assert cause(harness, "trainer t2") == "trainer t2 has had step 1 pending for 12 h 00 m"


def test_a_step_that_fails_again_and_again_is_named_with_its_last_reason() -> None:
    harness = trained()
    for _ in range(2):
        break_step(harness)
    what = cause(harness, "trainer t1")
    assert what.startswith(f"step 1 has failed 2 times, the last 0.0 s ago because: {REASON}; trainer t1 will try")


def test_a_step_was_completed_and_its_weights_are_not_published() -> None:
    harness = trained()
    harness.step_done(1)
    later(harness, 90)
    _, unpublished, _ = chained(harness)
    assert unpublished.what == "step 1 was completed 1 m 30 s ago, and its weights have not been published yet"
    assert cause(harness, "trainer t1").startswith("trainer t1 has had the weights of step 1 to publish for 1 m 30 s")


def test_claims_of_an_asynchronous_run_wait_for_the_step_that_they_are_ahead_of() -> None:
    harness = rolling(batch_size=1, num_repeat=1, max_staleness=1)
    for task in "ab":
        harness.play(task)
    first, _ = chained(harness)
    assert first.what == "engine main is rolling: the batch of step 2 is complete, and is waiting for step 1"
    assert cause(harness, "trainer t1").startswith("trainer t1 has had step 1 pending")


# ---- the run, the hive and the engine -----------------------------------------------------------------------------


def test_a_run_that_its_trainer_suspended_waits_for_its_operator() -> None:
    harness = rolling()
    suspend(harness)
    later(harness, 60)
    what = cause(harness, "the operator")
    assert what == (
        f"the run of engine main has been suspended for 1 m 00 s: {REASON}; once the cause is gone, `bombus resume` "
        "lets the run continue"
    )
    resume(harness)
    assert harness.engine.suspended == ""


def test_a_run_whose_step_failed_too_often_waits_for_its_operator() -> None:
    harness = trained()
    for _ in range(3):
        break_step(harness)
    assert "step 1 failed 3 times, the last time because: OutOfMemoryError" in cause(harness, "the operator")


def test_a_run_that_did_not_boot_in_time_waits_for_its_operator() -> None:
    harness = booting()
    later(harness, 61)
    assert "booting took longer than 60 s" in cause(harness, "the operator")


def test_a_run_whose_replicas_are_all_quarantined_names_each_of_them() -> None:
    chain_of = chained(suspended_for_want_of_replicas(3))
    assert chain_of[0].what.endswith("`bombus resume` lets all replicas retry immediately")
    assert [link.what.split()[1] for link in chain_of[1:]] == ["r1", "r2", "r3"]
    assert chain_of[-1].who == "replica r1 or r2 or r3, or the operator, with `bombus resume`"


@pytest.mark.parametrize("what", ["calls", "the disk"])
def test_storage_that_is_full_is_the_cause_even_while_episodes_are_open(what: str) -> None:
    harness = rolling()
    harness.claim()
    sees(harness, 95, what)
    later(harness, 20)
    told = cause(harness, "the operator")
    assert told.startswith(
        "no new work has been accepted for 20 s: Storage is nearly full: only 5 B of 100 B were left of"
    )
    assert what in told


def test_a_full_stream_of_rollout_groups_is_the_cause_of_a_batch_that_waits_for_them() -> None:
    harness = GroupHarness()
    harness.register()
    harness.ask()
    harness.join()
    sees(harness, 95, "trajectories")
    assert "of stream trajectories" in cause(harness, "the operator")


def test_no_coordinator_leads_so_nothing_else_is_the_cause() -> None:
    harness = rolling()
    harness.claim()
    led_ns = harness.now_ns
    later(harness, 3)
    assert chained(harness, led_ns=led_ns)[-1].who == "client c1", "a tick or two may be late"
    later(harness, 42)
    first, last = chained(harness, led_ns=led_ns)
    assert first.what.startswith("engine main is rolling")
    assert last.what == "no coordinator has led for 45 s: nothing is being decided, and no deadline is running"
    assert last.who == "a coordinator"


def test_without_a_leader_the_time_that_a_deadline_has_left_does_not_change() -> None:
    harness = draining()
    later(harness, 20)
    led_ns = harness.now_ns
    harness.now_ns += 600 * SECOND
    assert chained(harness, led_ns=led_ns)[0].until_ns == harness.now_ns + 40 * SECOND


def test_time_without_a_leader_counts_toward_no_deadline() -> None:
    harness = draining()
    later(harness, 20)
    before_ns = harness.now_ns
    harness.now_ns += 30 * SECOND
    alive(harness, "r1", version=0)
    harness.send(inbox.Tick(id=harness.id(), after_ns=before_ns))
    assert "abort it in 39 s unless" in cause(harness, "client c1"), "the tick stands for a second"


def test_an_engine_that_is_offline_says_why_and_what_its_operator_can_do() -> None:
    harness = CoreHarness()
    harness.request(inbox.Start(id="refused", engine=ENGINE))
    assert cause(harness, "the operator").startswith("engine main has not been configured")
    harness.configure(Collection())
    later(harness, 60)
    assert cause(harness, "the operator").startswith("engine main was configured 1 m 00 s ago, and has no run yet")
    harness.send(inbox.Start(id="start", engine=ENGINE))
    harness.send(inbox.Stop(id="stop", engine=ENGINE))
    later(harness, 60)
    assert cause(harness, "the operator").startswith("run 1 of engine main was stopped 1 m 00 s ago")
    harness.send(inbox.Start(id="again", engine=ENGINE))
    harness.send(inbox.EngineBroke(id="broke", engine=ENGINE, run=2, reason="a fault", trainer_epoch=0))
    assert cause(harness, "the operator").startswith("run 2 of engine main failed 0.0 s ago: a fault; ")
    assert cause(harness, "nobody", "main-1") == "run 1 of engine main is not waiting for anything: run 2 followed it"


def test_a_trainer_waits_for_disk_space_and_another_for_a_model_that_it_cannot_load() -> None:
    harness = rolling(batch_size=1, num_repeat=1)
    harness.play("a")
    lacks = inbox.StepBroke(
        id="x", engine=ENGINE, run=1, step=1, trainer_epoch=1, reason="no space left on device", waits=True
    )
    harness.send(lacks)
    later(harness, 20)
    assert cause(harness, "the operator") == (
        "trainer t1 is waiting for disk space, and last tried 20 s ago: no space left on device"
    )
    harness = booting()
    harness.open_trainer()
    harness.send(inbox.StageReached(id="x", engine=ENGINE, run=1, stage=f"{LOAD_FAILED}CUDA out of memory"))
    later(harness, 10)
    what = cause(harness, "trainer t1")
    assert what.startswith("trainer t1 has been trying again to load the model (CUDA out of memory) for 10 s")


def test_an_engine_boots_stage_by_stage_until_a_replica_has_the_first_weights() -> None:
    harness = booting()
    harness.open_trainer()
    stage = "waiting for the tokenizer"
    harness.send(inbox.StageReached(id="x", engine=ENGINE, run=1, stage=stage))
    later(harness, 10)
    assert f"trainer t1 has been {stage} for 10 s" in cause(harness, "trainer t1")
    harness.save_weights(0)
    assert cause(harness, "a replica") == "engine main has no replica"
    alive(harness, "r1")
    later(harness, 20)
    what = cause(harness, "replica r1")
    assert what == "replica r1 has had version 0 to load for 20 s"
    assert chained(harness)[-1].until_ns == harness.now_ns + 30 * SECOND


def test_clients_that_agreed_see_the_sync_for_a_while() -> None:
    harness = rolling(method=Method.ANY_CLIENT_AGREES, agreed_sync_s=6.0)
    harness.play("a")
    harness.request(inbox.AgreeSync(id="x", engine=ENGINE, client="c1"))
    harness.train()
    assert cause(harness, "time") == "the clients that agreed need time to see this phase, which ends in 6.0 s"
    text = render_status(harness.core.hive, now_ns=harness.now_ns)
    assert "\n  engine main has handed out no episodes for 0.0 s: it is waiting until" in text


# ---- multi-model episodes -----------------------------------------------------------------------------------------


def test_a_multi_model_claim_waits_for_the_other_engine_whose_chain_follows() -> None:
    harness = MultiModelHarness()
    (episodes,) = harness.claim_multi_model()
    harness.end_multi_model(episodes)
    broke = inbox.EngineBroke(id="x", engine=SMALL, run=1, reason=REASON, trainer_epoch=1, may_pass=True)
    harness.send(broke)
    _, other, last = chained(harness, BIG)
    assert other.what == "its newest claim was for multi-model episodes with engine small, which is not handing out any"
    assert last.what.startswith(f"the run of engine small has been suspended for 0.0 s: {REASON}")
    assert last.who == "the operator"


def test_a_multi_model_episode_waits_for_the_replicas_of_the_other_engine() -> None:
    harness = MultiModelHarness()
    (episodes,) = harness.claim_multi_model()
    harness.send(inbox.ReplicaLeaves(id="x", engine=SMALL, replica="r1"))
    *_, calls, last = chained(harness, episodes[BIG])
    assert calls.what == "its calls are waiting: no replica of engine small serves a version that it may use"
    assert last.what == "engine small has no replica: replica r1 left 0.0 s ago (stopped)"


# ---- training operations ------------------------------------------------------------------------------------------


def test_an_operation_waits_for_a_model_that_cannot_be_rebuilt() -> None:
    harness = executed(OperationHarness())
    harness.serve()
    say_away(harness, why="its checkpoint is gone")
    harness.operate("4")
    later(harness, 60)
    what = cause(harness, "trainer t1")
    assert what == (
        "no trainer could rebuild model s:train:0 (1 m 00 s ago): its checkpoint is gone; trainers will try again "
        "on their own"
    )
    for _ in range(3):
        rebuild(harness, 2)
        harness.serve()
    say_away(harness)
    assert cause(harness, "the operator").endswith("3 trainers ended; `bombus resume` lets trainers try again")


def test_an_operation_waits_for_a_trainer_that_sleeps_and_then_wakes_up() -> None:
    harness = OperationHarness().serving()
    assert chained(harness) == [], "nothing waits"
    sees(harness, 95, "ops")
    assert "of stream ops" in cause(harness, "the operator")
    sees(harness, 0, "ops")
    rest(harness, asleep=True)
    rests(harness, asleep=True)
    harness.operate("1")
    later(harness, 60)
    what = cause(harness, "the client that sends /wake_up")
    assert what == "the trainer was told to sleep 1 m 00 s ago, and nothing is executed until POST /wake_up"
    rest(harness, asleep=False)
    assert "was told to wake up 0.0 s ago" in cause(harness, "trainer t1")


def test_an_operation_waits_behind_others_of_its_model_and_of_other_models() -> None:
    harness = OperationHarness().serving()
    harness.create("s:train:1")
    for key in "12":
        harness.operate(key)
    later(harness, 60)
    first, last = chained(harness)
    assert first.what == "engine main has 3 training operations of 2 models waiting, the first for 1 m 00 s"
    assert last.what.startswith("trainer t1 has had operation 1 (create_model) of model s:train:1 pending for 1 m 00 s")
    behind, turn, last = chained(harness, MODEL)
    assert behind.what == (
        "operation 3 (forward_backward) of model s:train:0 has waited for 1 m 00 s, behind operation 2 "
        "(forward_backward)"
    )
    assert turn.what == (
        "operation 2 (forward_backward) of model s:train:0 is waiting for its turn, after operation 1 (create_model) "
        "of model s:train:1"
    )
    assert last.who == "trainer t1"


def test_an_operation_waits_for_a_model_that_is_rebuilt() -> None:
    harness = executed(OperationHarness())
    harness.serve()
    rebuild(harness)
    rebuild(harness, 3)
    harness.operate("4")
    later(harness, 60)
    what = cause(harness, "trainer t1")
    assert what == "trainer t1 has been rebuilding model s:train:0 for 1 m 00 s, and is executing operation 3 again"


def test_an_operation_waits_for_a_trainer_after_the_last_one_was_lost() -> None:
    harness = OperationHarness().serving()
    harness.operate("1")
    harness.send(inbox.TrainerHangs(id="x", engine=ENGINE, run=1, trainer_epoch=1, doing="forward", still_s=60.0))
    assert cause(harness, "a trainer") == "no trainer for 0.0 s: t1 made no progress at forward for 1 m 00 s"


# ---- rollout groups -----------------------------------------------------------------------------------------------


def test_a_batch_waits_for_rollout_groups_of_its_environments() -> None:
    harness = GroupHarness()
    harness.register()
    assert cause(harness, "the outside trainer") == (
        "environments cannot join before the outside trainer asks for its first batch"
    )
    harness.ask()
    assert cause(harness, "an environment") == "no environment is connected"
    environment = harness.join()
    harness.push(harness.group(environment))
    later(harness, 60)
    first, _ = chained(harness)
    assert first.what == "engine main has waited for 1 m 00 s for a batch: 2 of 4 sequences are queued"
    assert cause(harness, "environment 0 (gsm_0)") == (
        "environment 0 (gsm_0) last joined or pushed a group 1 m 00 s ago"
    )


def test_rollout_groups_that_do_not_fit_together_make_no_batch() -> None:
    harness = GroupHarness()
    harness.register()
    harness.ask()
    environment = harness.join(group_size=3)
    harness.push(harness.group(environment, 3), harness.group(environment, 3))
    assert "no selection of them has exactly 4 sequences" in cause(harness, "environment 0 (gsm_0)")


def test_a_batch_that_was_handed_out_and_not_delivered_waits_for_the_outside_trainer() -> None:
    harness = GroupHarness()
    harness.register()
    harness.push(harness.group(), harness.group())
    assert "for the outside trainer to ask for a batch; one is complete" in cause(harness, "the outside trainer")
    assert harness.ask() == 1
    later(harness, 60)
    assert cause(harness, "the outside trainer") == (
        "batch 1 of engine main was handed out 1 m 00 s ago, but was not delivered: the next request will get it again"
    )
    harness.arrived(1)
    assert cause(harness, "an environment") == "no environment is connected"


def test_a_run_of_rollout_groups_waits_for_our_own_trainer_and_ends_after_its_last_step() -> None:
    harness = TrainedHarness()
    harness.roll(num_steps=1)
    assert "no environment is connected" in cause(harness, "an environment")
    harness.push_batch()
    assert cause(harness, "trainer t1").startswith("trainer t1 has had step 1 pending")
    harness.train()
    assert "has made its last step, 1 (num_steps)" in cause(harness, "a client that registers again")


def test_a_run_that_makes_groups_of_episodes_waits_for_its_clients() -> None:
    harness = GroupsHarness()
    harness.roll()
    harness.claim("slow")
    assert "aborted as idle" in cause(harness, "client slow")


# ---- names --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["other", "main-2", "main-0", "main-1-99", "main-1-x", "main-2-1", "", "s:train:9"])
def test_there_is_no_chain_for_what_does_not_exist(name: str) -> None:
    harness = rolling()
    harness.claim()
    assert chain(harness.core.hive, harness.now_ns, LastEvents(), name) is None
    assert chain(Hive(), 0, LastEvents(), name) is None


def test_a_chain_needs_no_events_before_a_snapshot() -> None:
    for harness in (draining(), holding(), syncing(), booting(), trained(), suspended_for_want_of_replicas()):
        found = chain(harness.core.hive, harness.now_ns, LastEvents(), ENGINE)
        assert found
        assert found[-1].what


def random_logs() -> Iterator[list[Event]]:
    for seed in range(effort(100, 1000)):
        yield [logged.event for logged in run(seed).log]
    for seed in range(effort(OPERATING, 20 * OPERATING)):  # hives of all kinds
        messages = simulate(seed).server.streams[EVENTS_STREAM].messages
        yield [message.event for message in messages]


def test_whatever_happens_all_wait_for_somebody_in_whole_sentences() -> None:
    """At every position of random logs, whose leaders die."""
    for log in random_logs():
        hive, last = Hive(), LastEvents()
        for event in log:
            evolve(hive, event)
            last.note(event)  # type: ignore[arg-type]
            engine = hive.engine(event.engine)
            for name in (engine.name, *engine.open, *engine.clients.models) if engine.name in hive.engines else ():
                found = chain(hive, hive.now_ns + SECOND, last, name)
                assert found or engine.clients_take_episodes, f"{name} waits for nothing in {engine.phase}"
                for link in found or ():
                    assert link.who, link
                    assert not re.search(r"  |[;,:]$|for$|^\W", link.what), link
