"""Retention of calls (R12): what keeps them, that no needed call is purged, and a run that would overflow without."""

import asyncio
from collections.abc import Sequence

import pytest

from bombus.bus import Bus
from bombus.config.streams import StreamLimits
from bombus.errors import LogCorrupted
from bombus.hive import events as ev
from bombus.hive import inbox
from bombus.hive.events import Collection, EpisodeType, NotedCall, Weights
from bombus.hive.fold.evolve import evolve
from bombus.hive.pins import HeldCalls
from bombus.hive.records import CallRef, digest
from bombus.hive.state import STEPS_NEEDED, EngineState, Hive
from bombus_coordinator.retention import FILL_FOR_REPLAY, Floor, Purge, floor, floors_of, floors_of_holders, run
from tests.coordinator.core_in_memory import ENGINE, CoreHarness
from tests.coordinator.core_world import World
from tests.coordinator.test_shell import boot, claim, end, leading
from tests.coordinator.test_trained_trajectories import TrainedHarness, grouped
from tests.patience import PATIENCE_S

MB = 1 << 20
RECORD_BYTES = 100 << 10
CALLS_BYTES_MAX = 4 * MB
LIMITS = StreamLimits(
    inbox_bytes_max=64 * MB,
    events_bytes_max=64 * MB,
    calls_bytes_max=CALLS_BYTES_MAX,
    ops_bytes_max=16 * MB,
    trajectories_bytes_max=16 * MB,
    blobs_bytes_max=MB,
)


def call(harness: CoreHarness, episode: str, seq: int, run: int = 0) -> None:
    noted = NotedCall(episode, CallRef(seq, f"call{seq}", b"d" * 16), 5, 3, 0, 0)
    harness.send(inbox.CallRecorded(id=f"reported{seq}", engine=ENGINE, run=run or harness.engine.run, call=noted))


def play(harness: CoreHarness, seq: int, task: str = "t1", **more: object) -> None:
    """Play an episode of one call."""
    (episode,) = harness.claim(**more)  # type: ignore[arg-type]
    call(harness, episode, seq)
    harness.end(episode, task)


def harness(**rules: object) -> CoreHarness:
    """Boot an engine with steps of two episodes of one task and, by default, without a replay window."""
    harness = CoreHarness()
    harness.boot(**{"batch_size": 1, "num_repeat": 2, "replay_steps": 0, **rules})  # type: ignore[arg-type]
    return harness


def settled(**rules: object) -> CoreHarness:
    """Return one that has made three steps of the calls 10 to 15, and evaluations up to call 100 since."""
    given = harness(**rules)
    for first in (10, 12, 14):
        play(given, first)
        play(given, first + 1)
        given.train()
    play(given, 100, type=EpisodeType.EVAL)
    return given


def test_an_open_episode_keeps_calls_that_were_not_noted_at_its_claim() -> None:
    given = settled()
    for first in (101, 103, 105):  # the steps before are covered by both checkpoints
        play(given, first)
        play(given, first + 1)
        given.train()
    assert floor(given.engine).needed == 102  # the newest two steps were claimed after 102 and 104
    (old,) = given.claim()
    for seq in range(200, 206):
        play(given, seq, type=EpisodeType.EVAL)
    call(given, old, 206)
    assert given.engine.open[old].calls_from == 106
    given.end(old)
    assert given.engine.pool[old].calls_from == 106, "the pool holds what the episode held"


def test_calls_of_all_steps_that_the_older_of_two_checkpoints_lacks_are_needed() -> None:
    given = harness()
    floors = []
    for step in range(1, 10):
        play(given, 10 * step)
        play(given, 10 * step + 1)
        given.train(saved=step % 3 == 0)
        floors.append(floor(given.engine).needed)
    assert floors[:5] == [0] * 5, "until there are two, the model as loaded is the older one"
    assert floors[5:8] == [31] * 3, "step 4 was claimed after call 31"
    assert floors[8] == 61


def test_a_call_reported_late_is_after_its_episodes_claim() -> None:
    """It is stored at 101 and reported after call 102 of another gateway."""
    given = settled()
    slow, quick = given.claim(count=2)
    call(given, quick, 102)
    assert floor(given.engine).needed <= 101
    given.end(quick)
    assert floor(given.engine).needed <= 101
    call(given, slow, 101)
    assert given.engine.open[slow].calls_from == 100


