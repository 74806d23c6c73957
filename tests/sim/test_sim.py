"""Simulate many whole hives in virtual time, each from one seed: the guarantees hold, and mistakes are found.

`make sim SEEDS=...` tries more; a seed that fails names the command that replays it.
"""

import os
import subprocess
import sys
from collections import Counter

import pytest

from bombus.hive import events as ev
from tests.effort import LONG, effort, long_only
from tests.sim.faults import Fault
from tests.sim.variants import Variant
from tests.sim.world import GROUPED, LOSING, MORTAL, MULTI_MODEL, OPERATING, SCORING, simulate, tally

SEEDS = effort(60, 1000)
VARIANT_SEEDS = 1000
OF_EACH_KIND = effort(10, 100) * OPERATING
SCORING_SEEDS = range(SCORING, OF_EACH_KIND, OPERATING)  # those of hives that take rollout groups
GROUPED_SEEDS = range(GROUPED, OF_EACH_KIND, OPERATING)  # those of hives that make rollout groups of episodes
LOSING_SEEDS = range(LOSING, OF_EACH_KIND, OPERATING)  # those of hives whose inbox loses its end
OPERATING_SEEDS = range(OPERATING - 1, OF_EACH_KIND, OPERATING)  # those of hives with training operations
MULTI_MODEL_SEEDS = range(MULTI_MODEL, OF_EACH_KIND, OPERATING)  # those of hives with multi-model episodes
MORTAL_SEEDS = range(MORTAL, OF_EACH_KIND, OPERATING)  # those of hives with clients that die
# Fault rates that find a variant which the usual ones find only in one of thousands of seeds.
RATES = {
    Variant.STEPS_PURGED: {Fault.LOST_CHECKPOINT: 0.3, Fault.KILL: 0.3},
    Variant.SWEPT_ALL: {Fault.SLOW: 0.2, Fault.ZOMBIE: 0.3},
    Variant.OLD_EXECUTOR: {Fault.ZOMBIE: 0.3, Fault.BROKEN_STEP: 0.3, Fault.LATE: 0.1, Fault.STOP: 0.3},
}
# Seeds shortly before those that find a rare variant, as `tests.sim --variant` prints them. The search starts there,
# and goes on with all others.
STARTS = {
    Variant.NO_EPOCH_FENCE: 105,
    Variant.START_EARLY: 23,
    Variant.WENT_ON: 40,
    Variant.PURGE_EARLY: 5,
    Variant.STEPS_PURGED: 45,
    Variant.OLD_EXECUTOR: 655,
    Variant.OLD_TRAINER: 28,
    Variant.TRAINED_ON: 32,
    Variant.GAVE_UP: 14,
    Variant.SWEPT_ALL: 265,
}
GIVING_UP = 479  # a hive that gives up operations which end their trainers: one in thirty does
# Among them 270, with which a trainer that removes too much is found.
SWEPT_SEEDS = range(effort(265, 230), effort(275, 310))


