"""A run of training operations in the core: how it starts, serves and ends, and what of `ops` it releases."""

import msgspec

from bombus.errors import Code
from bombus.hive import events as ev
from bombus.hive import inbox
from bombus.hive.events import Collection, ModelEnd, ModelFloor
from bombus.hive.fold.evolve import evolve
from bombus.hive.inbox import Accepted, AnyAnswer
from bombus.hive.records import BodyRef
from bombus.hive.state import Phase
from bombus.hive.status.text import render_status
from bombus_coordinator.core import Core
from tests.coordinator.core_in_memory import ENGINE, SECOND, CoreHarness
from tests.coordinator.operations_in_memory import BASE, MODEL, OperationHarness
from tests.coordinator.test_suspending import refused, suspend


def stored(harness: OperationHarness, below: int, overfull: bool = False) -> list[ev.AnyEvent]:
    return harness.send(inbox.OperationsStored(id=harness.id(), below=below, overfull=overfull))


def test_the_first_model_starts_a_run_on_an_engine_that_is_offline() -> None:
    harness = OperationHarness()
    harness.open_session()
    assert harness.create() == Accepted(run=1, operation=f"{MODEL}:0", number=1)
    assert harness.kinds()[-3:] == ["engine.started", "model.opened", "operation.accepted"]
    assert harness.phase() == Phase.BOOTING
    assert harness.engine.serves_operations
    assert harness.engine.started is not None
    assert harness.engine.started.base == BASE


def test_it_rolls_once_its_trainer_has_loaded_the_base_without_any_replica() -> None:
    harness = OperationHarness()
    harness.open_session()
    harness.create()
    epoch = harness.open_trainer()
    assert harness.phase() == Phase.BOOTING
    old = inbox.TrainerServes(id=harness.id(), engine=ENGINE, run=1, trainer_epoch=epoch - 1)
    assert harness.send(old) == []
    serves = inbox.TrainerServes(id=harness.id(), engine=ENGINE, run=1, trainer_epoch=epoch)
    assert [ev.kind_of(event) for event in harness.send(serves)] == ["engine.booted", "rolling.started"]
    assert harness.phase() == Phase.ROLLING
    assert harness.send(serves) == []


def test_a_leader_that_dies_between_the_boot_and_rolling_leaves_the_rest_to_the_next() -> None:
    harness = OperationHarness()
    harness.open_session()
    harness.create()
    harness.open_trainer()
    evolve(harness.core.hive, ev.EngineBooted(at_ns=harness.now_ns, engine=ENGINE, run=1))
    (rolling,) = [event for decision in Core(harness.core.hive).recover() for event in decision.events]
    assert isinstance(rolling, ev.RollingStarted)
    assert harness.phase() == Phase.ROLLING


def test_the_rules_of_episodes_leave_such_a_run_alone() -> None:
    harness = OperationHarness().serving()
    harness.send(inbox.ReplicaAlive(id=harness.id(), engine=ENGINE, replica="r1", url="http://r1"))
    for _ in range(20):
        assert harness.tick(after_s=9) == []
        harness.send(inbox.ReplicaAlive(id=harness.id(), engine=ENGINE, replica="r1", url="http://r1"))
    assert harness.phase() == Phase.ROLLING
    assert harness.engine.batch is None


def test_its_base_is_version_0_whose_replicas_are_listed_while_no_phase_changes() -> None:
    harness = OperationHarness().serving()
    harness.send(inbox.ReplicaAlive(id=harness.id(), engine=ENGINE, replica="r1", url="http://r1"))
    assert [ev.kind_of(event) for event in harness.save_weights(0)] == ["weights.ready"]
    assert harness.save_weights(0) == [], "it never changes"
    assert harness.save_weights(1) == []
    loaded = inbox.WeightsLoadedFact(id=harness.id(), engine=ENGINE, run=1, version=0, replica="r1")
    assert [ev.kind_of(event) for event in harness.send(loaded)] == ["weights.loaded"]
    assert harness.engine.replicas["r1"].version == 0
    assert (harness.phase(), harness.engine.step, harness.engine.batch) == (Phase.ROLLING, 0, None)
    assert not harness.engine.owes_weights


