"""Training operations in the core: accepted once, in order, completed by their first result (R17)."""

import msgspec
import pytest

from bombus.errors import Code
from bombus.hive import events as ev
from bombus.hive import inbox
from bombus.hive.events import Collection, ModelEnd
from bombus.hive.fold.operations import COMPLETED_KEPT
from bombus.hive.inbox import Accepted
from bombus.hive.operations.state import FOR_SYNC
from bombus.hive.records import BodyRef
from bombus.hive.state import Phase
from bombus.operations import kinds
from bombus_coordinator.rules.operations.queue import CREATE, END, SAVE
from tests.coordinator.core_in_memory import ENGINE, SECOND
from tests.coordinator.operations_in_memory import BASE, MODEL, SESSION, OperationHarness, saved
from tests.coordinator.test_suspending import refused, suspend


def test_the_operations_that_the_coordinator_knows_are_called_as_their_bodies_are() -> None:
    named = (kinds.CreateModel, kinds.EndModel, kinds.SaveWeights)
    assert [each.__struct_config__.tag for each in named] == [CREATE, END, SAVE]


def test_r17_operations_have_numbers_in_the_order_in_which_they_came_whatever_their_keys_are() -> None:
    harness = OperationHarness().serving()
    keys = ["3", "1", "2"]
    answers = [harness.operate(key) for key in keys]
    assert answers == [
        Accepted(run=1, operation=f"{MODEL}:{key}", number=number) for number, key in enumerate(keys, start=2)
    ]
    assert [(each.number, each.key) for each in harness.model.again()] == [(1, "0"), (2, "3"), (3, "1"), (4, "2")]
    assert harness.model.waiting == 3


def test_r17_the_same_operation_keeps_its_id_while_it_waits_and_after_it_was_executed() -> None:
    harness = OperationHarness().serving()
    first = harness.operate("1", text="a")
    assert harness.operate("1", text="a") == first
    harness.done("1")
    assert harness.operate("1", text="a") == first
    assert harness.create() == Accepted(run=1, operation=f"{MODEL}:0", number=1)
    assert harness.clients.accepted == 2
    assert harness.kinds().count("operation.accepted") == 2


def test_another_body_under_the_same_key_is_refused_with_a_code_of_its_own() -> None:
    harness = OperationHarness().serving()
    harness.operate("1", text="a")
    why = refused(harness.operate("1", text="b"), Code.OTHER_BODY)
    assert why.startswith(f"Operation 1 of model {MODEL} was already accepted with a different body.")


def test_an_operation_whose_sender_may_count_again_is_the_same_only_within_its_time() -> None:
    harness = OperationHarness().serving()
    first = harness.operate("1", text="a", again_s=30.0)
    harness.now_ns += 30 * SECOND
    assert harness.operate("1", text="a", again_s=30.0) == first
    harness.now_ns += SECOND
    why = refused(harness.operate("1", text="a", again_s=30.0), Code.OTHER_BODY)
    assert "was accepted 31 s ago, too long ago for this one to be a retry" in why
    assert harness.operate("1", text="a") == first, "unless nothing was said of it"


def test_r17_the_first_result_counts_and_executing_again_never_replaces_it() -> None:
    harness = OperationHarness().serving()
    harness.operate("1")
    message = harness.done_message("1", step=1, metrics={"loss": 2.5})
    (completed,) = harness.send(message)
    assert completed == ev.OperationCompleted(
        at_ns=harness.now_ns,
        engine=ENGINE,
        run=1,
        model=MODEL,
        number=2,
        key="1",
        op="forward_backward",
        trainer_epoch=1,
        result=message.result,
        step=1,
        metrics={"loss": 2.5},
    )
    assert harness.done("1") == []
    harness.serve()  # another trainer, which executes it again
    assert harness.done("1") == []
    assert harness.op("1").result == message.result