def test_many_hives_keep_every_guarantee_through_crashes_partitions_and_clock_jumps() -> None:
    """No acknowledged call, end or step is lost or counted twice, and after the faults every client is served.

    The referee and the world check this while it happens. This test checks that all kinds of events did happen.
    """
    seen: Counter[str] = Counter()
    with_a_step = 0
    for seed in range(SEEDS):
        counts = tally(simulate(seed))
        with_a_step += counts["step.completed"] > 1
        seen += counts
    assert with_a_step > SEEDS / 2, (
        "most runs make a step during the faults, besides the one that is required after them"
    )
    assert seen["step.completed"] > 2 * SEEDS
    assert seen["deposed"] > SEEDS / 2
    assert seen["epoch.opened"] > 2 * SEEDS
    assert seen["began at a snapshot"] > SEEDS / 2
    assert seen["states compared"] > 50 * SEEDS
    assert seen["answered again"] > SEEDS / 2
    assert seen["calls acknowledged"] > 10 * SEEDS
    assert seen["ends acknowledged"] > 5 * SEEDS
    assert seen["rewarded by call"] > SEEDS / 2, "episodes of several calls"
    assert seen["calls purged"] > SEEDS / 2
    assert seen["bytes pinned"] > 100_000 * SEEDS, "they are counted again at each comparison"
    assert seen["steps made again to the bytes on the log"] > SEEDS / 20, "some checkpoints are some steps apart"
    assert seen["trainers that hung"] > SEEDS / 40
    assert seen["sealed with episodes open"] > SEEDS / 2, "asynchronous runs are among them"
    assert seen["sampled before the step's version"] > SEEDS
    assert seen["dropped while rolling"] < seen["trained while rolling"] / 4, "whatever the faults"
    check_rare(seen, "begun at a checkpoint", "begun anew beside another job", "checkpoints passed over")
    check_rare(seen, "silent trainers", "resumed by a replica", "the old leader wrote in between")
    kinds = set(ev.AnyEvent.__args__) - {ev.MessageDeadLettered}  # which takes a fault of ours
    check_rare(seen, *map(ev.kind_of, kinds), *(fault.name for fault in Fault))


def check_rare(seen: Counter[str], *what: str) -> None:
    """Check that all of this did happen, for which few hives are not enough."""
    assert not LONG or [each for each in what if not seen[each]] == []


def test_r17_operations_are_executed_in_the_order_of_the_log_and_completed_once_through_crashes_and_repeats() -> None:
    """Each result is that of the model after exactly the operations before it: the ledger works out all of them."""
    seen: Counter[str] = Counter()
    seeds = [*OPERATING_SEEDS, GIVING_UP]
    for seed in seeds:
        seen += tally(simulate(seed))
    hives = len(seeds)
    assert seen["operations executed"] > 20 * hives
    assert seen["operations executed again"] > hives, "after a trainer was lost"
    assert seen["operations acknowledged"] > seen["operations executed"] / 2
    assert seen["operations that failed"] > hives / 2
    assert seen["ends of sampled episodes acknowledged"] > hives / 2
    assert seen["episodes.taken"] > hives / 2
    assert seen["operations purged"] > hives
    assert seen["operations given up"] > 0
    assert seen["model.remaking"] > hives
    check_rare(seen, "models that ended with operations waiting", "operations executed again in doubt")
    check_rare(seen, "loads of what was removed", "removals refused")
    refusals = ("quota", "body_gone", "storage_full", "unknown_model")
    check_rare(seen, *(f"operations refused: {refused}" for refused in refusals))


ALIKE = [830 + SCORING, 830 + GROUPED, 830 + MULTI_MODEL]


@pytest.mark.parametrize("seed", [3, 840 + OPERATING - 1, *(pytest.param(seed, marks=long_only) for seed in ALIKE)])
def test_a_seed_has_the_same_history_in_every_process(seed: int) -> None:
    """One that fails can be replayed: nothing depends on the order of a set or on an address."""
    histories = [_history(seed, hashing) for hashing in ("1", "2")]
    assert len(histories[0]) > 50
    assert histories[0] == histories[1]


def _history(seed: int, hashing: str) -> list[str]:
    command = [sys.executable, "-m", "tests.sim", "--seed", str(seed), "--verbose"]
    environment = {**os.environ, "PYTHONHASHSEED": hashing}
    printed = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
    *history, seconds = printed.splitlines()
    assert seconds.startswith("1 seeds in")
    return history


