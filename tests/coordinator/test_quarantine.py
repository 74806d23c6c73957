"""A replica that cannot load harms nobody but itself; a run without any other waits for one."""

from bombus.errors import Code
from bombus.hive import events as ev
from bombus.hive import inbox
from bombus.hive.fold.evolve import evolve
from bombus.hive.pacing import fitting
from bombus.hive.state import EngineState, Hive, Phase, Replica
from bombus.hive.status.data import engine_status
from bombus.hive.status.detail import detail_of
from bombus.hive.status.text import render_status
from tests.coordinator.core_in_memory import ENGINE, CoreHarness

NO_MOUNT = "no weights at /shared/version-1: No such file or directory"


def alive(harness: CoreHarness, replica: str, version: int = -1) -> list[ev.AnyEvent]:
    message = inbox.ReplicaAlive(
        id=harness.id(), engine=ENGINE, replica=replica, url=f"http://{replica}", run=harness.engine.run,
        version=version,
    )  # fmt: skip
    return harness.send(message)


def cannot_load(
    harness: CoreHarness, replica: str, version: int | None = None, why: str = NO_MOUNT
) -> list[ev.AnyEvent]:
    message = inbox.LoadBroke(
        id=harness.id(), engine=ENGINE, run=harness.engine.run, replica=replica, reason=why,
        version=harness.engine.version if version is None else version,
    )  # fmt: skip
    return harness.send(message)


def resume(harness: CoreHarness) -> list[ev.AnyEvent]:
    return harness.send(inbox.Resume(id=harness.id(), engine=ENGINE))


def rolling(replicas: int = 3, **rules: object) -> CoreHarness:
    """Return a hive that rolls on version 0, which all of its replicas r1, r2, ... serve."""
    harness = CoreHarness()
    harness.boot(batch_size=1, num_repeat=2, **rules)  # type: ignore[arg-type]
    for number in range(2, replicas + 1):
        alive(harness, f"r{number}", version=0)
    return harness


def train(harness: CoreHarness) -> None:
    """Make a step and publish its version, which nobody has loaded yet."""
    for reward in (0.0, 1.0):
        harness.play(f"t{harness.engine.step}", reward)
    step = harness.engine.step
    harness.step_done(step)
    harness.save_weights(step)


def quarantined(engine: EngineState) -> dict[str, str]:
    return {name: one.quarantined.reason for name, one in engine.replicas.items() if one.quarantined is not None}


def suspended_for_want_of_replicas(replicas: int = 1) -> CoreHarness:
    harness = rolling(replicas)
    train(harness)
    for number in range(1, replicas + 1):
        cannot_load(harness, f"r{number}")
    assert harness.engine.suspended
    return harness


# ---- one of several -------------------------------------------------------------------------------------------


def test_a_replica_that_cannot_load_is_quarantined_and_the_run_goes_on_with_the_others() -> None:
    """One message of it ended the run of all others."""
    harness = rolling()
    train(harness)
    harness.load(1, "r1")
    (event,) = cannot_load(harness, "r3")
    assert event == ev.ReplicaQuarantined(
        at_ns=harness.now_ns, engine=ENGINE, run=1, version=1, replica="r3", reason=NO_MOUNT
    )
    assert harness.phase() == Phase.WEIGHT_SYNCING, "r2 is still loading"
    harness.load(1, "r2")
    assert (harness.phase(), harness.engine.suspended) == (Phase.ROLLING, "")
    assert list(fitting(harness.engine)) == ["r1", "r2"]
    train(harness)
    harness.load(2, "r1")
    harness.load(2, "r2")
    assert harness.phase() == Phase.ROLLING, "nothing waits for it"


def test_a_replica_that_cannot_load_does_not_hold_up_the_boot() -> None:
    harness = CoreHarness()
    harness.configure(ev.Collection())
    harness.send(inbox.Start(id="s", engine=ENGINE))
    alive(harness, "r1")
    alive(harness, "r2")
    harness.open_trainer()
    harness.save_weights(0)
    cannot_load(harness, "r2")
    harness.load(0, "r1")
    assert harness.phase() == Phase.ROLLING


def test_a_replica_that_joins_while_others_load_is_not_waited_for() -> None:
    """One that dies in each load and is started again held up every boot and every sync."""
    harness = CoreHarness()
    harness.configure(ev.Collection(batch_size=1, num_repeat=2))
    harness.send(inbox.Start(id="s", engine=ENGINE))
    alive(harness, "r1")
    harness.open_trainer()
    harness.save_weights(0)
    harness.tick()
    alive(harness, "dies")
    harness.load(0)
    assert harness.phase() == Phase.ROLLING
    train(harness)
    harness.send(inbox.ReplicaLeaves(id="killed", engine=ENGINE, replica="dies"))
    harness.tick()
    alive(harness, "dies")
    harness.load(1)
    assert harness.phase() == Phase.ROLLING