def test_a_replica_that_cannot_load_its_base_suspends_no_run_of_operations() -> None:
    harness = OperationHarness()
    harness.open_session()
    harness.create()
    harness.send(inbox.ReplicaAlive(id=harness.id(), engine=ENGINE, replica="r1", url="http://r1"))
    epoch = harness.open_trainer()
    harness.save_weights(0)
    harness.send(inbox.TrainerServes(id=harness.id(), engine=ENGINE, run=1, trainer_epoch=epoch))
    broke = inbox.LoadBroke(id=harness.id(), engine=ENGINE, run=1, version=0, replica="r1", reason="no disk")
    assert [ev.kind_of(event) for event in harness.send(broke)] == ["replica.quarantined"]
    assert not harness.engine.suspended


def test_claims_and_votes_there_are_refused_in_words() -> None:
    harness = OperationHarness().serving()
    why = refused(harness.request(harness.claim_message(wait_s=2.0)), Code.UNSUPPORTED)
    assert why.startswith("Run 1 of engine main serves training operations: say which of its saved models")
    refused(harness.request(inbox.AgreeSync(id=harness.id(), engine=ENGINE, client="c1")), Code.UNSUPPORTED)
    refused(harness.request(inbox.Start(id=harness.id(), engine=ENGINE)), Code.WRONG_PHASE)
    refused(harness.configure(Collection()), Code.WRONG_PHASE)


def test_an_engine_that_plays_episodes_takes_no_model() -> None:
    harness = OperationHarness()
    harness.boot()
    harness.open_session()
    why = refused(harness.create(), Code.WRONG_PHASE)
    assert why.endswith("Engine main plays episodes in run 1; stop it first, or use another engine.")
    assert harness.engine.run == 1


def test_it_ends_by_itself_some_time_after_its_last_model_has_ended() -> None:
    harness = OperationHarness().serving()
    assert harness.tick(after_s=301) == []
    harness.operate("1", "end_model")
    harness.done("1", closes=True)
    assert harness.tick(after_s=299) == []
    (stopped,) = harness.tick(after_s=1)
    assert stopped == ev.EngineStopped(at_ns=harness.now_ns, engine=ENGINE, run=1)
    assert harness.create(MODEL + "2") == Accepted(run=2, operation=f"{MODEL}2:0", number=1)


def begin_sampling(harness: OperationHarness, base: str = BASE, session: str = "s") -> AnyAnswer:
    return harness.request(inbox.BeginSampling(id=harness.id(), engine=ENGINE, session=session, base=base))


def test_a_session_that_samples_starts_a_run_without_any_model_which_goes_on_until_the_session_has_ended() -> None:
    harness = OperationHarness()
    harness.open_session(idle_s=7 * 24 * 3600.0)
    assert begin_sampling(harness) == inbox.Done(run=1)
    assert harness.kinds()[-2:] == ["engine.started", "sampling.begun"]
    events = len(harness.log)
    assert begin_sampling(harness) == inbox.Done(run=1)
    assert harness.log[events:] == [], "a repeat changes nothing"
    harness.serve()
    assert harness.phase() == Phase.ROLLING
    assert harness.tick(after_s=6 * 24 * 3600.0) == []
    harness.create()
    assert harness.engine.run == 1, "a model joins it"
    harness.done("0")
    harness.operate("1", "end_model")
    harness.done("1", closes=True)
    assert harness.tick(after_s=3600) == []
    harness.close_session()
    assert harness.tick(after_s=299) == []
    assert [ev.kind_of(event) for event in harness.tick(after_s=1)] == ["engine.stopped"]
    harness.open_session("t")
    assert harness.phase() == Phase.OFFLINE
    begin_sampling(harness, session="t")
    assert (harness.engine.run, harness.clients.sessions["t"].samples_in) == (2, 2)


