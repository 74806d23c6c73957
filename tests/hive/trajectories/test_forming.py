"""Batches: exact, oldest first, fair by weight, with minimums; beside a search through all selections."""

from collections import Counter
from itertools import combinations
from statistics import median
from time import process_time

import pytest

from bombus.hive.trajectories import forming
from bombus.hive.trajectories.forming import form, lacking, minimums
from bombus.hive.trajectories.queue import TrajectoryQueue, leave, push, register, take, virtual_time
from tests.effort import effort
from tests.hive.trajectories.queues import Player, entries, environment, groups, next_batch, queue_of

# ---- beside a search through all selections ---------------------------------------------------------------------


def all_batches(queue: TrajectoryQueue, asked: dict[int, int]) -> list[frozenset[int]]:
    """Return every selection that is a batch, as numbers in lines."""
    kept = entries(queue)
    found = []
    for count in range(1, len(kept) + 1):
        for chosen in combinations(kept, count):
            of_each = Counter[int | None]()
            for number in chosen:
                of_each[kept[number][0]] += kept[number][1]
            if of_each.total() == queue.batch_size and all(of_each[each] >= asked[each] for each in asked):
                found.append(frozenset(chosen))
    return found


def expected(queue: TrajectoryQueue, batches: list[frozenset[int]]) -> tuple[int, ...]:
    """Return the batch that the rules name, by asking of each group in turn whether some batch has it."""
    kept = entries(queue)
    owners = {number: -1 if owner is None else owner for number, (owner, _) in kept.items()}
    served = {owner: virtual_time(queue, owner) for owner in owners.values()}
    chosen: set[int] = set()
    while chosen not in batches:
        possible = {number for batch in batches if chosen < batch for number in batch - chosen}
        if chosen:
            first = {
                owner: min(n for n in kept if owners[n] == owner and n not in chosen) for owner in left(owners, chosen)
            }
            turns = sorted((served[owner], first[owner], owner) for owner in first)
            owner = next(o for _, _, o in turns if any(owners[number] == o for number in possible))
            possible = {number for number in possible if owners[number] == owner}
        number = min(possible)
        chosen.add(number)
        served[owners[number]] += kept[number][1] / queue.weight_of(owners[number])
    return tuple(sorted(each for number in chosen for each in queue.members(number)))


def left(owners: dict[int, int], chosen: set[int]) -> set[int]:
    return {owner for number, owner in owners.items() if number not in chosen}


@pytest.mark.parametrize("seed", range(effort(40, 120)))
def test_a_batch_is_that_of_a_search_through_all_selections(seed: int) -> None:
    """Whenever any selection is a batch there is one, the oldest group of any is in it, and all take their turns."""
    player = Player(seed)
    checked = 0
    for _ in range(100):
        player.step()
        queue = player.queue
        if not queue.batch_size or len(entries(queue)) > 9:
            register(queue, player.random.randint(1, 16))
            continue
        checked += len(entries(queue)) > 1
        asked = minimums(queue)
        batch = form(queue)
        if lacking(queue, asked):
            assert batch is None
            continue
        batches = all_batches(queue, asked)
        if batches:
            assert batch == expected(queue, batches)
        else:
            possible = all_batches(queue, {})
            assert (batch is None) == (not possible), "minimums that fit in no batch block nobody"
            assert batch is None or {number for number in batch if number in entries(queue)} in possible
    assert checked > 20


# ---- exact fills ----------------------------------------------------------------------------------------------


def test_a_batch_has_exactly_its_sequences_in_the_order_in_which_they_came() -> None:
    queue = queue_of(8, environment(0, 4))
    push(queue, groups(0, 4, 4, 4, 4, 4))
    assert [next_batch(queue) for _ in range(3)] == [(1, 2), (3, 4), None]


def test_no_batch_is_formed_of_too_few_sequences_or_without_a_trainer() -> None:
    queue = queue_of(8)
    assert form(queue) is None
    push(queue, groups(None, 4, 3))
    assert form(queue) is None
    assert form(TrajectoryQueue()) is None


def test_sizes_that_do_not_divide_each_other_fill_a_batch_where_some_selection_does() -> None:
    """Of 3, 3, 3, 3 and 4, nothing has 8 sequences. With one of 1, 3 + 4 + 1 has, and with one of 5, 3 + 5."""
    queue = queue_of(8)
    push(queue, groups(None, 3, 3, 3, 3, 4))
    assert form(queue) is None
    push(queue, groups(None, 1))
    assert next_batch(queue) == (1, 5, 6)
    push(queue, groups(None, 5))
    assert next_batch(queue) == (2, 7)


