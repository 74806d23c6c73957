"""`bombus replay what-if`: the same facts under other rules."""

from collections.abc import AsyncGenerator, Sequence

import pytest

from bombus.bus import Stored
from bombus.hive import events as ev
from bombus.hive.events import Collection, DropReason, Event, Method, Outcome
from bombus.hive.state import Hive
from bombus.replay.running import BadUsage
from bombus.replay.source import LogEnd, NotOnLog, Source
from bombus_coordinator.what_if import compare, render
from tests.coordinator.test_core_properties import run as random_run

ENGINE = "main"
SECOND = 1_000_000_000


class Given(Source):
    """A log given by a test."""

    def __init__(self, events: Sequence[Event]) -> None:
        self.title, self.hive, self._events = "a log", "h", list(events)

    async def base(self) -> tuple[Hive, int]:
        return Hive(), 0

    async def end(self) -> LogEnd:
        return LogEnd(len(self._events), 0)

    async def stored(self, after: int = 0, until: int | None = None) -> AsyncGenerator[Stored, None]:
        for seq, event in enumerate(self._events[after:until], after + 1):
            yield Stored(seq, "", ev.encode_event(event), {"Bombus-Epoch": "1", "Bombus-Inbox": str(seq)}, seq)

    async def messages(self, stream: str, seqs: Sequence[int]) -> list[bytes | None]:
        return [None] * len(seqs)

    async def blob(self, name: str) -> bytes:
        raise AssertionError(f"{name} is not needed")


def run_of(rewards: Sequence[tuple[str, float]], **rules: object) -> list[Event]:
    """Return a run in which one episode per second is claimed and ended; `rewards` has (task, reward) of each."""
    collection = Collection(**{"batch_size": 1, "num_repeat": 2, **rules})  # type: ignore[arg-type]
    events: list[Event] = [
        ev.EpochOpened(epoch=1, leader="x"),
        ev.EngineConfigured(engine=ENGINE, config="{}", config_digest="d", collection=collection, model="tiny"),
        ev.EngineStarted(engine=ENGINE, run=1, config_digest="d"),
        ev.RollingStarted(engine=ENGINE, run=1, version=0),
    ]
    for number, (task, reward) in enumerate(rewards, 1):
        name, at_ns = f"{ENGINE}-1-{number}", number * SECOND
        outcome = Outcome(episode=name, task=task, reward=reward, digest=b"d")
        claim = ev.EpisodeClaimed(at_ns=at_ns, engine=ENGINE, run=1, claim=name, client="c", episodes=(name,))
        events += [claim, ev.EpisodeEnded(at_ns=at_ns, engine=ENGINE, run=1, client="c", outcomes=(outcome,))]
    return events


async def test_other_sizes_make_other_batches_of_the_same_episodes() -> None:
    log = Given(run_of([("a", 0.0), ("a", 1.0), ("b", 0.0), ("b", 1.0)]))
    larger = (await compare(log, ENGINE, None, {"batch_size": 2})).would_be
    assert [(batch.step, batch.position, batch.tasks, batch.episodes) for batch in larger.batches] == [(1, 12, 2, 4)]
    halves = (await compare(log, ENGINE, None, {})).would_be
    assert [(batch.step, batch.position, batch.reward) for batch in halves.batches] == [(1, 8, 0.5), (2, 12, 0.5)]


async def test_another_method_leaves_out_tasks_without_signal() -> None:
    log = Given(run_of([("a", 1.0), ("a", 1.0), ("b", 0.0), ("b", 1.0)]))
    tried = (await compare(log, ENGINE, 1, {"method": Method.ENOUGH_NON_DUMMY_TASKS})).would_be
    assert [batch.position for batch in tried.batches] == [12]
    assert tried.dropped == {DropReason.NO_SIGNAL: 2}
    assert (tried.ended, tried.left) == (4, 0)


async def test_an_episode_that_waits_too_long_is_dropped_by_its_simulated_age() -> None:
    log = Given(run_of([("old", 1.0), *(("a", float(n % 2)) for n in range(8))]))
    patient = (await compare(log, ENGINE, 1, {"max_carry_staleness": 9})).would_be
    assert (patient.left, patient.dropped) == (1, {})
    strict = (await compare(log, ENGINE, 1, {"max_carry_staleness": 1})).would_be
    assert (strict.left, strict.dropped) == (0, {DropReason.STALE: 1})
    assert len(strict.batches) == 4


async def test_synchronous_and_asynchronous_runs_can_be_compared() -> None:
    rewards = [("old", 1.0), *(("a", float(n % 2)) for n in range(8))]
    for was in (0, 2):
        log = Given(run_of(rewards, max_staleness=was))
        strict = (await compare(log, ENGINE, 1, {"max_staleness": 1})).would_be
        assert (len(strict.batches), strict.left, strict.dropped) == (4, 0, {DropReason.STALE: 1})
        patient = (await compare(log, ENGINE, 1, {"max_staleness": 9})).would_be
        assert (len(patient.batches), patient.left, patient.dropped) == (4, 1, {})


async def test_rules_that_no_engine_accepts_are_refused() -> None:
    log = Given(run_of([("a", 0.0)], max_staleness=1))
    with pytest.raises(BadUsage, match="--max-staleness 0"):
        await compare(log, ENGINE, 1, {"method": Method.ANY_CLIENT_AGREES})


async def test_votes_on_the_log_count() -> None:
    events = run_of([("a", 0.0), ("b", 1.0)], method=Method.ANY_CLIENT_AGREES)
    events.append(ev.SyncAgreed(at_ns=3 * SECOND, engine=ENGINE, run=1, client="c"))
    tried = (await compare(Given(events), ENGINE, 1, {})).would_be
    assert [(batch.position, batch.episodes) for batch in tried.batches] == [(9, 2)]


async def test_every_ended_episode_of_a_random_run_is_in_a_batch_dropped_or_left() -> None:
    """This holds for the run as it was and as it would have been, under any rules."""
    tried = 0
    for seed in range(40):
        log = Given([logged.event for logged in random_run(seed, steps=400).log])
        variants: tuple[dict[str, object], ...] = (
            {},
            {"method": Method.ENOUGH_EPISODES},
            {"num_repeat": 3},
            {"max_carry_staleness": 0},
        )
        for changes in variants:
            compared = await compare(log, ENGINE, None, changes)
            for result in (compared.was, compared.would_be):
                used = sum(batch.episodes for batch in result.batches)
                assert result.ended == used + result.left + sum(result.dropped.values())
            tried += len(compared.would_be.batches)
            assert f"run {compared.run} of engine main" in "\n".join(render(compared))
    assert tried > 40


async def test_a_run_that_is_not_on_the_log_is_reported() -> None:
    with pytest.raises(NotOnLog, match="run 7"):
        await compare(Given(run_of([])), ENGINE, 7, {})
    with pytest.raises(NotOnLog, match="never been started"):
        await compare(Given(run_of([])), "other", None, {})