def test_the_last_report_that_a_sync_waits_for_ends_it() -> None:
    harness = rolling()
    train(harness)
    harness.load(1, "r1")
    harness.load(1, "r2")
    assert harness.phase() == Phase.WEIGHT_SYNCING
    assert isinstance(cannot_load(harness, "r3")[-1], ev.RollingStarted)


def test_a_quarantined_replica_is_released_when_it_has_loaded() -> None:
    harness = rolling()
    train(harness)
    harness.load(1, "r1")
    cannot_load(harness, "r3")
    harness.load(1, "r2")
    (loaded,) = alive(harness, "r3", version=1)
    assert isinstance(loaded, ev.WeightsLoaded)
    assert quarantined(harness.engine) == {}
    assert list(fitting(harness.engine)) == ["r1", "r2", "r3"]
    train(harness)
    harness.load(2, "r1")
    harness.load(2, "r2")
    assert harness.phase() == Phase.WEIGHT_SYNCING, "it is waited for again"


def test_the_heartbeat_of_a_replica_that_serves_older_weights_does_not_release_it() -> None:
    harness = rolling(max_staleness=1)
    train(harness)
    harness.load(1, "r1")
    cannot_load(harness, "r3")
    assert list(fitting(harness.engine)) == ["r1", "r2"], "it gets no calls, though version 0 is not too old"
    assert alive(harness, "r3", version=0) == []
    assert list(quarantined(harness.engine)) == ["r3"]


def test_a_report_that_is_out_of_date_quarantines_nobody() -> None:
    harness = rolling()
    train(harness)
    assert cannot_load(harness, "r1", version=0) == [], "newer weights are to be loaded"
    harness.load(1, "r1")
    assert cannot_load(harness, "r1") == [], "it serves them: the report comes late"
    assert cannot_load(harness, "nobody") == []
    harness.send(inbox.Stop(id="stop", engine=ENGINE))
    assert cannot_load(harness, "r2") == []


def test_a_repeated_report_says_nothing_new_and_another_reason_replaces_the_first() -> None:
    harness = rolling()
    train(harness)
    assert len(cannot_load(harness, "r3")) == 1
    assert cannot_load(harness, "r3") == []
    assert len(cannot_load(harness, "r3", why="CUDA out of memory")) == 1
    assert quarantined(harness.engine) == {"r3": "CUDA out of memory"}


def test_a_replica_that_leaves_or_lapses_takes_its_quarantine_with_it() -> None:
    harness = rolling()
    train(harness)
    for name in ("r2", "r3"):
        cannot_load(harness, name)
    harness.send(inbox.ReplicaLeaves(id="leaves", engine=ENGINE, replica="r2"))
    alive(harness, "r2")
    assert list(quarantined(harness.engine)) == ["r3"]
    harness.tick(after_s=11)
    alive(harness, "r3")
    assert quarantined(harness.engine) == {}


def test_a_new_run_begins_without_quarantines() -> None:
    harness = rolling()
    train(harness)
    cannot_load(harness, "r3")
    harness.send(inbox.Stop(id="stop", engine=ENGINE))
    harness.send(inbox.Start(id="start", engine=ENGINE))
    assert quarantined(harness.engine) == {}


def test_a_replica_of_an_older_version_can_suspend_a_run_but_not_end_it() -> None:
    """Only trainers end runs, and they name their epoch. Replicas reported in the same way before, without one."""
    harness = rolling()
    harness.send(inbox.EngineBroke(id="b", engine=ENGINE, run=1, reason="replica r9 cannot load version 0: no mount"))
    assert harness.phase() == Phase.ROLLING
    assert harness.engine.suspended == "replica r9 cannot load version 0: no mount"


# ---- one that does not end its load ---------------------------------------------------------------------------


def test_r15_a_replica_that_hangs_in_a_load_holds_up_one_sync_and_no_other() -> None:
    harness = rolling(sync_s=30.0)
    train(harness)
    harness.load(1, "r1")
    harness.load(1, "r2")
    for _ in range(4):
        harness.tick(after_s=7)
        for name, version in (("r1", 1), ("r2", 1), ("r3", -1)):
            alive(harness, name, version)
    assert harness.phase() == Phase.WEIGHT_SYNCING
    late, rolls = harness.tick(after_s=2)
    assert isinstance(late, ev.ReplicaQuarantined)
    assert (late.replica, late.reason) == ("r3", "not loaded within 30 s")
    assert isinstance(rolls, ev.RollingStarted)
    train(harness)
    harness.load(2, "r1")
    harness.load(2, "r2")
    assert harness.phase() == Phase.ROLLING