def test_steps_that_the_older_checkpoint_lacks_are_kept_and_so_is_the_outstanding_one() -> None:
    given = settled()
    assert floor(given.engine).needed == 11  # of steps 2 and 3; call 11 was the last before step 2's claims
    play(given, 101)
    play(given, 102)
    assert given.engine.batch is not None
    assert floor(given.engine).needed == 13, "step 4 is outstanding: checkpoints 2 and 3 are there, 2 is the older"
    given.train()
    assert floor(given.engine).needed == 13


def test_calls_of_the_newest_steps_are_kept_for_replay() -> None:
    assert floor(settled(replay_steps=3).engine).kept == 0, "the first step was claimed before any call"
    given = settled(replay_steps=3)
    play(given, 101)
    play(given, 102)
    assert floor(given.engine) == Floor(kept=11, needed=13)
    assert floor(settled(replay_steps=4).engine).kept == 0, "with fewer steps than that everything is kept"
    assert floor(settled(replay_steps=0).engine).kept == floor(settled(replay_steps=0).engine).needed


def test_a_new_run_keeps_the_last_runs_calls_for_replay() -> None:
    given = settled(replay_steps=4)
    before = floor(given.engine)
    given.send(inbox.Stop(id="stop", engine=ENGINE))
    given.configure(Collection(batch_size=1, num_repeat=2, replay_steps=4))
    given.send(inbox.Start(id="again", engine=ENGINE))
    assert given.engine.run == 2
    assert before == Floor(kept=0, needed=11)
    assert floor(given.engine) == Floor(kept=0, needed=100), "and needs none of them"


def test_a_run_that_makes_no_steps_needs_no_calls_of_an_earlier_run() -> None:
    given = TrainedHarness(replay_steps=3)
    given.roll()
    for step in (1, 2, 3):
        given.push_batch()
        given.step_done(step)
        given.save_weights(step)
        given.load(step)
    given.request(inbox.Stop(id="stop", engine=ENGINE))
    given.configure(Collection(episode_groups=True, num_repeat=2, replay_steps=3))
    given.roll()
    for number in range(6):
        given.play(f"t{number // 2}")
        if number % 2:
            grouped(given, given.group())
    assert floor(given.engine) == Floor(kept=0, needed=given.engine.newest_call)


def test_late_calls_and_those_of_another_run_do_not_move_the_floor() -> None:
    given = settled()
    before = floor(given.engine)
    call(given, "main-1-1", 3)
    call(given, "main-0-1", 4, run=7)
    assert given.engine.newest_call == 100
    assert floor(given.engine) == before


def test_after_a_power_cut_reused_sequences_are_kept() -> None:
    """The stream ended at 100 and continues after 90 (R6)."""
    given = settled()
    (episode,) = given.claim()
    call(given, episode, 91)
    assert given.engine.open[episode].calls_from == 91
    assert given.engine.newest_call == 91, "calls of new claims come after the current end of the stream"


def test_an_engine_without_calls_does_not_hold_up_others() -> None:
    hive = Hive(engines={"a": EngineState(name="a", newest_call=9), "b": EngineState(name="b")})
    assert floors_of(hive) == {"a": Floor(kept=0, needed=9)}


class Gateways(World):
    """Calls get their sequence when they are stored and are reported in any order, some of them much later."""

    def __init__(self, seed: int) -> None:
        self.stored = 0
        self.unreported: list[inbox.CallRecorded] = []
        super().__init__(seed)

    def _record(self, engine: EngineState, episode: str) -> None:
        self.stored += 1
        ref = CallRef(self.stored, f"call{self.stored}", b"d" * 16)
        call = NotedCall(episode, ref, 5, 3, engine.version, engine.version)
        self.unreported.append(inbox.CallRecorded(id=self._id(), engine=ENGINE, run=engine.run, call=call))
        while self.unreported and self.random.random() < 0.6:
            self._send(self.unreported.pop(self.random.randrange(len(self.unreported))))


def needed(engine: EngineState, steps: Sequence[ev.BatchReady]) -> set[int]:
    """Return the calls that may be read: of open episodes, the pool, and the steps that a restart may repeat."""
    found = {noted.ref.seq for episode in engine.open.values() for noted in episode.calls}
    found |= {ref.seq for completed in engine.pool.values() for ref in completed.calls}
    done = engine.step_done.step if engine.step_done is not None else 0
    found |= {
        ref.seq
        for batch in steps
        if batch.run == engine.run and batch.step > done - 1
        for group in batch.groups
        for episode in group.episodes
        for ref in episode.calls
    }
    return found


