"""Facts that do not fit into one message of the bus, and messages that cannot be decided, stop nobody."""

import asyncio
from contextlib import suppress
from typing import Any

import pytest

from bombus.bus import Bus
from bombus.errors import Code, Refused
from bombus.hive import events as ev
from bombus.hive import inbox
from bombus.hive.events import Collection, NotedCall
from bombus.hive.fates import Fate, StepTokens
from bombus.hive.fold.evolve import evolve
from bombus.hive.inbox import Done, EpisodeResult, Refusal
from bombus.hive.records import CallRef
from bombus.hive.state import EngineState, Hive, Phase
from bombus.hive.status.text import render_status
from bombus_coordinator import core, shell
from bombus_coordinator.rules.decision import NAMES_PER_EVENT, Decisions
from bombus_coordinator.rules.engines import EPISODE_BYTES
from bombus_coordinator.rules.live import Live
from tests.coordinator.core_in_memory import ENGINE, CoreHarness
from tests.coordinator.test_shell import boot, claim, leading, log_of


async def test_many_ends_with_large_metadata_are_stored_as_one_decision_of_several_events(bus: Bus) -> None:
    """Their events together are over the largest message: the decision could not be written, nor any after it."""
    said = {"trace": "x" * (65_000)}
    async with leading(bus):
        await boot(bus, batch_size=1000)
        granted = await bus.inbox.request(claim("k", count=128))
        assert isinstance(granted, inbox.Granted)
        results = tuple(EpisodeResult(episode=name, task=name, reward=1.0, metadata=said) for name in granted.episodes)
        ending = inbox.End(id="end", engine=ENGINE, client="c1", results=results)
        assert len(inbox.encode_message(ending)) < bus.publisher.message_bytes_max
        assert isinstance(await bus.inbox.request(ending), Done)
        assert isinstance(await bus.inbox.request(inbox.Stop(id="stop", engine=ENGINE)), Done)
    ended = [event for event in map(decoded, await log_of(bus)) if isinstance(event, ev.EpisodeEnded)]
    assert len(ended) > 20
    assert [outcome.episode for event in ended for outcome in event.outcomes] == list(granted.episodes)


def decoded(stored: object) -> ev.AnyEvent:
    return ev.decode_event(stored.data)  # type: ignore[attr-defined]


def played(harness: CoreHarness, task: str, calls: int) -> str:
    """Play an episode with so many calls, which are noted a thousand at a time."""
    (episode,) = harness.claim()
    for number in range(calls):
        record(harness, episode, f"{episode}-{number}")
    assert isinstance(harness.end(episode, task, reward=float(len(harness.engine.pool))), Done)
    return episode


def test_a_batch_names_its_episodes_and_the_fold_has_their_calls() -> None:
    harness = CoreHarness()
    harness.boot(batch_size=1, num_repeat=2)
    for _ in range(2):
        played(harness, "t", calls=72)
    (batch,) = [event for event in harness.log if isinstance(event, ev.BatchReady)]
    assert len(ev.encode_event(batch)) < 500
    assert all(not episode.calls for group in batch.groups for episode in group.episodes)
    hive = Hive()
    for event in harness.log:
        evolve(hive, event)
    for state in (harness.engine, hive.engine(ENGINE)):
        assert state.batch is not None
        assert [len(episode.calls) for group in state.batch.groups for episode in group.episodes] == [72, 72]
        assert state.steps[-1].batch == state.batch


def test_a_batch_of_an_older_version_keeps_the_calls_that_are_in_it() -> None:
    harness = CoreHarness()
    harness.boot(batch_size=1, num_repeat=2)
    refs = (CallRef(1, "a", b"d"),)
    episodes = tuple(ev.BatchEpisode(episode=f"main-1-{n}", reward=1.0, calls=refs) for n in (7, 8))
    group = ev.BatchGroup(task="t", episodes=episodes)
    evolve(
        harness.core.hive,
        ev.BatchReady(at_ns=1, engine=ENGINE, run=1, step=1, groups=(group,), config_digest="d"),
    )
    assert harness.engine.batch is not None
    assert harness.engine.batch.groups == (group,)


def test_a_command_whose_event_is_too_large_is_refused_and_the_next_one_is_decided() -> None:
    harness = CoreHarness()
    harness.core.live.event_bytes_max = 3000
    large = inbox.Configure(
        id="large", engine=ENGINE, config="x" * 3000, config_digest="d", collection=Collection(batch_size=2), model="m"
    )
    answer = harness.request(large)
    assert isinstance(answer, Refusal)
    assert answer.code == Code.TOO_LARGE
    assert isinstance(harness.configure(Collection(batch_size=2)), Done)


def test_a_batch_that_cannot_be_written_suspends_the_run_with_the_reason() -> None:
    """The server's limit may be lowered after the job was configured."""
    harness = CoreHarness()
    harness.boot(batch_size=1, num_repeat=8)
    harness.core.live.event_bytes_max = 520
    for _ in range(8):
        harness.play("t" * 300, reward=float(len(harness.engine.pool)))
    assert "max_payload" in harness.engine.suspended
    assert len(harness.engine.pool) == 8
    harness.core.live.event_bytes_max = 8 << 20
    harness.request(inbox.Resume(id="resume", engine=ENGINE))
    assert harness.engine.batch is not None


