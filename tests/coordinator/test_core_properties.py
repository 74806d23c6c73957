"""Properties of the coordinator's core that hold for any messages in any order, whenever its leader dies.

A seed that fails is named, and `BOMBUS_SEED` runs it alone.
"""

import os
from collections import Counter

import msgspec

from bombus.hive import events as ev
from bombus.hive import inbox
from bombus.hive.events import Method
from bombus.hive.fold.evolve import evolve
from bombus.hive.state import Hive, Phase
from bombus_coordinator.core import Core
from tests.coordinator.core_in_memory import without_ticks
from tests.coordinator.core_world import ENGINE, World
from tests.effort import LONG, effort

RUNS = effort(1000, 10_000)
STEPS = 80


def seeds() -> range:
    only = os.environ.get("BOMBUS_SEED")
    return range(int(only), int(only) + 1) if only else range(RUNS)


def run(seed: int, steps: int = STEPS, crashes: bool = True) -> World:
    try:
        world = World(seed, crashes)
        for _ in range(steps):
            world.step()
        while world.read < len(world.inbox):
            world.decide()
        world.check_nothing_lost()
    except AssertionError as error:
        raise AssertionError(f"BOMBUS_SEED={seed}: {error}") from error
    return world


def test_random_runs_keep_every_guarantee() -> None:
    """No episode is lost or in two batches, batches and phases are as required, and the fold equals the live state.

    The world checks this for each stored event, whatever crashes. This test checks that all of it was exercised.
    """
    seen: Counter[str] = Counter()
    deaths = 0
    for seed in seeds():
        world = run(seed)
        deaths += world.deaths
        seen.update(ev.kind_of(logged.event) for logged in world.log)
    if LONG and "BOMBUS_SEED" not in os.environ:
        assert deaths > RUNS / 10
        never = {kind.__struct_config__.tag for kind in ev.AnyEvent.__args__} - set(seen)
        operations = {
            kind
            for kind in never
            if kind.startswith(
                ("session.", "sampling.", "model.", "operation", "weights.", "endpoint.", "rest.", "episodes.")
            )
        }
        elsewhere = {
            "engine.progressed",
            "message.set_aside",
            "log.compacted",
            "compaction.failed",
            "stream.went_back",
        } | operations
        scored = (
            "trainer.registered",
            "batches.begun",
            "environment.",
            "groups.",
            "bodies.",
            "batch.handed_out",
            "batch.delivered",
        )
        elsewhere |= {kind for kind in never if kind.startswith((*scored, "trajectories."))}
        assert never <= elsewhere, f"the runs never saw {never}"


def test_long_runs_go_through_many_steps() -> None:
    """Run long enough that weights are trained repeatedly."""
    versions = [run(100_000 + seed, steps=1500).fold.engine(ENGINE).counters.trained for seed in range(10)]
    assert max(versions) > 0


def test_a_crash_between_any_two_appends_changes_nothing() -> None:
    """Decide the same inbox with one leader and with many: apart from epochs, the decisions are the same."""
    for seed in range(effort(50, 200)):
        script = [
            (_without_deadlines(message), at_ns)
            for message, at_ns in run(seed, crashes=False).inbox
            # A crash may delay waiting claims: deadlines start again (R5), claims are sent again (R13).
            if not isinstance(message, inbox.Tick) and not (isinstance(message, inbox.Claim) and message.wait_s)
        ]
        script = list({_identity(message): (message, at_ns) for message, at_ns in reversed(script)}.values())[::-1]
        script = [(message, at_ns) for (message, _), at_ns in zip(script, sorted(at_ns for _, at_ns in script))]
        undisturbed = _decisions(script, crash_every=0)
        for crash_every in (1, 3):
            assert _decisions(script, crash_every) == undisturbed, f"seed {seed}, a death every {crash_every}"


def _without_deadlines(message: inbox.AnyMessage) -> inbox.AnyMessage:
    if not isinstance(message, inbox.Configure):
        return message
    patient = msgspec.structs.replace(message.collection, drain_s=1e6)
    return msgspec.structs.replace(message, collection=patient)


def _identity(message: inbox.AnyMessage) -> str:
    return message.claim if isinstance(message, inbox.Claim) else message.id


def _decisions(script: list[tuple[inbox.AnyMessage, int]], crash_every: int) -> list[ev.Event]:
    """Return the events of a script when the leader dies after every `crash_every`-th append (0: never)."""
    log: list[tuple[ev.Event, int]] = []
    core = without_ticks(Core())
    log += [(event, 0) for event in core.open_epoch("x").events]
    position = reached = 0
    while position < len(script):
        message, at_ns = script[position]
        position += 1
        for each in [*core.receive(message, position, at_ns), *core.flush()]:
            log += [(event, each.answers) for event in each.decision.events]
        first_time, reached = position > reached, max(position, reached)
        if crash_every and first_time and position % crash_every == 0:
            hive = Hive()
            for event, _ in log:
                evolve(hive, event)
            position = log[-1][1]  # messages after it made no event and are decided again
            core = without_ticks(Core(hive))
            log += [(event, position) for event in core.open_epoch("y").events]
            log += [(event, position) for decision in core.recover() for event in decision.events]
    return [event for event, _ in log if not isinstance(event, ev.EpochOpened)]


def test_every_prefix_of_a_log_folds_to_a_phase_and_a_pool_that_add_up() -> None:
    world = run(7, steps=800)
    hive = Hive()
    for logged in world.log:
        evolve(hive, logged.event)
        engine = hive.engine(ENGINE)
        assert engine.phase in Phase
        assert sorted(engine.pool) == sorted(episode for group in engine.by_task.values() for episode in group)
        assert engine.pool_bytes == sum(completed.bytes for completed in engine.pool.values())
        assert set(engine.claims) == {episode.claim for episode in engine.open.values()}


def test_an_asynchronous_run_makes_progress_from_any_state() -> None:
    """No claim waits forever: correct clients, a trainer and a replica make further steps from any state."""
    tried = 0
    for seed in range(RUNS // 10):
        world = run(200_000 + seed, steps=120)
        engine = world.fold.engine(ENGINE)
        rules = engine.collection
        never = (
            rules.method == Method.ENOUGH_NON_DUMMY_TASKS and rules.num_repeat == 1
        )  # a group of one never has a signal
        if rules.max_staleness == 0 or engine.phase != Phase.ROLLING or never:
            continue
        tried += 1
        try:
            world.calm(steps=3)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
    if LONG and "BOMBUS_SEED" not in os.environ:
        assert tried > RUNS / 200
