"""Sessions of training clients in the core: how they open, live, end with their models, and are forgotten."""

from collections.abc import Callable

import msgspec
import pytest

from bombus.errors import Code
from bombus.hive import events as ev
from bombus.hive import inbox
from bombus.hive.events import ModelEnd, SessionEnd
from bombus.hive.fold.evolve import evolve
from bombus.hive.inbox import Done
from bombus.hive.state import Hive, Phase
from bombus_coordinator.core import Core
from tests.coordinator.core_in_memory import ENGINE, without_ticks
from tests.coordinator.operations_in_memory import MODEL, SESSION, OperationHarness, saved
from tests.coordinator.test_suspending import refused, suspend

OWN_END = "_end-2"


def test_a_session_is_opened_once_whatever_its_command_is_and_remembers_what_its_api_said() -> None:
    harness = OperationHarness()
    for _ in range(2):
        assert isinstance(harness.open_session(owner="ann", dialect="tinker", metadata={"a": 1}), Done)
    assert harness.kinds().count("session.opened") == 1
    client = harness.clients.sessions[SESSION]
    assert (client.owner, client.dialect, client.metadata, client.idle_s) == ("ann", "tinker", {"a": 1}, 3600.0)
    assert harness.phase() == Phase.OFFLINE, "a session alone starts nothing"


def test_an_idle_session_ends_and_its_models_are_saved() -> None:
    harness = OperationHarness().serving()
    harness.operate("1")
    harness.done("1")
    harness.touch(after_s=3000)
    assert harness.tick(after_s=3599) == []
    ended, end = harness.tick(after_s=1)
    assert ended == ev.SessionEnded(at_ns=harness.now_ns, engine=ENGINE, session=SESSION, reason=SessionEnd.IDLE)
    assert end == ev.OperationAccepted(
        at_ns=harness.now_ns,
        engine=ENGINE,
        run=1,
        model=MODEL,
        number=3,
        key="_end-3",
        op="end_model",
        save_as="ended-3",
    )
    assert [each.key for each in harness.model.again()] == ["0", "1", "_end-3"]
    refused(harness.operate("2"), Code.SESSION_OVER)
    harness.done("_end-3", closes=True, saved=saved("ended-3"))
    assert harness.model.closed is not None
    assert list(harness.clients.kept) == [f"{MODEL}/training/ended-3"]
    assert harness.clients.kept[f"{MODEL}/training/ended-3"].noted.saved.ttl_s == 30 * 24 * 3600.0


def test_operations_and_signs_of_life_keep_a_session() -> None:
    harness = OperationHarness().serving()
    for number in range(5):
        harness.operate(str(number + 1))
        harness.done(str(number + 1))
        assert harness.tick(after_s=3000) == []
    for _ in range(5):
        harness.touch(after_s=1000)
        assert harness.tick(after_s=2000) == []
    harness.touch("another", after_s=1000)
    assert len(harness.tick(after_s=1000)) == 2


def test_a_session_with_something_that_waits_is_not_idle_and_its_time_begins_when_that_is_executed() -> None:
    harness = OperationHarness().serving()
    harness.operate("1")
    assert harness.tick(after_s=3 * 3600) == []
    harness.done("1")
    assert harness.tick(after_s=3599) == []
    assert len(harness.tick(after_s=1)) == 2


def test_the_time_of_a_session_begins_again_when_a_suspended_run_is_resumed() -> None:
    harness = OperationHarness().serving()
    suspend(harness)
    assert harness.tick(after_s=3 * 3600) == []
    harness.send(inbox.Resume(id=harness.id(), engine=ENGINE))
    assert harness.tick(after_s=3599) == []
    assert len(harness.tick(after_s=1)) == 2


def test_no_session_ends_while_the_run_is_suspended_or_for_the_time_without_a_leader() -> None:
    harness = OperationHarness().serving()
    suspend(harness)
    assert harness.tick(after_s=7200) == []
    harness.send(inbox.Resume(id=harness.id(), engine=ENGINE))
    harness.tick(after_s=3000)
    harness.core.live.epoch_ns = harness.now_ns  # as after another leader has taken over
    assert harness.tick(after_s=3599) == []
    assert len(harness.tick(after_s=1)) == 2