def test_r17_only_the_current_trainer_of_the_run_completes_an_operation() -> None:
    harness = OperationHarness().serving()
    harness.operate("1")
    assert harness.done("1", run=2) == []
    assert harness.done("1", trainer_epoch=0) == []
    assert harness.done("1", number=7) == []
    assert harness.done("1", result=BodyRef(seqs=(), size=0, digest=b"")) == []
    assert harness.op("1").waits
    superseded = harness.done_message("1", trainer_epoch=0)
    assert "as trainer 0" in refused(harness.request(superseded), Code.WRONG_PHASE)
    harness.open_trainer()
    assert harness.done("1", trainer_epoch=1) == [], "its epoch is over"
    assert len(harness.done("1")) == 1


def test_a_result_that_may_be_purged_already_is_refused_and_stored_again() -> None:
    harness = OperationHarness().serving()
    harness.operate("1")
    late = harness.done_message("1")
    harness.core.live.released = late.result.first + 1
    assert refused(harness.request(late), Code.BODY_GONE).endswith("store it again.")
    assert harness.op("1").waits
    again = harness.done_message("1")
    assert isinstance(harness.request(again), inbox.Done)
    assert isinstance(harness.request(msgspec.structs.replace(again, id="repeat")), inbox.Done)
    assert harness.op("1").result == again.result


def test_r17_a_trainer_goes_on_from_the_newest_recovery_checkpoint_and_repeats_what_came_after_it() -> None:
    harness = OperationHarness().serving()
    for key in ("1", "2", "3", "4"):
        harness.operate(key, passive=key == "3")
    for key in ("1", "2", "3"):
        harness.done(key)
    assert [each.key for each in harness.model.again()] == ["0", "1", "2", "4"], "a forward pass changes nothing"
    assert len(harness.checkpoint(2)) == 1
    assert harness.model.checkpoint is not None
    assert [each.key for each in harness.model.again()] == ["2", "4"]
    assert [each.waits for each in harness.model.again()] == [False, True]


def test_a_recovery_checkpoint_is_taken_once_from_the_current_trainer_and_only_of_what_was_executed() -> None:
    harness = OperationHarness().serving()
    harness.operate("1")
    assert harness.checkpoint(2) == [], "operation 2 waits"
    harness.done("1")
    assert harness.checkpoint(2, trainer_epoch=0) == []
    assert len(harness.checkpoint(2)) == 1
    assert harness.checkpoint(2) == []
    assert harness.checkpoint(1) == []
    assert harness.checkpoint(3) == [], "there is no operation 3"


def test_a_model_that_could_not_be_created_is_gone_with_what_waits_for_it() -> None:
    harness = OperationHarness()
    harness.open_session()
    harness.create()
    harness.operate("1")
    harness.serve()
    _, closed = harness.done("0", failed=True)
    assert isinstance(closed, ev.ModelClosed)
    assert closed.reason == ModelEnd.NOT_CREATED
    assert harness.op("1").error.startswith("it could not be created")
    assert not harness.op("1").waits
    assert harness.clients.waiting == 0
    why = refused(harness.operate("2"), Code.UNKNOWN_MODEL)
    assert why == (
        f"Model {MODEL} has ended: it could not be created; the result of its first operation says why. Create another "
        "one."
    )


def test_a_model_ends_by_its_operation_and_can_be_created_again_under_its_name() -> None:
    harness = OperationHarness().serving()
    harness.operate("1", END)
    harness.operate("2")
    harness.done("1", closes=True, saved=saved("last"))
    assert harness.op("2").error == "the model has ended (ended)"
    assert harness.op("1").result is not None
    answer = harness.operate("again", CREATE, base=BASE)
    assert answer == Accepted(run=1, operation=f"{MODEL}:again", number=4)
    assert harness.op("1").result is not None, "the results of the one before can still be read"
    assert [each.key for each in harness.model.again()] == ["again"]


def test_a_model_of_full_weights_that_begins_again_from_its_base_stays() -> None:
    harness = OperationHarness().serving()
    harness.operate("1", END)
    assert len(harness.done("1", closes=False)) == 1
    assert harness.model.closed is None