def needed_by(engine: EngineState, calls: HeldCalls, steps: Sequence[ev.BatchReady]) -> set[int]:
    """Return those of the episodes of one holder."""
    pool = {name: [ref.seq for ref in each.calls] for name, each in engine.pool.items()}
    opened = {name: [call.ref.seq for call in each.calls] for name, each in engine.open.items()}
    found = {seq for name in calls.pins for seq in (*pool.get(name, ()), *opened.get(name, ()))}
    return found | {
        ref.seq
        for batch in steps
        for group in batch.groups
        for each in group.episodes
        for ref in each.calls
        if each.episode in calls.pins
    }


def test_r12_no_call_below_an_earlier_floor_is_ever_needed() -> None:
    """Purge at every position of random logs, with crashes, stops and calls that are reported late."""
    purged = most = kept_longer = 0
    for seed in range(150):
        world = Gateways(seed)
        for _ in range(500):
            world.step()
        hive, gone, steps = Hive(), 0, list[ev.BatchReady]()
        gone_of: dict[str, int] = {}  # by holder
        for position, logged in enumerate(world.log, start=1):
            evolve(hive, logged.event)
            engine = hive.engine(ENGINE)
            if isinstance(logged.event, ev.BatchReady):
                steps.append(logged.event)
            lost = {seq for seq in needed(engine, steps[-STEPS_NEEDED:]) if seq < gone}
            assert not lost, f"seed {seed}, event {position}: calls {sorted(lost)} were purged below {gone}"
            assert floor(engine).kept <= floor(engine).needed
            gone = max(gone, floor(engine).needed)
            of_holders = floors_of_holders(hive)
            for holder, calls in engine.calls.holders.items():
                lost = {seq for seq in needed_by(engine, calls, steps[-STEPS_NEEDED:]) if seq < gone_of.get(holder, 0)}
                assert not lost, f"seed {seed}, event {position}: calls {sorted(lost)} of {holder!r} were purged"
                gone_of[holder] = max(gone_of.get(holder, 0), of_holders[ENGINE, holder].needed)
                kept_longer += of_holders[ENGINE, holder].needed > gone
        purged += gone
        most += world.stored
    assert purged > most / 5, "and many of them were purged"
    assert kept_longer > 1_000, "and nobody keeps the calls of others"


async def fill(bus: Bus, engine: str, count: int, size: int = 64 << 10) -> int:
    """Store calls of an engine and return the sequence of the last one."""
    for number in range(count):
        ack = await bus.publisher.publish(
            bus.subjects.call(engine, ""), b"x" * size, msg_id=f"{engine}-{size}-{number}"
        )
    return ack.seq


async def test_r12_calls_kept_only_for_replay_are_purged_when_the_stream_is_over_half_full(bus: Bus) -> None:
    await bus.ensure_streams(LIMITS)
    stream = bus.subjects.calls_stream
    await fill(bus, "a", 24)
    purge = Purge(bus)
    await purge.below({"a": Floor(kept=0, needed=20)})
    assert (await bus.state(stream)).first_seq == 1, "there is room"
    await purge.below({"a": Floor(kept=3, needed=20)})
    assert (await bus.state(stream)).first_seq == 3, "calls outside the window are purged in any case"
    last = await fill(bus, "a", 24, size=65 << 10)
    for _ in range(40):
        await purge.below({"a": Floor(kept=3, needed=last)})
    state = await bus.state(stream)
    assert 0.35 < state.fill <= FILL_FOR_REPLAY, "as much of the window is kept as there is room for"
    await fill(bus, "a", 30, size=66 << 10)
    for _ in range(40):
        await purge.below({"a": Floor(kept=3, needed=last)})
    assert (await bus.state(stream)).first_seq == last, "needed calls stay, however full the stream is"


async def test_an_idle_engine_keeps_only_its_own_calls(bus: Bus) -> None:
    await bus.ensure_streams(LIMITS)
    rested = await fill(bus, "resting", 2)
    last = await fill(bus, "busy", 40)
    purge = Purge(bus)
    for _ in range(40):
        await purge.below({"resting": Floor(kept=1, needed=1), "busy": Floor(kept=1, needed=last)})
    state = await bus.state(bus.subjects.calls_stream)
    assert (state.first_seq, state.last_seq) == (1, last)
    assert state.fill <= FILL_FOR_REPLAY
    assert len((await bus.get(bus.subjects.calls_stream, rested)).data) == 64 << 10
    with pytest.raises(LogCorrupted):
        await bus.get(bus.subjects.calls_stream, rested + 1)


async def test_nothing_is_purged_from_a_stream_that_has_lost_its_end(bus: Bus) -> None:
    last = await fill(bus, "a", 8)
    await Purge(bus).below({"a": Floor(kept=last + 1, needed=last + 1)})
    assert (await bus.state(bus.subjects.calls_stream)).messages == 8