def test_a_sync_in_which_no_replica_loads_in_time_says_so_and_goes_on_when_one_does() -> None:
    harness = rolling(replicas=1, sync_s=5.0)
    train(harness)
    harness.tick(after_s=6)
    assert harness.engine.suspended == "no replica can serve version 1. r1: not loaded within 5 s"
    assert [type(event) for event in harness.load(1)] == [ev.WeightsLoaded, ev.EngineResumed, ev.RollingStarted]


def test_a_boot_whose_replicas_are_slow_has_its_own_deadline() -> None:
    harness = CoreHarness()
    harness.configure(ev.Collection(sync_s=5.0, boot_s=60.0))
    harness.send(inbox.Start(id="s", engine=ENGINE))
    alive(harness, "r1")
    harness.open_trainer()
    harness.save_weights(0)
    assert harness.tick(after_s=6) == []


def test_a_replica_that_has_just_joined_has_time_to_load() -> None:
    harness = rolling(replicas=1, sync_s=5.0)
    harness.tick(after_s=9)
    alive(harness, "r1", version=0)
    alive(harness, "late")
    assert harness.tick(after_s=4) == []
    late = harness.tick(after_s=2)[0]
    assert isinstance(late, ev.ReplicaQuarantined)
    assert late.replica == "late"


def test_the_canary_of_a_version_and_what_replicas_found_of_it_are_on_the_log() -> None:
    harness = rolling(replicas=1)
    for reward in (0.0, 1.0):
        harness.play("t", reward)
    harness.step_done(1)
    canary = ev.Canary(logprobs=(-1.0, -2.0), dtype="float32", bits="ab")
    saved = inbox.WeightsSaved(
        id=harness.id(), engine=ENGINE, run=harness.engine.run, step=1, trainer_epoch=harness.engine.trainer_epoch,
        weights=ev.Weights(where="/weights/1"), canary=canary,
    )  # fmt: skip
    harness.send(saved)
    assert harness.engine.weights is not None
    assert harness.engine.weights.canary == canary
    cannot_load(harness, "r1", why="its weights are not those of version 1 at the trainer")
    assert list(quarantined(harness.engine)) == ["r1"]
    check = ev.CanaryCheck(difference=1e-6, limit=1e-4)
    loaded = inbox.ReplicaAlive(
        id=harness.id(), engine=ENGINE, replica="r1", url="http://r1", run=harness.engine.run, version=1, canary=check
    )
    (event,) = [each for each in harness.send(loaded) if isinstance(each, ev.WeightsLoaded)]
    assert event.canary == harness.engine.replicas["r1"].canary == check
    assert not quarantined(harness.engine)


# ---- none is left ---------------------------------------------------------------------------------------------


def test_a_run_is_suspended_only_when_every_replica_is_quarantined_and_keeps_all_it_has() -> None:
    harness = rolling(replicas=2)
    (episode,) = harness.claim()
    alive(harness, "r3")
    harness.send(inbox.ReplicaLeaves(id="l1", engine=ENGINE, replica="r1"))
    cannot_load(harness, "r3")
    assert harness.engine.suspended == "", "r2 serves"
    (left, suspended) = harness.send(inbox.ReplicaLeaves(id="l2", engine=ENGINE, replica="r2"))
    assert isinstance(left, ev.ReplicaLeft)
    reason = f"no replica can serve version 0. r3: {NO_MOUNT}"
    assert suspended == ev.EngineSuspended(at_ns=harness.now_ns, engine=ENGINE, run=1, reason=reason, until_served=True)
    assert (harness.phase(), list(harness.engine.open)) == (Phase.ROLLING, [episode])
    assert harness.tick() == []


def test_a_hive_without_any_replica_is_not_suspended_as_one_may_be_restarting() -> None:
    harness = rolling(replicas=1)
    harness.send(inbox.ReplicaLeaves(id="l1", engine=ENGINE, replica="r1"))
    assert harness.engine.suspended == ""