def test_a_group_as_large_as_the_batch_is_one() -> None:
    queue = queue_of(8)
    push(queue, groups(None, 8, 4, 4))
    assert [next_batch(queue) for _ in range(2)] == [(1,), (2, 3)]


def test_groups_that_came_before_the_trainer_and_are_too_large_block_no_others() -> None:
    queue = TrajectoryQueue()
    push(queue, groups(None, 12, 4, 4))
    register(queue, 8)
    assert next_batch(queue) == (2, 3)
    assert form(queue) is None


def test_the_oldest_group_is_taken_first_even_where_it_needs_an_awkward_selection() -> None:
    """5 came first and only 5 + 3 has it; 4 + 4 would be simpler."""
    queue = queue_of(8)
    push(queue, groups(None, 5, 4, 4, 4, 3))
    assert next_batch(queue) == (1, 5)


def test_a_group_that_fits_nowhere_waits_without_holding_up_others() -> None:
    queue = queue_of(8)
    push(queue, groups(None, 5, 4, 4, 4, 4))
    assert [next_batch(queue) for _ in range(3)] == [(2, 3), (4, 5), None]
    push(queue, groups(None, 2, 1))
    assert next_batch(queue) == (1, 6, 7)


def test_beyond_the_sizes_that_are_looked_at_those_that_waited_longest_are_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(forming, "SIZES_MAX", 2)
    queue = queue_of(8)
    push(queue, groups(None, 3, 5, 8))
    assert next_batch(queue) == (1, 2)
    assert next_batch(queue) == (3,)


# ---- fair by weight -------------------------------------------------------------------------------------------


def taken_of_each(queue: TrajectoryQueue, batches: int) -> list[Counter[int | None]]:
    """Take batches and return how many sequences each has of each environment."""
    found = []
    for _ in range(batches):
        batch = form(queue)
        assert batch is not None
        counted = Counter[int | None]()
        for group in take(queue, batch):
            counted[group.environment] += group.sequences
        found.append(counted)
    return found


def test_weights_share_out_every_batch() -> None:
    """With weights of 3 and 1, and 8 groups of 4 in a batch, 6 are of the first and 2 of the second."""
    queue = queue_of(32, environment(0, 4, weight=3.0), environment(1, 4, weight=1.0))
    push(queue, [*groups(0, *[4] * 120), *groups(1, *[4] * 120)])
    assert taken_of_each(queue, 10) == [{0: 24, 1: 8}] * 10


def test_environments_share_sequences_and_not_groups() -> None:
    queue = queue_of(32, environment(0, 8), environment(1, 2))
    push(queue, [*groups(0, *[8] * 20), *groups(1, *[2] * 80)])
    assert taken_of_each(queue, 10) == [{0: 16, 1: 16}] * 10


def test_data_without_an_environment_has_a_weight_of_one() -> None:
    queue = queue_of(16, environment(0, 4, weight=3.0))
    push(queue, [*groups(0, *[4] * 30), *groups(None, *[4] * 10)])
    assert taken_of_each(queue, 10) == [{0: 12, None: 4}] * 10


def test_a_burst_of_one_environment_does_not_hold_up_another() -> None:
    queue = queue_of(8, environment(0, 4), environment(1, 4))
    push(queue, [*groups(0, *[4] * 1000), *groups(1, 4)])
    assert next_batch(queue) == (1, 1001)


def test_what_is_not_used_of_a_share_goes_to_the_others() -> None:
    queue = queue_of(16, environment(0, 4, weight=1.0), environment(1, 4, weight=100.0))
    push(queue, [*groups(0, *[4] * 8), *groups(1, 4)])
    assert taken_of_each(queue, 2) == [{0: 12, 1: 4}, {0: 16}]


def test_an_environment_of_little_weight_has_its_oldest_group_in_each_batch_and_no_more_than_its_share_in_the_end() -> (
    None
):
    """A batch of two groups has the oldest one; over 20 batches the lighter one has 20 of 40 groups, not 20 of 41."""
    queue = queue_of(8, environment(0, 4, weight=1.0), environment(1, 4, weight=9.0))
    push(queue, groups(0, *[4] * 20))
    push(queue, groups(1, *[4] * 60))
    assert taken_of_each(queue, 20) == [{0: 4, 1: 4}] * 20
    assert taken_of_each(queue, 20) == [{1: 8}] * 20