def test_a_session_samples_where_models_could_be_made_and_elsewhere_that_is_refused_in_words() -> None:
    harness = OperationHarness()
    assert refused(begin_sampling(harness), Code.SESSION_OVER)
    harness.open_session()
    assert refused(begin_sampling(harness, base=""), Code.MALFORMED)
    assert refused(begin_sampling(harness, base="x" * 1001), Code.MALFORMED)
    begin_sampling(harness)
    assert refused(begin_sampling(harness, base="another"), Code.UNKNOWN_MODEL)
    assert refused(harness.create(base="another"), Code.UNKNOWN_MODEL)
    harness.close_session()
    assert refused(begin_sampling(harness), Code.SESSION_OVER)
    episodes = OperationHarness()
    episodes.boot()
    episodes.open_session()
    assert refused(begin_sampling(episodes), Code.WRONG_PHASE)


def test_a_run_that_is_stopped_or_fails_tells_every_operation_that_waits() -> None:
    harness = OperationHarness().serving()
    harness.operate("1")
    harness.done("1")
    harness.operate("2")
    harness.send(inbox.Stop(id=harness.id(), engine=ENGINE))
    assert harness.op("2").error.startswith("the run was stopped; create the model again")
    assert harness.op("1").result is not None
    assert harness.model.closed is not None
    assert harness.model.closed.reason == ModelEnd.RUN_OVER
    refused(harness.operate("3"), Code.UNKNOWN_MODEL)
    assert harness.done("2") == []
    harness.operate("again", "create_model", base=BASE)
    epoch = harness.open_trainer()
    harness.send(inbox.EngineBroke(id=harness.id(), engine=ENGINE, run=2, reason="no such model", trainer_epoch=epoch))
    assert harness.op("again").error == "the run has failed: no such model"


def test_a_suspended_run_takes_operations_and_results_and_does_not_end() -> None:
    harness = OperationHarness().serving()
    suspend(harness)
    assert isinstance(harness.operate("1"), Accepted)
    assert len(harness.done("1")) == 1
    assert harness.tick(after_s=1e5) == []


def test_a_boot_that_takes_too_long_suspends_the_run_and_its_operations_wait() -> None:
    harness = OperationHarness()
    harness.open_session()
    harness.create()
    (suspended,) = harness.tick(after_s=1801)
    assert isinstance(suspended, ev.EngineSuspended)
    assert harness.op("0").waits


def test_trainers_that_end_without_a_word_count_only_while_something_waits() -> None:
    harness = OperationHarness().serving()
    for _ in range(30):
        harness.open_trainer()
    assert not harness.engine.suspended
    harness.operate("1")
    for _ in range(21):
        harness.open_trainer()
    assert harness.engine.suspended.startswith(
        "20 trainers in a row ended without reporting an error before they had executed an"
    )


# ---- what is released ---------------------------------------------------------------------------------------------


def test_r17_bodies_stay_until_they_were_executed_and_covered_and_results_until_they_cannot_be_read() -> None:
    harness = OperationHarness().serving()  # the body at 1, its result at 2
    harness.operate("1")  # 3
    harness.done("1")  # 4
    harness.operate("2", passive=True)  # 5
    assert stored(harness, 3) == [], "operation 1 is in no recovery checkpoint"
    harness.checkpoint(2)
    assert stored(harness, 3) == [ev.OperationsReleased(at_ns=harness.now_ns, below=2)], "the result at 2 can be read"
    harness.close_session()
    harness.done("2")  # 6
    harness.done("_end-4", closes=True)  # 7
    harness.tick(after_s=3600)
    assert harness.clients.models == {}
    assert [type(event) for event in stored(harness, 6)] == [ev.OperationsReleased]
    assert harness.core.hive.released == 6, "no further than what has been there for long"
    assert stored(harness, 6) == []


