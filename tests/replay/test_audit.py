"""`bombus audit` on logs without a trainer of ours: older logs, rollout groups and training operations."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from bombus.commands.audit import audited
from bombus.hive import events as ev
from bombus.hive import inbox
from bombus.hive.events import AnyEvent, EnvironmentEnd, ModelEnd
from bombus.hive.fates import Fate
from bombus.hive.records import BodyRef, CallRef
from bombus.hive.trajectories.queue import QueuedGroup
from bombus.replay.archive import FileSource
from bombus.replay.audit.audit import NOT_REPORTED
from tests.coordinator.core_in_memory import CoreHarness
from tests.coordinator.operations_in_memory import MODEL
from tests.coordinator.test_sampled_episodes import SNAPSHOT, with_snapshot
from tests.trainer.trainer_hive import audited as audited_events
from tests.trainer.trainer_hive import audited_from_anywhere

LOGS = sorted((Path(__file__).parents[1] / "logs").glob("*.bombuslog"))
ENGINE = "main"
BODY = BodyRef((1,), 1, b"d" * 16)


@pytest.mark.parametrize("path", LOGS, ids=lambda path: path.stem)
async def test_a_log_of_an_older_version_agrees_with_itself(path: Path) -> None:
    with FileSource.open(path) as source:
        report = await audited(source)
    assert not report.differences
    assert report.sampled == sum(report.tokens.values()) > 0
    reported_since = path.stem == "0.1.0"
    assert report.tokens[Fate.TRAINED if reported_since else NOT_REPORTED] > 100
    assert report.tokens[Fate.EVALUATION] == 6


def test_a_call_that_an_older_version_noted_again_counts_once() -> None:
    harness = CoreHarness()
    harness.boot()
    (episode,) = harness.claim()
    noted = harness.call(episode, name="call")[-1]
    assert isinstance(noted, ev.CallsNoted)
    harness.end(episode)
    repeated = replace(noted, calls=(replace(noted.calls[0], late=True),))
    report = audited_events([*harness.log, repeated])
    assert (report.sampled, report.differences) == (3, [])
    audited_from_anywhere([*harness.log, repeated])


def groups(count: int) -> tuple[QueuedGroup, ...]:
    return tuple(QueuedGroup(environment=None, sequences=2, tokens=10, body=BODY) for _ in range(count))


def test_rollout_groups_are_delivered_given_up_or_wait() -> None:
    began = ev.TrainerRegistered(
        engine=ENGINE,
        run=1,
        trainer="t",
        batch_size=4,
        max_token_len=100,
        checkpoint_dir="",
        save_checkpoint_interval=0,
        starting_step=0,
        num_steps=9,
    )
    events: list[AnyEvent] = [
        ev.EngineStarted(engine=ENGINE, run=1, config_digest=""),
        began,
        ev.GroupsPushed(engine=ENGINE, groups=groups(5)),
        ev.BatchHandedOut(engine=ENGINE, run=1, number=1, groups=(1, 2)),
        ev.BatchDelivered(engine=ENGINE, run=1, number=1),
        ev.GroupsGivenUp(engine=ENGINE, run=1, number=0, groups=(3,), why="lost"),
        ev.EnvironmentLeft(engine=ENGINE, environment=1, reason=EnvironmentEnd.SILENT),
    ]
    report = audited_events(events[:-1])
    assert not report.differences
    delivered, given_up = {"delivered to an outside trainer": 2}, {"dropped: given up": 1}
    assert report.groups == {"pushed": 5, **delivered, **given_up, "queued": 2}
    audited_from_anywhere(events[:-1])
    stopped = [*events[:3], ev.EngineStopped(engine=ENGINE, run=1, at_ns=1)]
    assert audited_events(stopped).groups == {"pushed": 5, "dropped: run over": 5}
    again = audited_events([*events[:-1], ev.GroupsGivenUp(engine=ENGINE, run=1, number=0, groups=(3,), why="lost")])
    assert [found.why for found in again.differences] == [
        "rollout group 3 was given up, but was neither queued nor in a batch"
    ]
    mistakes: dict[str, AnyEvent] = {
        "rollout group 1 was handed out, but was not queued": ev.BatchHandedOut(
            engine=ENGINE, run=1, number=2, groups=(1,)
        ),
        "batch 1 was delivered, but was not handed out": ev.BatchDelivered(engine=ENGINE, run=1, number=1),
    }
    for why, mistake in mistakes.items():
        assert why in [found.why for found in audited_events([*events[:-1], mistake]).differences]


def operation(number: int, op: str, passive: bool = False) -> ev.OperationAccepted:
    return ev.OperationAccepted(
        engine=ENGINE, run=1, model="s:m", number=number, key=str(number), op=op, body=BODY, passive=passive
    )


def done(number: int, op: str, failed: bool = False) -> ev.OperationCompleted:
    return ev.OperationCompleted(
        at_ns=1,
        engine=ENGINE,
        run=1,
        model="s:m",
        number=number,
        key=str(number),
        op=op,
        trainer_epoch=1,
        result=BODY,
        failed=failed,
    )


def test_each_gradient_of_a_training_client_is_used_in_a_step_dropped_or_waits() -> None:
    fb, step = "forward_backward", "optim_step"
    events: list[AnyEvent] = [
        ev.EngineStarted(engine=ENGINE, run=1, config_digest="", base="tiny"),
        ev.SessionOpened(engine=ENGINE, session="s", idle_s=60.0),
        ev.ModelOpened(engine=ENGINE, run=1, model="s:m", session="s", base="tiny"),
        *(operation(number, fb) for number in (1, 2, 3)),
        operation(4, fb, passive=True),
        operation(5, step),
        operation(6, fb),
        operation(7, fb),
        *(done(number, fb, failed=number == 3) for number in (1, 2, 3, 4)),
        done(5, step),
        done(6, fb),
    ]
    report = audited_events(events)
    assert not report.differences
    assert report.operations == {
        "forward_backward accepted": 5,
        "optim_step accepted": 1,
        "forward_backward failed": 1,
        "optim_step executed": 1,
        "forward_backward used in a step": 2,
        "forward_backward waiting for a step": 1,
        "forward_backward waiting": 1,
    }
    audited_from_anywhere(events)
    over = audited_events([*events, ev.ModelClosed(engine=ENGINE, run=1, model="s:m", reason=ModelEnd.ENDED)])
    assert over.operations["forward_backward dropped: no step followed"] == 1
    assert over.operations["forward_backward dropped: model ended"] == 1
    stopped = audited_events([*events, ev.EngineStopped(engine=ENGINE, run=1, at_ns=1)])
    assert stopped.operations == over.operations
    assert not stopped.differences
    twice = audited_events([*events, done(6, fb)])
    assert [found.why for found in twice.differences] == ["operation 6 of model s:m was completed twice"]
    mistakes: dict[str, AnyEvent] = {
        "operation 6 of model s:m was accepted twice": operation(6, fb),
        "operation 7 of model s:m was accepted as forward_backward 7, but completed as optim_step 7": done(7, step),
        "operation 7 of model s:m was accepted as forward_backward 7, but completed as sample 7": done(7, "sample"),
        "operation 7 of model s:m was accepted as forward_backward 7, but completed as forward_backward 6": replace(
            done(7, fb), key="6"
        ),
    }
    for why, mistake in mistakes.items():
        assert why in [found.why for found in audited_events([*events, mistake]).differences]


def test_a_compacted_log_has_calls_of_versions_and_adapters_from_before_it() -> None:
    harness = CoreHarness()
    harness.boot(batch_size=1, num_repeat=1, max_staleness=4)
    (slow,) = harness.claim("slow")
    for task in "abc":
        harness.play(task)
        harness.train()
    harness.call(slow, version=0)
    assert not audited_events(harness.log).differences
    audited_from_anywhere(harness.log)
    harness.call(slow, version=4)
    assert [each.why for each in audited_events(harness.log).differences] == [
        "was sampled by version 4, which is not in the log"
    ]

    sampled = with_snapshot()
    (episode,) = sampled.claim(sampler=SNAPSHOT)
    sampled.send(inbox.RemoveWeights(id=sampled.id(), engine=ENGINE, model=MODEL, use="sampler", name="step-1"))
    noted = ev.NotedCall(episode, CallRef(1, "x", b""), 5, 3, 0, 0, sampler="aa")
    sampled.send(inbox.CallRecorded(id=sampled.id(), engine=ENGINE, run=1, call=noted))
    assert not audited_events(sampled.log).differences
    audited_from_anywhere(sampled.log)