def test_a_job_whose_batches_fit_into_no_message_is_refused() -> None:
    harness = CoreHarness()
    harness.core.live.event_bytes_max = 1 << 20
    answer = harness.configure(Collection(batch_size=1024, num_repeat=8))
    assert isinstance(answer, Refusal)
    assert "lower collection.batch_size" in answer.why
    assert isinstance(harness.configure(Collection(batch_size=512, num_repeat=8)), Done)


def test_what_a_step_says_of_an_episode_takes_no_more_than_what_a_job_is_refused_by() -> None:
    names = [f"{'e' * 32}-{2**31}-{number}" for number in range(2**31, 2**31 + 1000)]
    fates, row = tuple(Fate), (2**31,) * len(Fate)
    said = StepTokens(fates=fates, episodes=dict.fromkeys(names, row), weights=dict.fromkeys(names, 0.1))
    step = inbox.StepDone(
        id="x", engine=ENGINE, run=1, step=1, trainer_epoch=1, checkpoint="", checkpoint_digest="", tokens=said
    )
    assert len(inbox.encode_message(step)) < EPISODE_BYTES * len(names)


def test_very_many_open_episodes_are_aborted_by_several_events_of_one_decision() -> None:
    harness = CoreHarness()
    harness.boot(max_open_claims=100_000)
    for _ in range(3):
        harness.claim(count=NAMES_PER_EVENT - 1)
    decided = harness.send(inbox.Stop(id="stop", engine=ENGINE))
    aborts = [event for event in decided if isinstance(event, ev.EpisodeAborted)]
    assert [len(event.episodes) for event in aborts] == [NAMES_PER_EVENT, NAMES_PER_EVENT, NAMES_PER_EVENT - 3]
    assert harness.phase() == Phase.OFFLINE


def test_a_claim_for_more_episodes_than_one_event_can_name_is_refused() -> None:
    """It would wait for room, and be too large when it is granted."""
    harness = CoreHarness()
    harness.boot(max_open_claims=100_000)
    answer = harness.request(harness.claim_message(count=NAMES_PER_EVENT + 1, wait_s=5.0))
    assert isinstance(answer, Refusal)
    assert answer.code == Code.MALFORMED


async def test_a_message_that_cannot_be_decided_becomes_a_dead_letter_and_the_next_one_is_read(
    bus: Bus, nats_url: str, hive: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def faulty(engine: EngineState, live: Live, message: inbox.Lookup) -> Decisions:
        engine.phase = Phase.OFFLINE  # a state that is half changed must not be led on with
        raise KeyError("a fault of ours")
        yield

    rules: dict[Any, Any] = core._RULES
    monkeypatch.setitem(rules, inbox.Lookup, faulty)
    leading = asyncio.create_task(shell.run(nats_url, hive))
    try:
        await boot(bus)
        granted = await bus.inbox.request(claim("k"))
        assert isinstance(granted, inbox.Granted)
        with pytest.raises(Refused, match="a fault of ours"):
            await bus.inbox.request(inbox.Lookup(id="bad", engine=ENGINE, episode=granted.episodes[0]), 20)
        assert isinstance(await bus.inbox.request(claim("after"), 20), inbox.Granted)
        state = Hive()
        for event in map(decoded, await log_of(bus)):
            evolve(state, event)
        assert [(event.message, event.id) for event in state.aside] == [("lookup", "bad")]
        assert "could not be decided and became a dead letter" in render_status(state)
        assert granted.episodes[0] in state.engine(ENGINE).open
    finally:
        leading.cancel()
        with suppress(asyncio.CancelledError):
            await leading


def record(harness: CoreHarness, episode: str, name: str) -> None:
    noted = NotedCall(episode, CallRef(harness.seq, name, b"d" * 16), 5, 3, 0, 0)
    message = inbox.CallRecorded(id=name, engine=ENGINE, run=harness.engine.run, call=noted)
    harness.seq += 1
    for each in harness.core.receive(message, harness.seq, harness.now_ns):
        harness.log += each.decision.events


def test_a_call_with_an_id_of_any_length_becomes_a_dead_letter_and_the_calls_before_it_are_noted() -> None:
    """The event that noted it was too large for the log, and so was that of every leader after."""
    harness = CoreHarness()
    harness.boot()
    (episode,) = harness.claim()
    record(harness, episode, "short")
    record(harness, episode, "x" * 600_000)
    record(harness, episode, "y" * 600_000)
    assert [type(event) for event in harness.log[-3:]] == [
        ev.CallsNoted,
        ev.MessageDeadLettered,
        ev.MessageDeadLettered,
    ]
    record(harness, episode, "short, too")
    assert isinstance(harness.end(episode), Done)
    assert harness.engine.counters.calls == 2


def test_as_many_calls_are_noted_at_once_as_fit_into_a_message() -> None:
    harness = CoreHarness()
    harness.boot()
    harness.core.live.event_bytes_max = 64_000
    (episode,) = harness.claim()
    for number in range(100):
        record(harness, episode, f"{number}-" + "x" * 300)
    assert isinstance(harness.end(episode), Done)
    noted = [event for event in harness.log if isinstance(event, ev.CallsNoted)]
    assert [len(event.calls) for event in noted] == [31, 31, 31, 7]