def test_what_is_not_known_is_refused_in_words() -> None:
    harness = OperationHarness()
    assert refused(harness.create(), Code.UNKNOWN_SESSION) == f"There is no session {SESSION}: open one."
    harness.open_session()
    refused(harness.operate("1"), Code.UNKNOWN_MODEL)
    refused(harness.create(base=""), Code.MALFORMED)
    harness.serving()
    refused(harness.operate("1", run=7), Code.UNKNOWN_MODEL)
    refused(harness.operate("9", CREATE, base=BASE), Code.MODEL_EXISTS)
    refused(harness.create("s:train:1", base="org/other"), Code.UNKNOWN_MODEL)
    harness.open_session("t")
    assert (
        refused(harness.operate("1", session="t"), Code.UNKNOWN_MODEL) == f"Model {MODEL} belongs to another session."
    )


def test_a_model_starts_an_engine_on_the_base_alone_that_its_job_names() -> None:
    harness = OperationHarness()
    harness.configure(Collection())  # for the base `tiny`, after another client has configured it for its own
    harness.open_session()
    why = refused(harness.create(base="org/other"), Code.UNKNOWN_MODEL)
    assert why.startswith(f"Engine {ENGINE} is configured for models based on tiny, not org/other.")
    assert harness.phase() == Phase.OFFLINE
    assert isinstance(harness.create(base=ENGINE), inbox.Accepted), "or that is called as the engine is"


@pytest.mark.parametrize(
    "wrong",
    [
        {"key": "_end-1"},
        {"key": "a:b"},
        {"key": ""},
        {"key": "x" * 65},
        {"model": "a/b"},
        {"model": "m" * 129},
        {"op": "Forward Backward"},
        {"body": BodyRef(seqs=(), size=1, digest=b"d" * 16)},
        {"body": BodyRef(seqs=(0,), size=1, digest=b"d" * 16)},
        {"body": BodyRef(seqs=(1,), size=-1, digest=b"d" * 16)},
        {"body": BodyRef(seqs=(1,), size=(32 << 20) + 1, digest=b"d" * 16)},
        {"body": BodyRef(seqs=(1,), size=1, digest=b"short")},
        {"base": "b" * 1001},
    ],
)
def test_names_and_bodies_that_no_api_sends_are_malformed(wrong: dict[str, object]) -> None:
    harness = OperationHarness().serving()
    message = msgspec.structs.replace(harness.operate_message("1"), **wrong)
    refused(harness.request(message), Code.MALFORMED)


def test_r20_operations_that_wait_models_and_saved_models_have_limits() -> None:
    harness = OperationHarness()
    harness.limits(waiting_max=2, models_max=1, checkpoints_max=1)
    harness.serving()
    harness.operate("1", SAVE)
    harness.operate("2")
    why = refused(harness.operate("3"), Code.QUOTA)
    assert why.startswith(f"2 operations of model {MODEL} are waiting, and the limit is 2: send this one again")
    assert isinstance(harness.operate("4", END), Accepted), "what ends a model always has room"
    refused(harness.create("s:train:1"), Code.QUOTA)
    harness.done("1", saved=saved("a"))
    harness.done("2")
    assert refused(harness.operate("5", SAVE), Code.QUOTA).endswith("is 1: remove some that are no longer needed.")


def test_r20_the_bytes_of_operations_have_a_limit_until_a_recovery_checkpoint_makes_room() -> None:
    harness = OperationHarness()
    harness.limits(bodies_bytes_max=1000)
    harness.serving()  # whose first body has 100 bytes
    big = harness.body("big", size=850)
    harness.operate("1", body=big)
    assert harness.clients.held_bytes == 950
    refused(harness.operate("2"), Code.QUOTA)
    harness.done("1")
    refused(harness.operate("2"), Code.QUOTA)
    harness.checkpoint(2)
    assert harness.clients.held_bytes == 0
    assert isinstance(harness.operate("2"), Accepted)
    harness.operate("3", passive=True)
    harness.done("2")
    harness.done("3")
    assert harness.clients.held_bytes == 100, "of operation 2: a forward pass is not executed again"