def test_a_session_for_one_model_ends_when_its_model_has_ended_or_was_not_created() -> None:
    harness = OperationHarness()
    harness.limits(run_idle_s=1e6)
    harness.serving()
    harness.open_session("t", for_model=True)
    assert harness.tick(after_s=59) == []
    harness.create("t:train:0", session="t")
    harness.done("0", "t:train:0")
    assert harness.tick(after_s=600) == []
    harness.operate("1", "end_model", "t:train:0", session="t")
    harness.done("1", "t:train:0", closes=True)
    assert harness.tick(after_s=59) == []
    (ended,) = harness.tick(after_s=1)
    assert isinstance(ended, ev.SessionEnded)
    assert (ended.session, ended.reason) == ("t", SessionEnd.FINISHED)
    assert harness.clients.operation("t:train:0:1") is not None, "its results can still be read"
    harness.open_session("none", for_model=True)
    (ended,) = harness.tick(after_s=60)
    assert isinstance(ended, ev.SessionEnded)
    assert ended.session == "none"


def test_a_session_is_closed_once_with_its_first_reason_and_saves_unless_it_says_not_to() -> None:
    harness = OperationHarness().serving()
    assert isinstance(harness.close_session(detail="done training", save=False), Done)
    assert isinstance(harness.close_session(detail="again"), Done)
    assert harness.op(OWN_END).save_as == ""
    ended = harness.clients.sessions[SESSION].ended
    assert ended is not None
    assert (ended.reason, ended.detail) == (SessionEnd.FINISHED, "done training")
    refused(harness.close_session("other"), Code.UNKNOWN_SESSION)
    refused(harness.open_session(), Code.SESSION_OVER)


def test_a_model_that_its_client_ends_anyway_is_not_ended_twice() -> None:
    harness = OperationHarness().serving()
    harness.operate("1", "end_model")
    harness.close_session()
    assert harness.model.numbers == 2


def test_a_model_that_cannot_be_saved_is_tried_three_times_a_minute_apart_and_then_let_go() -> None:
    harness = OperationHarness().serving()
    harness.close_session()
    for key in (OWN_END, "_end-3"):
        harness.done(key, failed=True)
        assert harness.tick(after_s=59) == []
        assert [type(event) for event in harness.tick(after_s=1)] == [ev.OperationAccepted]
    _, closed = harness.done("_end-4", failed=True)
    assert isinstance(closed, ev.ModelClosed)
    assert (closed.reason, closed.why) == (ModelEnd.NOT_SAVED, "its session ended, and it could not be saved")


def test_results_can_be_read_until_an_hour_after_the_session_has_ended() -> None:
    harness = OperationHarness()
    harness.limits(run_idle_s=1e6)
    harness.serving()
    harness.operate("1")
    harness.close_session()
    harness.done("1")
    harness.done("_end-3", closes=True)
    assert harness.tick(after_s=3599) == []
    assert harness.clients.operation(f"{MODEL}:1") is not None
    (forgotten,) = harness.tick(after_s=1)
    assert forgotten == ev.SessionForgotten(at_ns=harness.now_ns, engine=ENGINE, session=SESSION)
    assert harness.clients.operation(f"{MODEL}:1") is None
    assert (harness.clients.sessions, harness.clients.models, harness.clients.results) == ({}, {}, {})
    assert harness.clients.result_bytes == 0


def test_r20_sessions_have_a_limit_and_those_that_ended_are_forgotten_early_where_there_are_many() -> None:
    harness = OperationHarness()
    harness.limits(sessions_max=2)
    harness.open_session("a")
    harness.open_session("b")
    refused(harness.open_session("c"), Code.QUOTA)
    for number, name in enumerate("abcdefg"):
        if number > 1:
            assert isinstance(harness.open_session(name), Done)
        harness.close_session(name)
    assert list(harness.clients.sessions) == ["d", "e", "f", "g"]


@pytest.mark.parametrize(
    ("wrong", "code"),
    [
        ({"session": "a b"}, Code.MALFORMED),
        ({"idle_s": 5.0}, Code.MALFORMED),
        ({"idle_s": float("nan")}, Code.MALFORMED),
        ({"owner": "o" * 257}, Code.MALFORMED),
        ({"metadata": {"a": "x" * 70_000}}, Code.TOO_LARGE),
    ],
)
def test_a_session_that_makes_no_sense_is_refused(wrong: dict[str, object], code: Code) -> None:
    refused(OperationHarness().open_session(**wrong), code)  # type: ignore[arg-type]


def suspend_model(harness: OperationHarness, why: str, trainer_epoch: int | None = None) -> list[str]:
    """Let a trainer say why it cannot make the model again, and return what is put on the log."""
    message = inbox.ModelAway(
        id=harness.id(),
        engine=ENGINE,
        run=1,
        trainer_epoch=harness.engine.trainer_epoch if trainer_epoch is None else trainer_epoch,
        model=MODEL,
        why=why,
    )
    return [type(event).__name__ for event in harness.send(message)]


