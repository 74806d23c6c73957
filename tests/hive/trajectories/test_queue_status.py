"""What an environment is told of the queue, and the sentences about groups that fit no batch."""

import pytest

from bombus.hive.trajectories.forming import form
from bombus.hive.trajectories.queue import TrajectoryQueue, leave, push, register
from bombus.hive.trajectories.queue_status import EnvironmentQueueStatus, environment_status, stranded
from tests.hive.trajectories.queues import Player, entries, environment, groups, queue_of


def test_what_minimums_leave_no_room_for_is_told_so() -> None:
    queue = queue_of(8, environment(0, 2, minimum=0.5), environment(1, 2, minimum=0.5), environment(2, 2))
    push(queue, [*groups(2, 2), *groups(0, 2, 2), *groups(1, 2, 2)])
    assert form(queue) == (2, 3, 4, 5)
    assert stranded(queue) == [
        "No batch has room for 1 group (1 of 2 sequences) of environments without a minimum: the minimums of others "
        "add up to the whole batch. Register one of the others again with a smaller min_batch_allocation."
    ]


def test_an_empty_queue_has_a_largest_group_of_one() -> None:
    queue = queue_of(8, environment(0, 4))
    assert environment_status(queue, queue.environments[0], 0) == EnvironmentQueueStatus(
        current_step=0, queue_size=0, unallocated_fraction=1.0, self_queue_size=0, max_group_size=1, env_weight=1.0
    )


def test_the_queue_of_an_environment_counts_others_beyond_their_minimums_in_groups_of_its_own_size() -> None:
    """Own: 8. Others: 12 in packs of 8 are 16, less the 0.5 x 16 that are reserved; 2 of nobody are a pack of 8.

    That is 8 + 8 + 8 = 24 sequences, 6 groups of 4.
    """
    queue = queue_of(16, environment(0, 4), environment(1, 4, minimum=0.5))
    push(queue, [*groups(0, 4, 4), *groups(1, 4, 8), *groups(None, 2)])
    told = environment_status(queue, queue.environments[0], 0)
    assert (told.queue_size, told.self_queue_size, told.max_group_size, told.unallocated_fraction) == (6, 2, 8, 0.5)


def test_others_count_for_nothing_where_all_groups_have_one_sequence() -> None:
    queue = queue_of(8, environment(0, 1), environment(1, 1))
    push(queue, [*groups(0, 1, 1), *groups(1, 1, 1, 1)])
    assert environment_status(queue, queue.environments[0], 0).queue_size == 2


def test_an_environment_whose_groups_grew_is_counted_in_groups_of_the_largest() -> None:
    queue = queue_of(16, environment(0, 4))
    push(queue, groups(0, 8, 4, 4))
    told = environment_status(queue, queue.environments[0], 0)
    assert (told.queue_size, told.self_queue_size) == (2, 2)
    assert queue.environments[0].group_size == 4, "asking changes nothing"


def test_held_groups_do_not_count() -> None:
    queue = queue_of(8, environment(0, 4))
    push(queue, groups(0, 4, 3))
    assert environment_status(queue, queue.environments[0], 0).self_queue_size == 1


@pytest.mark.parametrize(
    ("weights", "told"),
    [
        ((1.0, 3.0), (0.25, 0.75)),
        ((0.0, 3.0), (0.01, 1.0)),
        ((-1.0, 3.0), (0.01, 1.0)),
        ((0.0, 0.0), (0.01, 0.01)),
        ((0.001, 1.0), (0.01, 1.0 / 1.001)),
    ],
)
def test_the_weight_of_an_environment_is_its_part_of_all_and_at_least_a_hundredth(
    weights: tuple[float, float], told: tuple[float, float]
) -> None:
    queue = queue_of(8, environment(0, 4, weight=weights[0]), environment(1, 4, weight=weights[1]))
    assert [environment_status(queue, each, 0).env_weight for each in queue.environments.values()] == pytest.approx(
        told
    )


def test_longer_sequences_weigh_more_and_those_who_left_do_not_weigh() -> None:
    queue = queue_of(8, environment(0, 4, max_tokens=100), environment(1, 4, max_tokens=300), environment(2, 4))
    leave(queue, 2)
    assert [environment_status(queue, queue.environments[each], 0).env_weight for each in (0, 1)] == [0.25, 0.75]