def test_r20_a_model_has_its_share_of_the_bytes_of_operations_however_many_the_others_have() -> None:
    harness = OperationHarness()
    harness.limits(bodies_bytes_max=1000, models_max=2)
    harness.serving()
    harness.create("s:train:1")
    harness.done("0", "s:train:1")
    harness.operate("1", body=harness.body("big", size=800))  # beside two bodies of 100 bytes
    refused(harness.operate("2"), Code.QUOTA)
    assert isinstance(harness.operate("1", model="s:train:1", body=harness.body("half", size=400)), Accepted)
    refused(harness.operate("2", model="s:train:1"), Code.QUOTA)


def test_r20_a_model_that_saves_without_names_gives_up_its_oldest_such_save_where_many_are_kept() -> None:
    harness = OperationHarness()
    harness.limits(checkpoints_max=3)
    harness.serving()
    harness.operate("1", SAVE)
    harness.done("1", saved=saved("named", ttl_s=7200.0))
    for key in ("2", "3", "4"):
        assert isinstance(harness.operate(key, SAVE), Accepted)
        harness.done(key, saved=saved(f"sample-{key}", "sampler", ttl_s=3600.0))
    assert list(harness.clients.kept) == [
        f"{MODEL}/training/named",
        f"{MODEL}/sampler/sample-3",
        f"{MODEL}/sampler/sample-4",
    ]
    harness.create("s:train:1")
    harness.done("0", "s:train:1")
    refused(harness.operate("1", SAVE, "s:train:1"), Code.QUOTA)


def test_r20_a_model_that_no_trainer_covers_takes_operations_up_to_a_limit() -> None:
    harness = OperationHarness()
    harness.limits(operations_max=3)
    harness.serving()
    for key in ("1", "2"):
        harness.operate(key)
        harness.done(key)
    why = refused(harness.operate("3"), Code.QUOTA)
    assert why.startswith(f"Model {MODEL} has 3 operations since its trainer last wrote a recovery checkpoint, and the")


def test_the_oldest_results_are_dropped_beyond_their_limit_and_their_operations_are_still_recognised() -> None:
    harness = OperationHarness()
    harness.limits(results_bytes_max=250)
    harness.serving()
    answers = [harness.operate(key, text="x") for key in ("1", "2", "3")]
    for key in ("1", "2", "3"):
        harness.done(key)
    assert [harness.op(key).result is None for key in ("0", "1", "2", "3")] == [True, True, False, False]
    assert harness.clients.result_bytes == 200
    assert harness.operate("1", text="x") == answers[0]
    assert harness.done("1") == []


def test_beyond_their_limit_the_results_of_the_model_that_has_most_are_dropped() -> None:
    harness = OperationHarness()
    harness.limits(results_bytes_max=450)
    harness.serving()
    harness.create("s:train:1")
    harness.done("0", "s:train:1")
    for key in ("1", "2", "3", "4"):
        harness.operate(key)
        harness.done(key)
    assert harness.op("0", "s:train:1").result is not None, "the oldest but one, of a model that has no other"
    assert [harness.op(key).result is None for key in ("0", "1", "2", "3", "4")] == [True, True, False, False, False]
    assert [model.result_bytes for model in harness.clients.models.values()] == [300, 100]


def test_what_is_remembered_of_a_model_is_bounded_but_for_what_a_trainer_needs() -> None:
    harness = OperationHarness().serving()
    for number in range(1, COMPLETED_KEPT + 300):
        harness.operate(str(number))
        harness.done(str(number))
    assert len(harness.model.operations) == COMPLETED_KEPT + 300, "no recovery checkpoint has them"
    harness.checkpoint(COMPLETED_KEPT)
    assert len(harness.model.operations) == COMPLETED_KEPT
    assert next(iter(harness.model.operations)) == "300"
    assert set(harness.clients.results) == {f"{MODEL}:{key}" for key in harness.model.operations}
    assert harness.clients.result_bytes == 100 * COMPLETED_KEPT