def test_an_operation_whose_body_may_be_purged_is_refused_and_stored_again() -> None:
    harness = OperationHarness().serving()
    late = harness.operate_message("1")  # its body is at 3
    harness.checkpoint(1)
    harness.engine.clients.models[MODEL].operations["0"].result = None
    stored(harness, 4)
    assert harness.core.hive.released == 4
    assert refused(harness.request(late), Code.BODY_GONE).endswith("store it again.")
    assert isinstance(harness.operate("1"), Accepted)
    assert Core(harness.core.hive).live.released == 4, "another leader refuses it too"


def test_an_overfull_stream_is_purged_between_what_idle_models_hold() -> None:
    harness = OperationHarness().serving()  # of which 1 and 2 stay
    harness.create("s:train:1")  # 3
    harness.done("0", "s:train:1")  # 4
    for key in range(1, 4):
        harness.operate(str(key), model="s:train:1")  # 5, 7, 9
        harness.done(str(key), "s:train:1")  # 6, 8, 10
    harness.checkpoint(3, "s:train:1")
    for dropped in ("0", "1"):
        harness.clients.models["s:train:1"].operations[dropped].result = None
    assert stored(harness, 11) == []
    (released,) = stored(harness, 11, overfull=True)
    assert isinstance(released, ev.OperationsReleased)
    assert (released.below, released.models) == (1, (ModelFloor(ENGINE, "s:train:1", 8),))
    assert stored(harness, 11, overfull=True) == []
    late = msgspec.structs.replace(
        harness.operate_message("9", model="s:train:1"), body=BodyRef(seqs=(7,), size=1, digest=b"d" * 16)
    )
    refused(harness.request(late), Code.BODY_GONE)
    (back,) = harness.send(inbox.OperationsStored(id=harness.id(), below=7, shrunk=True))
    assert isinstance(back, ev.OperationsReleased)
    assert (back.below, back.models) == (1, (ModelFloor(ENGINE, "s:train:1", 7),)), "the end of the stream was lost"
    assert isinstance(harness.request(msgspec.structs.replace(late, id=harness.id())), Accepted)


def test_r6_a_stream_that_has_lost_its_end_takes_bodies_at_its_old_sequences_again() -> None:
    harness = OperationHarness()
    stored(harness, 50)
    shrunk = inbox.OperationsStored(id=harness.id(), below=7, shrunk=True)
    assert harness.send(shrunk) == [ev.OperationsReleased(at_ns=harness.now_ns, below=7)]
    assert harness.send(msgspec.structs.replace(shrunk, below=9)) == []
    harness.stored = 7
    harness.serving()
    assert not harness.op("0").error


def test_without_models_everything_old_is_released() -> None:
    harness = OperationHarness()
    assert [type(event) for event in stored(harness, 50)] == [ev.OperationsReleased]
    assert harness.core.hive.released == 50


def test_a_run_of_episodes_has_no_sessions_and_serves_no_operations() -> None:
    harness = CoreHarness()
    harness.boot()
    assert harness.engine.plays_episodes
    assert (harness.engine.clients.sessions, harness.engine.clients.models) == ({}, {})
    assert not harness.engine.serves_operations


# ---- a trainer that rests -----------------------------------------------------------------------------------------


def rest(harness: OperationHarness, asleep: bool) -> inbox.AnyAnswer:
    return harness.request(inbox.AskRest(id=harness.id(), engine=ENGINE, asleep=asleep))


def rests(harness: OperationHarness, asleep: bool, epoch: int | None = None) -> list[str]:
    trainer_epoch = harness.engine.trainer_epoch if epoch is None else epoch
    said = inbox.TrainerRests(
        id=harness.id(), engine=ENGINE, run=harness.engine.run, trainer_epoch=trainer_epoch, asleep=asleep
    )
    return [ev.kind_of(event) for event in harness.send(said)]