async def test_a_state_that_is_not_stored_purges_nothing(bus: Bus) -> None:
    last = await fill(bus, "a", 8)
    hive = Hive(engines={"a": EngineState(name="a", newest_call=last, steps_from=[last] * 1000)})
    looks = 0
    looked = asyncio.Event()
    position = 5

    def stored() -> int:
        nonlocal looks
        looks += 1
        if looks == 10:
            looked.set()
        return position

    task = asyncio.create_task(run(bus, lambda: hive, stored, period_s=0.01))
    async with asyncio.timeout(PATIENCE_S):
        await looked.wait()
        assert (await bus.state(bus.subjects.calls_stream)).first_seq == 1
        position = 6  # the append is stored
        while (await bus.state(bus.subjects.calls_stream)).first_seq != last:
            await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def episode(bus: Bus, name: str) -> None:
    """Do what a client and a gateway do for one episode of two calls of 100 KB."""
    granted = await bus.inbox.request(claim(name, wait_s=5))
    assert isinstance(granted, inbox.Granted)
    for turn in range(2):
        call_id = f"{name}.{turn}"
        body = call_id.encode() * (RECORD_BYTES // len(call_id))
        while (await bus.state(bus.subjects.calls_stream)).fill > 0.9:  # gateways refuse
            await asyncio.sleep(0.01)
        ack = await bus.publisher.publish(bus.subjects.call(ENGINE, ""), body, msg_id=call_id)
        noted = NotedCall(granted.episodes[0], CallRef(ack.seq, call_id, digest(body)), 5, 3, 0, 0)
        await bus.inbox.send(inbox.CallRecorded(id=call_id, engine=ENGINE, run=1, call=noted))
    await bus.inbox.request(end(granted.episodes[0], 1.0))


async def train(bus: Bus, batch: ev.BatchReady) -> None:
    """Do what a trainer and a replica do for one step, which reads the batch's calls back."""
    refs = [ref for group in batch.groups for episode in group.episodes for ref in episode.calls]
    stored = await bus.get_many(bus.subjects.calls_stream, [ref.seq for ref in refs])
    assert [digest(each.data) for each in stored] == [ref.digest for ref in refs]
    step = batch.step
    facts: tuple[inbox.Message, ...] = (
        inbox.StepDone(
            id=f"done{step}", engine=ENGINE, run=1, step=step, trainer_epoch=1, checkpoint="/c", checkpoint_digest="d"
        ),
        inbox.WeightsSaved(
            id=f"saved{step}", engine=ENGINE, run=1, step=step, trainer_epoch=1, weights=Weights(where="/w")
        ),
        inbox.WeightsLoadedFact(id=f"loaded{step}", engine=ENGINE, run=1, version=step, replica="r1"),
    )
    for fact in facts:
        await bus.inbox.send(fact)


async def test_a_run_whose_calls_would_overfill_the_stream_continues(bus: Bus) -> None:
    """Thirty steps make three times as much as the stream takes, all of it inside the replay window."""
    await bus.ensure_streams(LIMITS)
    async with leading(bus, trim_s=0.02) as coordinator, asyncio.timeout(PATIENCE_S):
        await boot(bus)
        for number in range(1, 31):
            await episode(bus, f"{number}-a")
            await episode(bus, f"{number}-b")
            engine = coordinator.core.hive.engine(ENGINE)
            assert engine.batch is not None
            assert len(engine.batch.groups[0].episodes) == 2
            await train(bus, engine.batch)
    state = await bus.state(bus.subjects.calls_stream)
    assert state.last_seq * RECORD_BYTES > 2.5 * CALLS_BYTES_MAX
    assert state.first_seq <= engine.steps_from[-STEPS_NEEDED], "the newest two steps can be made again"


async def test_a_server_that_refuses_the_purge_does_not_stop_the_coordinator(bus: Bus) -> None:
    """The stream of calls was deleted, which must not stop the task that trims it."""
    await bus.requests.request(f"$JS.API.STREAM.DELETE.{bus.subjects.calls_stream}")
    hive = Hive(engines={"a": EngineState(name="a", newest_call=5)})
    position = 0
    looked = asyncio.Event()

    def stored() -> int:
        nonlocal position
        position += 1
        if position == 7:
            looked.set()
        return position

    task = asyncio.create_task(run(bus, lambda: hive, stored, period_s=0.001))
    async with asyncio.timeout(PATIENCE_S):
        await looked.wait()
    assert not task.done()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