def test_r20_what_was_saved_for_a_sync_makes_room_for_the_next_where_many_are_kept() -> None:
    harness = OperationHarness()
    harness.limits(checkpoints_max=2)
    harness.serving()
    harness.operate("1", SAVE)
    harness.done("1", saved=saved("synced-20260101-000000-000"))
    for key in ("2", "3"):
        assert isinstance(harness.operate(key, SAVE, metadata=FOR_SYNC), Accepted)
        harness.done(key, saved=saved(f"synced-{key}", "external", ttl_s=3600.0))
    assert list(harness.clients.kept) == [
        f"{MODEL}/training/synced-20260101-000000-000",
        f"{MODEL}/external/synced-3",
    ]


def test_a_hive_without_room_takes_no_operation_but_one_that_ends_a_model() -> None:
    harness = OperationHarness().serving()
    harness.send(inbox.StorageSeen(id="full", what="ops", used=95, size=100, reserve=10))
    why = refused(harness.operate("1"), Code.STORAGE_FULL)
    assert "It is trimmed as operations are executed and saved" in why
    assert isinstance(harness.operate("2", END), Accepted)


def test_saved_models_are_listed_replaced_removed_and_expire() -> None:
    harness = OperationHarness().serving()
    for key, written in (("1", saved("a")), ("2", saved("a")), ("3", saved("b", "sampler", ttl_s=60.0))):
        harness.operate(key, SAVE)
        harness.done(key, saved=written, step=3)
    assert list(harness.clients.kept) == [f"{MODEL}/training/a", f"{MODEL}/sampler/b"]
    noted = harness.clients.kept[f"{MODEL}/training/a"].noted
    assert (noted.base, noted.step, noted.adapter) == (BASE, 3, ev.AdapterShape(rank=8, alpha=16.0))
    (event,) = harness.tick(after_s=61)
    assert event == ev.WeightsRemoved(
        at_ns=harness.now_ns, engine=ENGINE, model=MODEL, use="sampler", name="b", expired=True
    )
    for _ in range(2):
        remove = inbox.RemoveWeights(id=harness.id(), engine=ENGINE, model=MODEL, use="training", name="a")
        assert isinstance(harness.request(remove), inbox.Done)
    assert harness.kinds().count("weights.removed") == 2
    assert harness.clients.kept == {}


def test_a_saved_model_has_the_owner_of_its_session_also_when_that_is_forgotten() -> None:
    harness = OperationHarness()
    harness.open_session(owner="ann")
    harness.create()
    harness.serve()
    harness.done("0")
    harness.operate("1", SAVE)
    harness.done("1", saved=saved("a"))
    harness.operate("2", END)
    harness.done("2", closes=True)
    harness.close_session()
    harness.tick(after_s=8 * 24 * 3600)
    assert harness.clients.sessions == {}
    assert [each.noted.owner for each in harness.clients.kept.values()] == ["ann"]


def test_operations_of_another_client_on_a_model_are_no_repeats_of_its_own() -> None:
    harness = OperationHarness()
    harness.open_session(owner="ann")
    harness.open_session("s-eve", owner="eve")
    harness.create()
    why = refused(harness.create(session="s-eve"), Code.MODEL_EXISTS)
    assert why == f"Model {MODEL} belongs to another client: choose another name for yours."
    harness.operate("1", text="same")
    refused(harness.operate("1", text="same", session="s-eve"), Code.UNKNOWN_MODEL)
    assert isinstance(harness.operate("1", text="same"), Accepted), "a repeat"