def test_a_trainer_sleeps_and_wakes_up_when_it_says_so_and_a_repeat_changes_nothing() -> None:
    harness = OperationHarness().serving()
    assert isinstance(rest(harness, asleep=True), inbox.Done)
    assert (harness.engine.rest_wanted, harness.engine.asleep) == (True, False)
    assert isinstance(rest(harness, asleep=True), inbox.Done)
    assert harness.kinds().count("rest.asked") == 1
    assert rests(harness, asleep=True, epoch=harness.engine.trainer_epoch - 1) == [], "of a trainer before"
    assert rests(harness, asleep=True) == ["rest.reached"]
    assert rests(harness, asleep=True) == []
    assert harness.engine.asleep
    assert isinstance(rest(harness, asleep=False), inbox.Done)
    assert (harness.engine.rest_wanted, harness.engine.asleep) == (False, True), "until it has its models again"
    assert rests(harness, asleep=False) == ["rest.reached"]
    assert not harness.engine.asleep


def test_a_model_is_created_by_a_trainer_that_is_awake_alone() -> None:
    harness = OperationHarness().serving()
    rest(harness, asleep=True)
    why = refused(harness.create("s:train:1"), Code.WRONG_PHASE)
    assert why.endswith("is asleep and creates no models until it is woken by /wake_up.")
    rest(harness, asleep=False)
    assert isinstance(harness.create("s:train:1"), inbox.Accepted)


def test_a_trainer_that_is_asked_for_the_opposite_on_its_way_has_to_say_when_it_is_there() -> None:
    harness = OperationHarness().serving()
    rest(harness, asleep=True)
    rest(harness, asleep=False)
    assert (harness.engine.rest_wanted, harness.engine.asleep) == (False, True), "it may have freed its memory"
    assert rests(harness, asleep=True) == [], "it has, and looks at what is wanted now"
    rest(harness, asleep=True)
    assert (harness.engine.rest_wanted, harness.engine.asleep) == (True, False), "it may be loading"
    assert rests(harness, asleep=True) == ["rest.reached"]


def test_operations_wait_for_a_trainer_that_sleeps_and_it_owes_nothing() -> None:
    harness = OperationHarness().serving()
    rest(harness, asleep=True)
    rests(harness, asleep=True)
    assert isinstance(harness.operate("1"), Accepted)
    assert harness.clients.waiting == 1
    text = render_status(harness.core.hive, now_ns=harness.now_ns + 90 * 86_400 * SECOND)
    assert "(asleep until /wake_up; serving 1 model, 1 operation waiting)\n" in text
    asleep = "the trainer was told to sleep 90 d 00 h ago, and nothing is executed until POST /wake_up"
    assert "\n  waiting for the client that sends /wake_up: engine main has 1 training operation" in text
    assert f"; {asleep}\n" in text
    assert not harness.engine.owes_weights
    rest(harness, asleep=False)
    assert harness.engine.owes_weights


def test_no_session_is_idle_while_the_trainer_sleeps_and_its_time_begins_when_that_wakes_up() -> None:
    harness = OperationHarness().serving()
    rest(harness, asleep=True)
    rests(harness, asleep=True)
    assert harness.tick(after_s=3 * 3600) == []
    rest(harness, asleep=False)
    assert harness.tick(after_s=3600) == [], "it makes its models again"
    rests(harness, asleep=False)
    assert harness.tick(after_s=3599) == []
    assert [ev.kind_of(event) for event in harness.tick(after_s=1)] == ["session.ended", "operation.accepted"]


def test_only_a_run_of_operations_that_serves_is_put_to_sleep() -> None:
    harness = OperationHarness()
    assert refused(rest(harness, asleep=True), Code.WRONG_PHASE)
    harness.open_session()
    harness.create()
    assert refused(rest(harness, asleep=True), Code.WRONG_PHASE), "its trainer loads the base"
    harness.serve()
    suspend(harness)
    assert refused(rest(harness, asleep=True), Code.WRONG_PHASE)
    assert isinstance(rest(harness, asleep=False), inbox.Done)


def test_a_run_that_ends_takes_its_rest_with_it() -> None:
    harness = OperationHarness().serving()
    rest(harness, asleep=True)
    rests(harness, asleep=True)
    harness.request(inbox.Stop(id=harness.id(), engine=ENGINE))
    assert (harness.engine.rest_wanted, harness.engine.asleep) == (False, False)