def test_a_replica_that_failed_at_older_weights_is_asked_for_the_newest_before_the_run_is_suspended() -> None:
    harness = rolling(replicas=2)
    train(harness)
    cannot_load(harness, "r2")
    harness.load(1, "r1")
    train(harness)
    cannot_load(harness, "r1")
    assert harness.engine.suspended == "", "r2 may load version 2"
    cannot_load(harness, "r2")
    assert harness.engine.suspended == f"no replica can serve version 2. r1: {NO_MOUNT}; r2: {NO_MOUNT}"


def test_one_that_hangs_since_older_weights_does_not_keep_the_run_from_being_suspended() -> None:
    harness = rolling(replicas=2, sync_s=5.0)
    train(harness)
    cannot_load(harness, "r2")
    harness.load(1, "r1")
    train(harness)
    cannot_load(harness, "r1")
    harness.tick(after_s=6)
    assert harness.engine.suspended


def test_a_suspended_run_goes_on_by_itself_when_a_replica_serves_its_weights() -> None:
    harness = suspended_for_want_of_replicas(replicas=2)
    loaded, resumed, rolls = harness.load(1, "r2")
    assert isinstance(loaded, ev.WeightsLoaded)
    assert resumed == ev.EngineResumed(at_ns=harness.now_ns, engine=ENGINE, run=1)
    assert isinstance(rolls, ev.RollingStarted)
    assert list(quarantined(harness.engine)) == ["r1"]


def test_a_new_replica_that_loads_lets_a_suspended_run_go_on_and_one_that_only_joins_does_not() -> None:
    harness = suspended_for_want_of_replicas()
    alive(harness, "new")
    assert harness.engine.suspended
    harness.load(1, "new")
    assert (harness.engine.suspended, harness.phase()) == ("", Phase.ROLLING)


def test_a_run_that_its_trainer_has_suspended_is_not_resumed_by_a_replica() -> None:
    harness = rolling(replicas=1)
    train(harness)
    harness.send(
        inbox.EngineBroke(id="b", engine=ENGINE, run=1, reason="CUDA out of memory", trainer_epoch=1, may_pass=True)
    )
    assert [type(event) for event in harness.load(1)] == [ev.WeightsLoaded]
    assert harness.engine.suspended == "CUDA out of memory"


def test_resume_releases_all_replicas_and_the_run_is_suspended_again_when_they_fail_again() -> None:
    harness = suspended_for_want_of_replicas(replicas=2)
    (resumed,) = resume(harness)
    assert isinstance(resumed, ev.EngineResumed)
    assert quarantined(harness.engine) == {}
    assert harness.phase() == Phase.WEIGHT_SYNCING
    cannot_load(harness, "r1")
    assert harness.engine.suspended == ""
    cannot_load(harness, "r2")
    assert harness.engine.suspended
    assert harness.engine.suspensions == 2


def test_a_crash_between_the_quarantine_and_the_suspension_leaves_it_to_the_next_leader() -> None:
    harness = rolling(replicas=1)
    train(harness)
    hive = harness.core.hive
    evolve(hive, ev.ReplicaQuarantined(engine=ENGINE, run=1, version=1, replica="r1", reason=NO_MOUNT))
    (decision,) = harness.core.recover()
    assert isinstance(decision.events[0], ev.EngineSuspended)


# ---- what is shown --------------------------------------------------------------------------------------------


def test_the_status_names_a_quarantined_replica_with_its_reason() -> None:
    harness = rolling()
    train(harness)
    cannot_load(harness, "r3")
    why = f"it cannot load version 1: {NO_MOUNT}"
    status = engine_status(harness.engine, harness.now_ns)
    assert [(row.replica, row.quarantined) for row in status.replicas] == [("r1", ""), ("r2", ""), ("r3", why)]
    assert detail_of(harness.engine, harness.now_ns) == "loading version 1: 0 of 2 replicas, 1 quarantined"
    text = render_status(harness.core.hive, ENGINE, harness.now_ns)
    assert "replicas: 3, 1 of them quarantined\n" in text
    assert f"  r3 http://r3 version 0\n    quarantined: {why}\n" in text


def test_the_status_and_refusals_say_what_lets_the_run_go_on() -> None:
    harness = suspended_for_want_of_replicas()
    text = render_status(harness.core.hive, ENGINE, harness.now_ns)
    assert "resumes once a replica serves its weights; `bombus resume` lets all replicas retry immediately" in text
    refused = harness.request(harness.claim_message())
    assert isinstance(refused, inbox.Refusal)
    assert refused.code == Code.WRONG_PHASE
    assert "The run is suspended until a replica serves its weights: no replica can serve version 1." in refused.why