def test_the_time_to_live_of_a_saved_model_is_changed_from_now_on() -> None:
    harness = OperationHarness().serving()
    harness.operate("1", SAVE)
    harness.done("1", saved=saved("a", ttl_s=100.0))

    def retain(name: str, ttl_s: float) -> inbox.AnyAnswer:
        return harness.request(
            inbox.RetainWeights(id=harness.id(), engine=ENGINE, model=MODEL, use="training", name=name, ttl_s=ttl_s)
        )

    harness.touch(after_s=60)
    assert isinstance(retain("a", 50.0), inbox.Done)
    assert harness.tick(after_s=49) == []
    assert isinstance(retain("a", 0.0), inbox.Done)
    assert harness.tick(after_s=1000) == []
    refused(retain("a", float("nan")), Code.MALFORMED)
    refused(retain("b", 1.0), Code.UNKNOWN_MODEL)


def test_a_saved_model_is_marked_as_public_and_stays_what_it_is() -> None:
    harness = OperationHarness().serving()
    for key, name in (("1", "a"), ("2", "b")):
        harness.operate(key, SAVE, metadata={"note": name})
        harness.done(key, saved=saved(name, ttl_s=100.0))
    before = dict(harness.clients.kept)

    def publish(name: str, public: bool) -> inbox.AnyAnswer:
        return harness.request(
            inbox.PublishWeights(id=harness.id(), engine=ENGINE, model=MODEL, use="training", name=name, public=public)
        )

    harness.touch(after_s=40)
    for _ in range(2):
        assert isinstance(publish("a", True), inbox.Done)
    assert list(harness.clients.kept) == list(before), "it keeps its place"
    kept = harness.clients.kept[f"{MODEL}/training/a"]
    assert (kept.noted.public, kept.noted.metadata) == (True, {"note": "a"})
    assert (kept.saved_ns, kept.until_ns) == (
        before[f"{MODEL}/training/a"].noted.at_ns,
        before[f"{MODEL}/training/a"].until_ns,
    )
    assert isinstance(publish("a", False), inbox.Done)
    assert not harness.clients.kept[f"{MODEL}/training/a"].noted.public
    assert harness.kinds().count("weights.kept") == 4
    refused(publish("c", True), Code.UNKNOWN_MODEL)


def test_metadata_of_models_and_checkpoints_is_kept_and_has_a_limit() -> None:
    harness = OperationHarness().serving()
    refused(harness.operate("1", SAVE, metadata={"k": "v" * 4096}), Code.TOO_LARGE)
    harness.operate("1", SAVE, metadata={"k": "v"})
    harness.done("1", saved=saved("a"))
    assert harness.clients.kept[f"{MODEL}/training/a"].noted.metadata == {"k": "v"}
    assert harness.model.operations["1"].metadata == {}, "it is not kept twice"


@pytest.mark.parametrize(("ttl_s", "is_kept"), [(float("nan"), True), (float("inf"), True), (-1.0, True), (1.0, False)])
def test_a_time_to_live_that_makes_no_sense_removes_nothing(ttl_s: float, is_kept: bool) -> None:
    harness = OperationHarness().serving()
    harness.operate("1", SAVE)
    harness.done("1", saved=saved("a", ttl_s=ttl_s))
    harness.tick(after_s=2)
    assert bool(harness.clients.kept) == is_kept


def test_saved_models_outlive_their_run_their_session_and_an_episode_run() -> None:
    harness = OperationHarness().serving()
    harness.operate("1", SAVE)
    harness.done("1", saved=saved("a"))
    harness.send(inbox.Stop(id=harness.id(), engine=ENGINE))
    harness.boot()
    assert harness.engine.plays_episodes
    assert harness.phase() == Phase.ROLLING
    assert list(harness.clients.kept) == [f"{MODEL}/training/a"]


def test_a_failed_save_notes_nothing() -> None:
    harness = OperationHarness().serving()
    harness.operate("1", SAVE)
    assert len(harness.done("1", failed=True, saved=saved("a"))) == 1
    assert harness.clients.kept == {}
    assert harness.clients.failed == 1


