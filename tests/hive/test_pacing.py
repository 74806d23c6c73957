"""How far ahead of training episodes are handed out, and which replicas answer their calls."""

import random
from collections import Counter
from typing import NoReturn

import pytest

from bombus.hive import events as ev
from bombus.hive import inbox
from bombus.hive.collection import BATCH_METHODS, enough, select
from bombus.hive.events import Collection, EpisodeType, Method
from bombus.hive.fold.evolve import evolve
from bombus.hive.pacing import fitting, most_batches, pace
from bombus.hive.state import Completed, EngineState, Episode, Hive, Phase
from tests.coordinator.core_in_memory import ENGINE, CoreHarness
from tests.coordinator.steady_clients import Steady


def completed(name: str, task: str, reward: float) -> Completed:
    return Completed(
        episode=name, task=task, client="c", reward=reward, call_rewards=None, calls=(), oldest=0, bytes=1, ended_ns=0
    )


def engine(rules: Collection, pool: dict[str, int], opened: dict[str, int]) -> EngineState:
    """Return a rolling engine with these numbers of pooled and open episodes by task; "" is for unnamed tasks."""
    configured = ev.EngineConfigured(config="{}", config_digest="d", collection=rules, model="tiny")
    state = EngineState(name=ENGINE, phase=Phase.ROLLING, run=1, version=0, configured=configured, active=configured)
    for task, count in pool.items():
        for index in range(count):
            name = f"{task}-{index}"
            state.pool[name] = completed(name, task, float(index))
            state.by_task.setdefault(task, []).append(name)
    for task, count in opened.items():
        for index in range(count):
            name = f"open-{task}-{index}"
            state.open[name] = Episode(
                id=name, claim=name, client="c", type=EpisodeType.TRAIN, discard_timeout_s=1, claimed_ns=0, version=0,
                task_hint=task,
            )  # fmt: skip
    state.open_tasks = dict(opened)
    return state


TASKS = Method.ENOUGH_TASKS


@pytest.mark.parametrize(
    ("method", "pool", "opened", "batches"),
    [
        (Method.ENOUGH_EPISODES, {"a": 3}, {}, 0),
        (Method.ENOUGH_EPISODES, {"a": 3}, {"": 1}, 1),
        (Method.ENOUGH_EPISODES, {"a": 5, "b": 2}, {"c": 1}, 2),
        (TASKS, {"a": 2, "b": 2}, {}, 1),
        (TASKS, {"a": 4}, {}, 0),  # a task has one group in a batch
        (TASKS, {"a": 4, "b": 2}, {}, 1),
        (TASKS, {"a": 4, "b": 2, "c": 2}, {}, 2),
        (TASKS, {"a": 1, "b": 1, "c": 1}, {}, 0),
        (TASKS, {"a": 1, "b": 1}, {"": 2}, 1),  # counted where they help most
        (TASKS, {"a": 1, "b": 1}, {"c": 2}, 0),  # a named task is taken as it is
        (TASKS, {"a": 1, "b": 1}, {"a": 1, "b": 1}, 1),
        (TASKS, {"a": 2}, {"": 1}, 0),
        (TASKS, {"a": 2}, {"": 2}, 1),  # a group that has not begun yet
        (TASKS, {}, {"": 7}, 1),
        (TASKS, {}, {"": 8}, 2),
    ],
)
def test_how_many_batches_the_pool_and_open_episodes_can_make(
    method: Method, pool: dict[str, int], opened: dict[str, int], batches: int
) -> None:
    rules = Collection(method=method, batch_size=2, num_repeat=2, max_staleness=1)
    assert most_batches(engine(rules, pool, opened)) == batches


def test_full_groups_without_signal_do_not_count_when_they_are_not_trained() -> None:
    rules = Collection(method=Method.ENOUGH_NON_DUMMY_TASKS, batch_size=1, num_repeat=2, max_staleness=1)
    state = engine(rules, {"dull": 2, "lively": 2}, {})
    assert most_batches(state) == 2
    for name in state.by_task["dull"]:
        state.pool[name] = completed(name, "dull", 1.0)
    assert most_batches(state) == 1


def test_without_open_episodes_every_counted_batch_can_be_sealed() -> None:
    """Pacing cannot deadlock: for the pool alone `most_batches` is above zero only when a batch is complete."""
    pick = random.Random(0)
    some = 0
    for _ in range(3000):
        method = pick.choice([method for method in Method if not BATCH_METHODS[method].is_by_agreement])
        rules = Collection(
            method=method,
            batch_size=pick.randint(1, 3),
            num_repeat=pick.randint(2, 3),
            max_staleness=pick.randint(1, 2),
        )
        state = engine(rules, {f"t{n}": pick.randint(1, 5) for n in range(pick.randint(0, 5))}, {})
        batches = most_batches(state)
        some += batches > 1
        assert enough(state, 0) == (batches > 0)
        for step in range(1, 10):
            if not enough(state, 0):
                break
            groups = select(state).groups
            evolve(
                Hive(engines={ENGINE: state}),
                ev.BatchReady(engine=ENGINE, run=1, step=step, groups=groups, config_digest="d"),
            )
            state.step, state.batch = 0, None
            assert step <= batches, "never more than it says"
    assert some > 100


def test_a_synchronous_run_is_not_paced() -> None:
    harness = CoreHarness()
    harness.boot(batch_size=1, num_repeat=1, max_open_claims=9)
    harness.claim(count=9)
    assert pace(harness.engine) is None