def test_a_model_that_cannot_be_made_again_waits_and_is_ended_once_it_can() -> None:
    harness = OperationHarness().serving()

    def away(why: str, trainer_epoch: int | None = None) -> list[str]:
        return suspend_model(harness, why, trainer_epoch)

    assert away("its recovery checkpoint is gone", trainer_epoch=7) == []
    assert away("its recovery checkpoint is gone") == ["ModelSuspended"]
    assert away("its recovery checkpoint is gone") == []
    assert harness.model.suspended == "its recovery checkpoint is gone"
    close = inbox.CloseSession(id=harness.id(), engine=ENGINE, session=SESSION)
    assert isinstance(harness.request(close), inbox.Done)
    assert harness.tick(after_s=120) == []
    assert harness.model.closed is None, "it could not be saved"
    assert away("") == ["ModelSuspended"]
    (accepted,) = harness.tick(after_s=120)
    assert isinstance(accepted, ev.OperationAccepted)
    assert (accepted.op, accepted.save_as) == ("end_model", "ended-2")


def test_a_model_that_cannot_be_made_again_is_ended_by_its_client_also_after_its_session_has_ended() -> None:
    harness = OperationHarness().serving()
    suspend_model(harness, "its recovery checkpoint is gone")
    harness.close_session()
    refused(harness.operate("1"), Code.SESSION_OVER)
    assert isinstance(harness.operate("end.1", "end_model"), inbox.Accepted)
    harness.done("end.1", closes=True)
    assert harness.model.closed is not None
    refused(harness.operate("end.2", "end_model"), Code.UNKNOWN_MODEL)


def test_a_model_that_cannot_be_made_again_for_a_day_after_its_session_has_ended_is_let_go() -> None:
    harness = OperationHarness()
    harness.limits(models_max=1, run_idle_s=1e6)
    harness.serving()
    suspend_model(harness, "its recovery checkpoint is gone")
    assert [type(each) for each in harness.tick(after_s=48 * 3600)] == [ev.SessionEnded]
    assert harness.tick(after_s=24 * 3600 - 1) == [], "its time begins with the end of its session"
    (closed,) = harness.tick(after_s=1)
    assert isinstance(closed, ev.ModelClosed)
    assert closed.reason == ModelEnd.NOT_SAVED
    assert closed.why == "its session ended, but it could not be rebuilt to be saved: its recovery checkpoint is gone"
    harness.open_session("t")
    assert isinstance(harness.create("t:train:0", "t"), inbox.Accepted), "its place is free"


def test_the_day_of_a_model_that_was_made_again_meanwhile_begins_anew() -> None:
    harness = OperationHarness().serving()
    harness.operate("1")
    suspend_model(harness, "its recovery checkpoint is gone")
    harness.close_session()
    harness.tick()
    suspend_model(harness, "")
    harness.tick(after_s=23 * 3600)
    suspend_model(harness, "its recovery checkpoint is gone")
    harness.tick(after_s=2 * 3600)
    assert harness.model.closed is None
    assert [type(each) for each in harness.tick(after_s=24 * 3600)] == [ev.ModelClosed]


def test_what_waits_for_a_model_that_cannot_be_made_again_keeps_no_session_whose_client_is_gone() -> None:
    harness = OperationHarness()
    harness.limits(models_max=1, run_idle_s=1e6)
    harness.serving()
    harness.operate("1")
    suspend_model(harness, "its recovery checkpoint is gone")
    assert [type(each) for each in harness.tick(after_s=48 * 3600)] == [ev.SessionEnded]
    harness.tick()
    assert [type(each) for each in harness.tick(after_s=24 * 3600)] == [ev.ModelClosed]
    assert harness.clients.held_bytes == 0
    harness.open_session("t")
    assert isinstance(harness.create("t:train:0", "t"), inbox.Accepted), "its place is free"


# ---- a day that counts only while a model can be tried again -------------------------------------------------------

HOUR = 3600.0


def left() -> OperationHarness:
    """Return a harness with a model that cannot be made again, and whose session has ended."""
    harness = OperationHarness()
    harness.limits(run_idle_s=1e6)
    harness.serving()
    suspend_model(harness, "its recovery checkpoint is gone")
    harness.close_session()
    return harness


def lead_anew(harness: OperationHarness) -> None:
    """Let another leader take over, from a snapshot that is also the fold of the log."""
    folded = Hive()
    for event in harness.log:
        evolve(folded, event)
    taken = msgspec.msgpack.decode(msgspec.msgpack.encode(harness.core.hive), type=Hive)
    assert folded == taken == harness.core.hive
    harness.core = without_ticks(Core(taken))
    harness.log += harness.core.open_epoch("another").events
    harness.core.live.epoch_ns = harness.now_ns  # as with the first message, which comes long after the last event