def test_what_a_trainer_begins_is_noted_once_for_each_trainer_until_it_has_a_result() -> None:
    harness = OperationHarness().serving()
    harness.operate("1")

    def begins(trainer_epoch: int, number: int = 2) -> list[str]:
        message = inbox.OperationBegins(
            id=harness.id(), engine=ENGINE, run=1, trainer_epoch=trainer_epoch, model=MODEL, number=number, key="1"
        )
        return [type(event).__name__ for event in harness.send(message)]

    epoch = harness.engine.trainer_epoch
    assert begins(epoch) == ["OperationBegun"]
    assert begins(epoch) == begins(epoch - 1) == begins(epoch, number=1) == []
    harness.serve()
    assert begins(epoch) == [], "its trainer is not the current one"
    assert begins(epoch + 1) == ["OperationBegun"]
    queued = harness.op("1")
    assert (queued.begun, queued.begun_before(epoch + 1), queued.begun_before(epoch + 2)) == (2, 1, 2)
    harness.done("1")
    assert begins(epoch + 1) == []


def test_a_trainer_that_hangs_in_an_operation_that_it_has_begun_is_no_failure_of_the_run() -> None:
    harness = OperationHarness().serving()
    harness.operate("1")

    def hangs() -> ev.TrainerStalled:
        epoch = harness.engine.trainer_epoch
        hanging = inbox.TrainerHangs(
            id=harness.id(), engine=ENGINE, run=1, trainer_epoch=epoch, doing="operation 2", still_s=60.0
        )
        (stalled,) = harness.send(hanging)
        assert isinstance(stalled, ev.TrainerStalled)
        return stalled

    assert hangs().failures == 1
    for _ in range(3):
        epoch = harness.open_trainer()
        message = inbox.OperationBegins(
            id=harness.id(), engine=ENGINE, run=1, trainer_epoch=epoch, model=MODEL, number=2, key="1"
        )
        harness.send(message)
        assert hangs().failures == 1
    assert not harness.engine.suspended


def test_what_was_loaded_and_whose_fault_a_failure_was_stays_with_the_operation() -> None:
    harness = OperationHarness().serving()
    for key in "123":
        harness.operate(key)
    harness.done("1", loaded="abc")
    harness.done("2", failed=True, by_server=True, loaded="abc")
    harness.done("3", by_server=True)
    found = [(each.loaded, each.by_server) for each in map(harness.op, "123")]
    assert found == [("abc", False), ("", True), ("", False)]


def test_a_saved_model_that_an_operation_waits_to_load_is_neither_removed_nor_does_it_expire() -> None:
    harness = OperationHarness().serving()
    harness.operate("1", "save_weights")
    harness.done("1", saved=saved("x", ttl_s=5.0))
    name = f"{MODEL}/training/x"
    harness.operate("2", "load_weights", reads=name)
    remove = inbox.RemoveWeights(id=harness.id(), engine=ENGINE, model=MODEL, use="training", name="x")
    why = refused(harness.request(remove), Code.WRONG_PHASE)
    assert why == f"{name} is about to be loaded by operation 2 of model {MODEL}, which is waiting: remove it later."
    harness.tick(60.0)
    assert list(harness.clients.kept) == [name]
    harness.done("2")
    harness.tick()
    assert harness.clients.kept == {}


def away(harness: OperationHarness, model: str, why: str = "its recovery checkpoint is gone") -> None:
    said = inbox.ModelAway(
        id=harness.id(), engine=ENGINE, run=1, trainer_epoch=harness.engine.trainer_epoch, model=model, why=why
    )
    harness.send(said)