def test_minimums_of_more_than_all_leave_nothing_unallocated() -> None:
    queue = queue_of(8, environment(0, 4, minimum=0.7), environment(1, 4, minimum=0.6), environment(2, 4, minimum=0.2))
    assert environment_status(queue, queue.environments[0], 0).unallocated_fraction == 0.0
    leave(queue, 0)
    assert environment_status(queue, queue.environments[1], 0).unallocated_fraction == pytest.approx(0.2)


# ---- what is stranded -----------------------------------------------------------------------------------------


def test_a_queue_that_makes_batches_or_waits_for_more_has_nothing_stranded() -> None:
    queue = queue_of(8, environment(0, 4))
    assert stranded(queue) == []
    push(queue, groups(0, 4))
    assert stranded(queue) == []
    push(queue, groups(0, 4))
    assert stranded(queue) == []


def test_sizes_that_make_no_batch_are_named_with_what_would_complete_one() -> None:
    queue = queue_of(8)
    push(queue, groups(None, 3, 3, 3, 3, 4))
    assert stranded(queue) == [
        "5 groups (4 of 3, 1 of 4 sequences) are queued, but no selection of them has exactly 8 sequences. One more "
        "group of 1, 2, 4, 5 or 8 sequences would complete a batch."
    ]


def test_a_group_that_is_in_no_batch_while_others_are_is_named() -> None:
    queue = queue_of(8)
    push(queue, groups(None, 5, 4, 4))
    assert stranded(queue) == [
        "1 group (1 of 5 sequences) fits in no batch of 8 sequences with the groups queued now. It stays until "
        "groups arrive that complete one."
    ]


def test_an_environment_that_lacks_its_minimum_is_named() -> None:
    queue = queue_of(8, environment(0, 4, minimum=0.5), environment(1, 4))
    push(queue, groups(1, 4, 4))
    assert stranded(queue) == [
        "Environment 0 (math_0) asks for 4 of the 8 sequences of each batch but has 0 queued: no batch is formed until "
        "it has more, or has left."
    ]


def test_groups_that_wait_to_be_combined_are_named() -> None:
    queue = queue_of(8, environment(0, 8))
    push(queue, groups(0, 3, 3, 1))
    assert stranded(queue) == [
        "Environment 0 (math_0) has 3 groups (1 of 1, 2 of 3 sequences) that are waiting for others to make up its "
        "group_size of 8."
    ]


def test_groups_that_came_early_and_are_larger_than_a_batch_are_named() -> None:
    queue = TrajectoryQueue()
    push(queue, groups(None, 12))
    assert stranded(queue) == []
    register(queue, 8)
    assert stranded(queue) == [
        "1 group (1 of 12 sequences) came before the trainer, whose batches have 8 sequences: no batch can take it. "
        "Register the trainer with a larger batch_size, or reset the data."
    ]


def test_many_sizes_are_not_all_named() -> None:
    queue = queue_of(100)
    push(queue, groups(None, *range(11, 31, 2), 99))
    (sentence,) = stranded(queue)
    assert sentence.startswith("1 group (1 of 99 sequences) fits in no batch")
    queue = queue_of(99)
    push(queue, groups(None, *range(50, 60)))
    (sentence,) = stranded(queue)
    assert sentence.startswith("10 groups (1 of 50, 1 of 51, 1 of 52, 1 of 53, 1 of 54, 1 of 55 sequences, and others)")


@pytest.mark.parametrize("seed", range(40))
def test_enough_sequences_without_a_batch_are_always_explained(seed: int) -> None:
    player = Player(seed)
    for _ in range(40):
        player.step()
        queue = player.queue
        fitting = sum(size for _, size in entries(queue).values() if size <= queue.batch_size)
        if queue.batch_size and fitting >= queue.batch_size and form(queue) is None:
            assert stranded(queue)
        for each in queue.environments.values():
            told = environment_status(queue, each, 0)
            assert told.queue_size >= told.self_queue_size >= 0
            assert told.env_weight >= 0.01