def test_a_log_may_quarantine_a_replica_that_it_does_not_know() -> None:
    hive = Hive(engines={ENGINE: EngineState(name=ENGINE, replicas={"r1": Replica(url="u", capacity=1, joined_ns=0)})})
    evolve(hive, ev.ReplicaQuarantined(engine=ENGINE, run=1, version=0, replica="other", reason="x"))
    assert quarantined(hive.engine(ENGINE)) == {}


# ---- killed and back before anybody misses it -----------------------------------------------------------------


def test_a_replica_that_was_killed_and_came_back_at_once_is_no_longer_taken_for_one_that_serves() -> None:
    """It came back under its name and address before it lapsed, so it stayed loaded and could not be quarantined."""
    harness = rolling(replicas=2)
    (joined,) = alive(harness, "r2")
    assert isinstance(joined, ev.ReplicaJoined)
    assert list(fitting(harness.engine)) == ["r1"]
    assert alive(harness, "r2") == [], "once is enough"
    cannot_load(harness, "r2")
    assert quarantined(harness.engine) == {"r2": NO_MOUNT}
    (loaded,) = alive(harness, "r2", version=0)
    assert isinstance(loaded, ev.WeightsLoaded)
    assert list(fitting(harness.engine)) == ["r1", "r2"]


def test_the_only_replica_that_was_killed_and_cannot_load_again_suspends_the_run() -> None:
    harness = rolling(replicas=1)
    alive(harness, "r1")
    cannot_load(harness, "r1")
    assert harness.engine.until_served
    assert NO_MOUNT in harness.engine.suspended


def test_a_replica_of_an_asynchronous_run_that_was_killed_gets_no_calls_for_its_older_version() -> None:
    harness = rolling(replicas=2, max_staleness=1)
    train(harness)
    harness.load(1, "r1")
    assert list(fitting(harness.engine)) == ["r1", "r2"], "r2 serves version 0"
    (joined,) = alive(harness, "r2")
    assert isinstance(joined, ev.ReplicaJoined)
    assert list(fitting(harness.engine)) == ["r1"]


def test_a_replica_that_has_dropped_its_weights_joins_no_second_time() -> None:
    harness = rolling(replicas=2)
    train(harness)
    assert alive(harness, "r1") == [], "it makes room for the next version"
    harness.send(inbox.Stop(id="stop", engine=ENGINE))
    assert alive(harness, "r2") == [], "nothing is to be served"


def test_a_quarantined_replica_that_has_lost_its_older_version_stays_in_quarantine() -> None:
    harness = rolling(replicas=2, max_staleness=1)
    train(harness)
    cannot_load(harness, "r2")
    assert alive(harness, "r2") == []
    assert list(quarantined(harness.engine)) == ["r2"]


def test_a_replica_with_wrong_answers_serves_again_with_other_weights_or_when_it_starts_anew() -> None:
    harness = rolling(replicas=2)

    def answers_wrongly(replica: str, version: int) -> list[ev.AnyEvent]:
        why = "the logprob nan"
        return harness.send(
            inbox.AnswersBroke(
                id=harness.id(), engine=ENGINE, run=harness.engine.run, version=version, replica=replica, reason=why
            )
        )

    assert answers_wrongly("r1", version=-1) == [], "what is said of earlier weights is out of date"
    (event,) = answers_wrongly("r1", version=0)
    assert isinstance(event, ev.ReplicaQuarantined)
    assert list(fitting(harness.engine)) == ["r2"]
    assert alive(harness, "r1", version=0) == [], "it still serves the weights that its answers are wrong with"
    assert answers_wrongly("r1", version=0) == []
    (status,) = [one for one in engine_status(harness.engine, harness.now_ns).replicas if one.replica == "r1"]
    assert status.quarantined == "its answers are wrong at version 0: the logprob nan"
    alive(harness, "r1", version=-1)
    alive(harness, "r1", version=0)
    assert sorted(fitting(harness.engine)) == ["r1", "r2"]
    answers_wrongly("r1", version=0)
    train(harness)
    alive(harness, "r1", version=1)
    assert quarantined(harness.engine) == {}


def test_a_run_whose_only_replica_answers_wrongly_waits_until_it_starts_anew() -> None:
    harness = rolling(replicas=1)
    why = "the logprob nan"
    harness.send(inbox.AnswersBroke(id=harness.id(), engine=ENGINE, run=1, version=0, replica="r1", reason=why))
    assert harness.engine.suspended == "no replica can serve version 0. r1: the logprob nan"
    alive(harness, "r1", version=0)
    assert harness.engine.suspended
    alive(harness, "r1", version=-1)
    alive(harness, "r1", version=0)
    assert not harness.engine.suspended