def waiting_to_load(ttl_s: float = 0.0) -> OperationHarness:
    """Return a harness in which a suspended model of another client is to load a model that was saved."""
    harness = OperationHarness()
    harness.limits(session_idle_s=7 * 86_400.0)
    harness.serving()
    harness.operate("1", "save_weights")
    harness.done("1", saved=saved("x", ttl_s=ttl_s))
    harness.open_session("t", owner="eve")
    harness.create("t:train:0", "t")
    harness.done("0", "t:train:0")
    harness.operate("1", "load_weights", "t:train:0", session="t", reads=f"{MODEL}/training/x")
    away(harness, "t:train:0")
    return harness


def test_an_owner_removes_what_a_model_that_cannot_be_made_again_waits_to_load_and_that_is_marked() -> None:
    harness = waiting_to_load()
    remove = inbox.RemoveWeights(id=harness.id(), engine=ENGINE, model=MODEL, use="training", name="x")
    assert isinstance(harness.request(remove), inbox.Done)
    assert harness.clients.kept == {}
    harness.operate("2", "save_weights")
    harness.done("2", saved=saved("x"))
    assert harness.op("1", "t:train:0").reads_removed, "also where there is another one of its name"
    away(harness, "t:train:0", "")
    remove = inbox.RemoveWeights(id=harness.id(), engine=ENGINE, model=MODEL, use="training", name="x")
    assert isinstance(harness.request(remove), inbox.Refusal), "now it is executed soon"


def test_what_waits_for_a_model_that_cannot_be_made_again_keeps_a_saved_model_for_a_day_only() -> None:
    harness = waiting_to_load(ttl_s=5.0)
    harness.tick(after_s=10 * 3600)
    suspend(harness)
    harness.tick(after_s=100 * 3600)
    harness.send(inbox.Resume(id=harness.id(), engine=ENGINE))
    harness.tick(after_s=14 * 3600 - 1)
    assert list(harness.clients.kept) == [f"{MODEL}/training/x"], "the run was suspended meanwhile"
    harness.tick(after_s=1)
    assert harness.clients.kept == {}
    assert harness.op("1", "t:train:0").reads_removed


def test_what_is_to_be_loaded_makes_no_room_for_another_save() -> None:
    harness = OperationHarness()
    harness.limits(checkpoints_max=2)
    harness.serving()
    for key in "12":
        harness.operate(key, "save_weights")
        harness.done(key, saved=saved(f"sample-{key}", "sampler", ttl_s=60.0))
    harness.operate("3", "load_weights", reads=f"{MODEL}/sampler/sample-1")
    assert isinstance(harness.operate("4", "save_weights"), inbox.Accepted)
    assert list(harness.clients.kept) == [f"{MODEL}/sampler/sample-1"]


def test_the_operation_of_another_client_that_is_to_load_a_public_model_is_not_named() -> None:
    harness = OperationHarness().serving()
    harness.operate("1", "save_weights")
    harness.done("1", saved=saved("x"))
    harness.open_session("t", owner="eve")
    harness.create("t:train:0", "t")
    harness.operate("1", "load_weights", "t:train:0", session="t", reads=f"{MODEL}/training/x")
    remove = inbox.RemoveWeights(id=harness.id(), engine=ENGINE, model=MODEL, use="training", name="x")
    why = refused(harness.request(remove), Code.WRONG_PHASE)
    assert "by an operation of another client, which is waiting" in why


@pytest.mark.parametrize("name", ["_x", "run@1", "a=b", "a+b"])
def test_models_have_the_names_that_the_api_and_the_trainer_take(name: str) -> None:
    harness = OperationHarness().serving()
    assert isinstance(harness.create(name), inbox.Accepted)


def test_the_folder_of_a_recovery_checkpoint_is_as_long_as_a_path_may_be() -> None:
    harness = OperationHarness().serving()
    harness.operate("1")
    harness.done("1")
    folder = "/" + "x" * 4000
    written = inbox.CheckpointWritten(
        id=harness.id(), engine=ENGINE, run=1, trainer_epoch=1, model=MODEL, number=2, folder=folder, digest="c"
    )
    (event,) = harness.send(written)
    assert isinstance(event, ev.ModelCheckpointed)
    assert event.folder == folder