# ---- steady clients -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [Method.ENOUGH_EPISODES, TASKS])
@pytest.mark.parametrize(("max_staleness", "episode_s"), [(1, (1.0, 10.0)), (1, (4.0, 6.0)), (2, (10.0, 20.0))])
def test_steady_clients_lose_almost_nothing_and_keep_the_trainer_busy(
    method: Method, max_staleness: int, episode_s: tuple[float, float]
) -> None:
    """Steps take 10 s, and there are enough clients to be faster than the trainer."""
    clients = int(2.5 * 32 * episode_s[1] / 10)
    steady = Steady(0, clients, episode_s, 10.0, method=method, batch_size=8, num_repeat=4, max_staleness=max_staleness)
    steady.run(400)
    assert steady.trained > 1000
    assert steady.dropped < steady.trained / 100
    assert steady.busy_s > 0.9 * 400


@pytest.mark.parametrize("method", [Method.ENOUGH_EPISODES, TASKS])
def test_episodes_longer_than_several_steps_are_waited_for_and_not_dropped(method: Method) -> None:
    """Every claim is granted at the bound, so an episode overtaken by a single batch would be too old."""
    steady = Steady(0, 96, (30.0, 60.0), 10.0, method=method, batch_size=8, num_repeat=4, max_staleness=2)
    steady.run(500)
    assert steady.trained > 500
    assert steady.dropped == 0
    assert_counted(steady.harness.engine)


# ---- what it costs ------------------------------------------------------------------------------------------------


class Unlooked(dict[str, Episode]):
    """Open episodes of which nobody may look at each."""

    def values(self) -> NoReturn:
        raise AssertionError("each open episode was looked at")

    items = __iter__ = values


def assert_counted(engine: EngineState) -> None:
    """Compare what is counted of the open episodes as they come, have calls and go, with the episodes."""
    tasks: Counter[str] = Counter()
    aged: dict[int, Counter[str]] = {}
    for episode in engine.open.values():
        if episode.type == EpisodeType.TRAIN:
            tasks[episode.task_hint] += 1
            if oldest := [call.oldest for call in episode.trainable_calls()]:
                aged.setdefault(min(oldest), Counter())[episode.task_hint] += 1
    assert engine.open_tasks == tasks
    assert engine.open_aged == aged
    assert tasks, "something is open"


def test_a_claim_is_paced_without_a_look_at_each_open_episode() -> None:
    """With thousands of them a look at each took longer than all else that a claim needs."""
    harness = CoreHarness()
    harness.boot(batch_size=1, num_repeat=2, max_staleness=1, max_open_claims=99)
    old = [harness.claim(task_hint=task)[0] for task in ("a", "a", "b")][:2]
    for episode in old:
        harness.call(episode, version=0)
    assert_counted(harness.engine)
    engine = harness.engine
    engine.step = engine.version = 2  # tokens of version 0 are too old for the next batch
    engine.open = Unlooked(engine.open)
    found = pace(engine, 2, "b")
    assert found is not None
    assert found.sealable == 1, "two more of task b; those of task a are too old"
    engine.step = engine.version = 1
    assert most_batches(engine, 1, "b") == 2


# ---- replicas -----------------------------------------------------------------------------------------------------


def lagging() -> CoreHarness:
    """Return an engine whose version 1 is ready: r1 serves it, r2 serves version 0."""
    harness = CoreHarness()
    harness.boot(batch_size=1, num_repeat=1, max_staleness=1, max_open_claims=9)
    harness.send(inbox.ReplicaAlive(id="r2", engine=ENGINE, replica="r2", url="http://r2", run=1, version=0))
    harness.play("a")
    harness.step_done(1)
    harness.save_weights(1)
    harness.load(1, "r1")
    return harness


def test_calls_go_to_replicas_within_the_bound_and_never_before_the_version_of_their_claim() -> None:
    harness = lagging()
    assert set(fitting(harness.engine)) == {"r1", "r2"}
    (early,) = harness.claim()
    harness.load(1, "r2")
    harness.send(inbox.ReplicaAlive(id="r3", engine=ENGINE, replica="r3", url="http://r3"))
    (late,) = harness.claim()
    harness.engine.replicas["r1"].version = 0  # as if it had been restarted
    assert set(fitting(harness.engine, early)) == {"r1", "r2"}
    assert set(fitting(harness.engine, late)) == {"r2"}


def test_a_claim_is_granted_at_the_version_that_every_replica_can_answer_with() -> None:
    harness = lagging()
    (episode,) = harness.claim()
    assert harness.engine.open[episode].version == 0
    harness.load(1, "r2")
    (episode,) = harness.claim()
    assert harness.engine.open[episode].version == 1


def test_weights_that_a_replica_loads_while_newer_ones_appear_count() -> None:
    harness = CoreHarness()
    harness.boot(batch_size=1, num_repeat=1, max_staleness=2, max_open_claims=9)
    for step in (1, 2):
        harness.play("a")
        harness.step_done(step)
        harness.save_weights(step)
    harness.load(1, "r1")
    assert harness.engine.replicas["r1"].version == 1
    assert harness.load(1, "r1") == []
    assert harness.load(0, "r1") == [], "nor does it go back"
    harness.load(2, "r1")
    assert harness.engine.loaded == {"r1"}