def test_r16_acknowledged_groups_are_in_one_batch_each_and_batches_are_repeated_until_they_arrive() -> None:
    """The ledger checks it for each event, whatever is killed, cut off or sent again."""
    seen: Counter[str] = Counter()
    for seed in SCORING_SEEDS:
        seen += tally(simulate(seed))
    hives = len(SCORING_SEEDS)
    assert seen["pushes acknowledged"] > 20 * hives
    assert seen["batch.handed_out"] > 10 * hives
    assert seen["batch.delivered"] > 10 * hives
    assert seen["batches that were cut off"] > hives
    assert seen["groups purged"] > hives
    assert seen["groups given up"] > hives / 4
    assert seen["bodies.moved"] > hives
    check_rare(seen, "batches received again", "pushes that came again late", "groups.reset", "environment.left")
    check_rare(seen, "pushes refused: body_gone", "pushes refused: storage_full", "groups given up to make room")


def test_r16_each_ended_episode_is_in_one_group_at_most_and_each_group_is_taken_once_and_in_time() -> None:
    """The ledger checks it for each event, and that claims keep pace with the trainer, ours or an outside one."""
    seen: Counter[str] = Counter()
    for seed in GROUPED_SEEDS:
        seen += tally(simulate(seed))
    hives = len(GROUPED_SEEDS)
    assert seen["ends of grouped episodes acknowledged"] > 15 * hives
    assert seen["episodes in groups"] > 10 * hives
    assert seen["steps of groups of episodes"] > 2 * hives
    assert seen["batches of groups of episodes"] > 2 * hives
    assert seen["groups that waited too long"] > hives / 4
    assert seen["claimed while a batch is under way"] > hives / 4
    check_rare(seen, "episodes dropped: stale", "episodes dropped: unfit")


def test_r13_the_episodes_of_a_multi_model_one_are_open_ended_or_aborted_together_whatever_is_killed() -> None:
    """The ledger checks it after each append, and that every acknowledged grant and end is on the log as a whole."""
    seen: Counter[str] = Counter()
    for seed in MULTI_MODEL_SEEDS:
        seen += tally(simulate(seed))
    hives = len(MULTI_MODEL_SEEDS)
    assert seen["multi-model grants acknowledged"] > 2 * hives
    assert seen["multi-model ends acknowledged"] > 2 * hives
    assert seen["multi-model episodes aborted"] > hives / 2


def test_r6_whatever_is_acknowledged_after_the_inbox_lost_its_end_counts_and_the_hive_goes_on() -> None:
    """The referee checks it for each event, and that what the log has is not decided again."""
    seen: Counter[str] = Counter()
    for seed in LOSING_SEEDS:
        seen += tally(simulate(seed))
    hives = len(LOSING_SEEDS)
    assert seen["ends of the inbox that were lost"] > hives
    assert seen["stream.went_back"] > hives / 2
    assert seen["lost ends found at work"] > hives / 2
    assert seen["calls acknowledged"] > 10 * hives


def test_r5_the_episodes_of_a_dead_client_are_freed_and_those_of_one_that_lives_only_where_it_was_silent() -> None:
    """The ledger checks each silence, and the world that nothing of a dead client is open after the faults."""
    seen: Counter[str] = Counter()
    for seed in MORTAL_SEEDS:
        seen += tally(simulate(seed))
    assert seen["episodes of silent clients"] > len(MORTAL_SEEDS) / 2


def test_a_slow_superseded_trainer_removes_nothing_that_the_log_names() -> None:
    for seed in SWEPT_SEEDS:
        simulate(seed, rates=RATES[Variant.SWEPT_ALL])


def test_the_same_seed_gives_the_same_run() -> None:
    first: list[str] = []
    again: list[str] = []
    simulate(7, trace=first.append)
    simulate(7, trace=again.append)
    assert len(first) > 50
    assert first == again


@pytest.mark.parametrize("variant", Variant)
def test_every_deliberate_mistake_is_found(variant: Variant) -> None:
    def try_seeds() -> None:
        start = STARTS.get(variant, 0)
        for seed in (*range(start, VARIANT_SEEDS), *range(start)):
            simulate(seed, variant, rates=RATES.get(variant))

    with pytest.raises(AssertionError, match=rf"python -m tests.sim --seed \d+ --variant {variant.name}"):
        try_seeds()