def rest(harness: OperationHarness, asleep: bool) -> None:
    harness.send(inbox.AskRest(id=harness.id(), engine=ENGINE, asleep=asleep))
    say_rest(harness, asleep)


def say_rest(harness: OperationHarness, asleep: bool) -> None:
    epoch = harness.engine.trainer_epoch
    harness.send(inbox.TrainerRests(id=harness.id(), engine=ENGINE, run=1, trainer_epoch=epoch, asleep=asleep))


def lose_trainer(harness: OperationHarness) -> None:
    epoch = harness.engine.trainer_epoch
    hangs = inbox.TrainerHangs(id=harness.id(), engine=ENGINE, run=1, trainer_epoch=epoch, doing="x", still_s=60.0)
    harness.send(hangs)
    assert harness.engine.trainer == ""


def resume(harness: OperationHarness) -> None:
    harness.send(inbox.Resume(id=harness.id(), engine=ENGINE))


def fall_asleep(harness: OperationHarness) -> None:
    rest(harness, asleep=True)


def wake_up(harness: OperationHarness) -> None:
    rest(harness, asleep=False)


def begin_to_wake_up(harness: OperationHarness) -> None:
    fall_asleep(harness)
    harness.send(inbox.AskRest(id=harness.id(), engine=ENGINE, asleep=False))


def be_awake(harness: OperationHarness) -> None:
    say_rest(harness, asleep=False)


PAUSES = {
    "sleep": (fall_asleep, wake_up),
    "its end": (begin_to_wake_up, be_awake),
    "no trainer": (lose_trainer, OperationHarness.serve),
}


@pytest.mark.parametrize("pause", PAUSES)
def test_the_day_of_a_model_that_is_left_does_not_run_while_nobody_could_make_it_again(pause: str) -> None:
    begin, end = PAUSES[pause]
    harness = left()
    assert harness.tick(after_s=20 * HOUR) == []
    begin(harness)
    assert harness.tick(after_s=100 * HOUR) == []
    end(harness)
    assert harness.tick(after_s=4 * HOUR - 1) == []
    assert [type(each) for each in harness.tick(after_s=1)] == [ev.ModelClosed]


def test_the_day_of_a_model_that_is_left_goes_on_under_another_leader_and_from_a_snapshot() -> None:
    harness = left()
    for _ in range(23):
        assert harness.tick(after_s=HOUR) == []
        lead_anew(harness)
    assert harness.tick(after_s=HOUR - 1) == []
    assert [type(each) for each in harness.tick(after_s=1)] == [ev.ModelClosed]


def sleep_for_a_moment(harness: OperationHarness) -> None:
    fall_asleep(harness)
    wake_up(harness)


@pytest.mark.parametrize("begin", [OperationHarness.serve, sleep_for_a_moment])
def test_a_model_that_is_left_is_not_ended_before_a_trainer_that_has_just_come_has_had_half_an_hour(
    begin: Callable[[OperationHarness], None],
) -> None:
    harness = left()
    harness.tick(after_s=24 * HOUR - 1)
    begin(harness)
    assert harness.tick(after_s=HOUR / 2 - 1) == []
    assert [type(each) for each in harness.tick(after_s=1)] == [ev.ModelClosed]


def test_a_model_that_is_left_is_not_ended_while_its_trainer_sleeps() -> None:
    harness = left()
    harness.tick(after_s=24 * HOUR - 1)
    harness.serve()
    harness.tick(after_s=60)
    fall_asleep(harness)
    assert harness.tick(after_s=HOUR) == []


def test_the_day_of_a_model_that_is_left_goes_on_when_there_is_another_reason() -> None:
    harness = left()
    harness.tick(after_s=20 * HOUR)
    suspend_model(harness, "its recovery checkpoint is damaged")
    assert harness.tick(after_s=4 * HOUR - 1) == []
    assert [type(each) for each in harness.tick(after_s=1)] == [ev.ModelClosed]


def test_an_operator_who_resumes_a_run_gives_a_model_that_is_left_another_day() -> None:
    harness = left()
    harness.tick(after_s=23 * HOUR)
    suspend(harness)
    assert harness.tick(after_s=100 * HOUR) == []
    resume(harness)
    assert harness.tick(after_s=24 * HOUR - 1) == []
    assert [type(each) for each in harness.tick(after_s=1)] == [ev.ModelClosed]


def test_nothing_is_remembered_of_a_session_that_has_ended() -> None:
    harness = left()
    harness.touch()
    assert isinstance(harness.operate("end.1", "end_model"), inbox.Accepted)
    harness.done("end.1", closes=True)
    harness.tick(after_s=2 * HOUR)
    assert harness.clients.sessions == {}
    assert harness.core.live.session_seen == {}