# ---- minimums -------------------------------------------------------------------------------------------------


def test_a_minimum_is_met_in_every_batch_and_the_rest_is_shared_out() -> None:
    """Half of each batch of 8 is asked for by an environment of little weight; the oldest group is another's."""
    queue = queue_of(8, environment(0, 2, weight=0.01, minimum=0.5), environment(1, 2, weight=100.0))
    push(queue, [*groups(1, *[2] * 12), *groups(0, *[2] * 6)])
    assert taken_of_each(queue, 3) == [{0: 4, 1: 4}] * 3


def test_no_batch_is_formed_while_an_environment_has_less_than_its_minimum() -> None:
    queue = queue_of(8, environment(0, 2, minimum=0.5), environment(1, 2))
    push(queue, [*groups(1, 2, 2, 2, 2), *groups(0, 2)])
    assert form(queue) is None
    push(queue, groups(0, 2))
    assert form(queue) == (1, 2, 5, 6)


def test_an_environment_that_left_or_fell_silent_is_not_waited_for() -> None:
    queue = queue_of(8, environment(0, 4, minimum=0.5), environment(1, 4))
    push(queue, groups(1, 4, 4))
    assert form(queue) is None
    leave(queue, 0)
    assert form(queue) == (1, 2)


def test_data_without_an_environment_is_used_for_the_rest_where_minimums_are_set() -> None:
    queue = queue_of(8, environment(0, 4, minimum=0.5))
    push(queue, [*groups(None, 4, 4), *groups(0, 4)])
    assert form(queue) == (1, 3)


def test_a_minimum_of_less_than_one_sequence_asks_for_nothing() -> None:
    queue = queue_of(8, environment(0, 4, minimum=0.12), environment(1, 4, minimum=0.0))
    assert minimums(queue) == {}
    push(queue, groups(None, 8))
    assert form(queue) == (1,)


def test_minimums_of_more_than_a_batch_are_scaled_down_to_it_with_a_group_each() -> None:
    """0.75, 0.75 and 0.1 of 10 are 7 + 7 + 1 = 15: 7 x 10 / 15 is 4, and 1 x 10 / 15 is 0, but a group has 2."""
    queue = queue_of(
        10, environment(0, 4, minimum=0.75), environment(1, 4, minimum=0.75), environment(2, 2, minimum=0.1)
    )
    push(queue, [*groups(0, 4, 4), *groups(1, 4, 4), *groups(2, 2)])
    assert minimums(queue) == {0: 4, 1: 4, 2: 2}
    assert form(queue) == (1, 3, 5)


def test_a_group_is_left_out_for_a_minimum_that_its_size_would_break() -> None:
    """The oldest group of environment 0 has 5 sequences, which leaves no room for the 4 of environment 1."""
    queue = queue_of(8, environment(0, 4, minimum=0.5), environment(1, 4, minimum=0.5))
    push(queue, [*groups(0, 5, 4), *groups(1, 4)])
    assert form(queue) == (2, 3)


def test_minimums_that_group_sizes_do_not_allow_take_turns_and_block_nobody() -> None:
    """Three environments ask for 2 of 8 and have groups of 4: a batch has those two that were served least."""
    queue = queue_of(8, *(environment(number, 4, minimum=0.3) for number in range(3)))
    push(queue, [each for number in range(3) for each in groups(number, *[4] * 8)])
    assert minimums(queue) == {0: 2, 1: 2, 2: 2}
    assert taken_of_each(queue, 6) == [{0: 4, 1: 4}, {0: 4, 2: 4}, {1: 4, 2: 4}] * 2


# ---- what it costs --------------------------------------------------------------------------------------------


def seconds(queued: int) -> float:
    """Return the median of what a batch of 256 sequences costs to form and take, in a queue of so many groups."""
    queue = queue_of(256, *(environment(number, 4 << number, weight=1.0 + number) for number in range(3)))
    push(queue, [each for number in range(queued) for each in groups(number % 3, 4 << number % 3)])
    spent = []
    for _ in range(20 if queued > 1000 else 2):
        start = process_time()
        assert next_batch(queue)
        spent.append(process_time() - start)
    return median(spent)


def test_a_batch_costs_no_more_in_a_queue_of_100_000_groups_than_in_a_short_one() -> None:
    """It would be a thousand times as much if the queue were read; five times leaves room for a busy machine."""
    short, long = seconds(100), seconds(100_000)
    assert long < 5 * short, (short, long)
