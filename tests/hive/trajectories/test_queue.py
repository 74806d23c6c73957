"""The queue of rollout groups: what is kept of them through everything that environments and trainers do."""

from collections import Counter
from time import process_time

import msgspec
import pytest

from bombus.hive.records import BodyRef
from bombus.hive.trajectories import queue as queues
from bombus.hive.trajectories.forming import form
from bombus.hive.trajectories.queue import (
    QueuedGroup,
    TrajectoryQueue,
    held_after,
    join,
    leave,
    push,
    put_back,
    register,
    reset,
    take,
    virtual_time,
    why_no_batch_size,
    why_no_room,
    why_not_joined,
    why_not_queued,
)
from tests.hive.trajectories.queues import Player, entries, environment, groups, next_batch, queue_of


@pytest.mark.parametrize("seed", range(80))
def test_whatever_is_done_each_group_is_kept_once_until_it_is_taken_once(seed: int) -> None:
    player = Player(seed)
    for _ in range(60):
        player.step()
        check(player.queue)
        assert sorted([*player.taken, *player.queue.groups]) == list(range(1, player.pushed + 1))


@pytest.mark.parametrize("seed", range(80))
def test_whatever_is_lost_all_others_are_kept_once(seed: int) -> None:
    player = Player(seed)
    lost: list[int] = []
    for _ in range(60):
        player.step()
        lost += player.lose()
        check(player.queue)
        assert sorted([*player.taken, *player.queue.groups, *lost]) == list(range(1, player.pushed + 1))


def test_a_batch_that_is_put_back_is_taken_again_as_if_nothing_had_happened() -> None:
    queue = queue_of(4, environment(0, 2), environment(1, 2, weight=2.0))
    push(queue, [*groups(0, 2, 2, 1, 1), *groups(1, 2, 2), *groups(0, 1)])
    for _ in range(2):
        before = msgspec.msgpack.encode(queue)
        batch = form(queue)
        assert batch is not None
        combined = {each: queue.combined[each] for each in batch if each in queue.combined}
        taken = take(queue, batch)
        put_back(queue, dict(zip(batch, taken, strict=True)), combined)
        again = msgspec.msgpack.decode(before, type=TrajectoryQueue)
        assert form(queue) == form(again) == batch
        assert entries(queue) == entries(again)
        assert virtual_time(queue, 0) == virtual_time(again, 0)
        take(queue, batch)


def test_what_was_combined_with_a_lost_group_waits_for_other_groups() -> None:
    queue = queue_of(4, environment(0, 4))
    push(queue, groups(0, 1, 1, 2))
    assert queue.combined == {3: (1, 2, 3)}
    taken = dict(zip((1, 2, 3), take(queue, (1, 2, 3)), strict=True))
    put_back(queue, taken, {3: (1, 2, 3)}, lost=[2])
    assert (queue.combined, queue.environments[0].held_sequences, form(queue)) == ({}, 3, None)
    push(queue, groups(0, 1))
    assert form(queue) == (1, 3, 4)


def check(queue: TrajectoryQueue) -> None:
    """Check every sum that is kept against the groups themselves, and that a snapshot has all of it."""
    assert queue.tokens == sum(group.tokens for group in queue.groups.values())
    sizes: Counter[str] = Counter()
    for group in queue.groups.values():
        sizes[group.holder] += group.body.size if group.body else 0
    counted = Counter(group.holder for group in queue.groups.values())
    assert {holder: each.groups for holder, each in queue.holders.items() if each.groups} == counted
    assert {holder: each.bytes for holder, each in queue.holders.items() if each.bytes} == sizes
    assert queue.bytes == sizes.total()
    kept = entries(queue)
    in_lines: list[int] = []
    for owner, share in queue.shares():
        for size, line in share.lines.items():
            waiting = list(queue.waiting(line))
            in_lines += waiting
            assert waiting == sorted(waiting)
            assert line.count == len(waiting) > 0
            assert all(kept[number] == (None if owner == queues.OTHERS else owner, size) for number in waiting)
        assert share.sequences == sum(size * line.count for size, line in share.lines.items())
    assert sorted(in_lines) == sorted(kept)
    for each in queue.environments.values():
        held = {size: line.count for size, line in each.held.items()}
        assert each.held_groups == sum(held.values())
        assert each.held_sequences == sum(size * count for size, count in held.items())
        assert all(0 < size < each.group_size for size in held)
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(queue), type=TrajectoryQueue)
    assert again == queue
    assert form(again) == form(queue)


def test_a_queued_group_keeps_where_its_body_is() -> None:
    body = BodyRef((7, 8), 1_000_000, b"digest")
    queue = queue_of(2)
    push(queue, [QueuedGroup(None, 2, tokens=50, longest=30, body=body)])
    assert take(queue, [1]) == [QueuedGroup(None, 2, 50, 30, body)]
    assert queue.tokens == 0


def test_taking_what_is_not_queued_changes_nothing() -> None:
    queue = queue_of(4)
    push(queue, groups(None, 2))
    before = msgspec.msgpack.encode(queue)
    assert take(queue, [5, 9]) == []
    assert msgspec.msgpack.encode(queue) == before


# ---- groups that are held and combined ------------------------------------------------------------------------


def test_a_held_group_and_a_part_of_a_combination_cannot_be_taken() -> None:
    queue = queue_of(8, environment(1, 4))
    push(queue, groups(1, 1, 3, 2))
    assert queue.combined == {2: (1, 2)}
    before = msgspec.json.encode(queue)
    assert take(queue, [1, 3]) == [], "1 comes with 2 alone, and 3 waits for another group"
    assert msgspec.json.encode(queue) == before
    assert [group.sequences for group in take(queue, [1, 2, 3])] == [1, 3]


def test_a_group_of_another_size_is_held_until_others_make_up_the_size_of_its_environment() -> None:
    queue = queue_of(8, environment(0, group_size=4))
    assert held_after(queue, groups(0, 1, 4, 2, 3)) == [1, None, 3, 2]
    push(queue, groups(0, 1, 4, 2, 3))
    assert entries(queue) == {2: (0, 4), 4: (0, 4)}  # 1 and 3 were combined by the last group; 2 waits
    assert queue.combined == {4: (1, 4)}
    assert queue.environments[0].held_sequences == 2
    assert form(queue) == (1, 2, 4)


def test_the_oldest_held_group_is_combined_whenever_it_can_be() -> None:
    """With 2, 3, 3 and then 1 for a size of 4, 3 + 1 makes it up: 2 waits. With another 2 it is combined."""
    queue = queue_of(8, environment(0, group_size=4))
    push(queue, groups(0, 2, 3, 3, 1))
    assert queue.combined == {4: (2, 4)}
    push(queue, groups(0, 2))
    assert queue.combined == {4: (2, 4), 5: (1, 5)}
    assert queue.environments[0].held_sequences == 3


def test_groups_that_were_combined_stay_together_in_batches() -> None:
    queue = queue_of(4, environment(0, group_size=4))
    push(queue, [*groups(0, 3), *groups(None, 1, 1, 1), *groups(0, 1)])
    assert form(queue) == (1, 5)


def test_answers_of_a_push_are_those_that_the_push_then_has() -> None:
    for seed in range(40):
        player = Player(seed)
        for _ in range(40):
            player.step()
        sizes = [player.random.randint(1, 5) for _ in range(6)]
        sent = [each for size in sizes for each in groups(player.random.choice([None, 0, 1]), size)]
        if why_not_queued(player.queue, sent):
            continue
        told = held_after(player.queue, sent)
        for each, answer in zip(sent, told):
            holders = player.queue.environments
            before = {id: (holder.held_sequences, holder.share.sequences) for id, holder in holders.items()}
            push(player.queue, [each])
            after = {id: holder.held_sequences for id, holder in holders.items()}
            was_queued = player.queue.arrived in entries(player.queue) and answer is None
            assert was_queued or (each.environment is not None and after[each.environment] == answer)
            assert len(before) == len(after)


def test_a_group_larger_than_the_size_of_its_environment_is_queued_and_waits_for_none() -> None:
    queue = queue_of(8, environment(0, group_size=4))
    assert held_after(queue, groups(0, 8)) == [None]
    push(queue, groups(0, 8))
    assert form(queue) == (1,)


def test_an_environment_whose_size_is_more_than_a_batch_holds_nothing() -> None:
    queue = queue_of(4, environment(0, group_size=8))
    push(queue, groups(0, 2, 2))
    assert form(queue) == (1, 2)


def test_what_an_environment_holds_is_queued_when_it_leaves() -> None:
    queue = queue_of(4, environment(0, group_size=4))
    push(queue, [*groups(0, 3), *groups(None, 1)])
    assert form(queue) is None
    leave(queue, 0)
    assert form(queue) == (1, 2)
    assert queue.held_groups == 0


# ---- environments ---------------------------------------------------------------------------------------------


def test_the_groups_of_an_environment_that_left_are_still_taken() -> None:
    queue = queue_of(4, environment(0, 4), environment(1, 4))
    push(queue, groups(0, 4))
    leave(queue, 0)
    leave(queue, 7)
    assert next_batch(queue) == (1,)


def test_an_environment_that_comes_back_has_its_groups_and_its_new_settings() -> None:
    queue = queue_of(8, environment(0, 4))
    push(queue, groups(0, 4))
    leave(queue, 0)
    join(queue, environment(0, 2, weight=3.0), "math")
    push(queue, groups(0, 4))
    assert queue.environments[0].connected
    assert queue.weight_of(0) == 3.0
    assert form(queue) == (1, 2)
    assert (queue.joined, queue.named) == (1, {"math_0": 1})


def test_names_of_environments_are_numbered_by_the_name_that_they_ask_for() -> None:
    queue = queue_of(8)
    names = []
    for number, desired in enumerate(["math", "code", "math", "math"]):
        names.append(queue.name_for(desired))
        join(queue, environment(number, 4), desired)
    assert names == ["math_0", "code_0", "math_1", "math_2"]


def test_groups_that_name_an_environment_before_it_joined_stay_those_of_nobody() -> None:
    queue = queue_of(8)
    push(queue, groups(0, 4))
    join(queue, environment(0, 4), "math")
    push(queue, groups(0, 4))
    assert entries(queue) == {1: (None, 4), 2: (0, 4)}
    assert next_batch(queue) == (1, 2)


def test_environments_that_left_long_ago_and_have_nothing_queued_are_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(queues, "ENVIRONMENTS_MAX", 3)
    queue = queue_of(4)
    for number in range(6):
        join(queue, environment(number, 4), "math")
        push(queue, groups(number, 4) if number == 1 else [])
        leave(queue, number)
    assert list(queue.environments) == [1, 4, 5]
    assert queue.joined == 6


def test_weights_that_are_no_share_count_as_the_least_or_the_most() -> None:
    weights = [0.0, -3.0, float("nan"), 0.5, float("inf")]
    assert [environment(0, 4, weight=weight).part for weight in weights] == [0.01, 0.01, 0.01, 0.5, 1e6]


# ---- a trainer ------------------------------------------------------------------------------------------------


def test_data_that_comes_before_the_trainer_waits_for_it() -> None:
    queue = TrajectoryQueue()
    push(queue, groups(None, 4, 4))
    assert form(queue) is None
    register(queue, 8)
    assert next_batch(queue) == (1, 2)


def test_a_second_trainer_begins_with_an_empty_queue_and_numbers_go_on() -> None:
    queue = queue_of(8, environment(0, 4))
    push(queue, groups(0, 4, 4, 2))
    register(queue, 4)
    assert (queue.groups, queue.environments, queue.sequences, queue.tokens) == ({}, {}, 0, 0)
    push(queue, groups(None, 4))
    assert form(queue) == (4,)


def test_a_reset_forgets_everything_but_the_numbers() -> None:
    queue = queue_of(8, environment(0, 4))
    push(queue, groups(0, 4, 2))
    reset(queue)
    assert queue == TrajectoryQueue(arrived=2, holders={"key-0": queues.KeptGroups()})


# ---- what is refused when it arrives ------------------------------------------------------------------------------


def test_a_group_larger_than_a_batch_is_refused_on_arrival() -> None:
    queue = queue_of(8)
    assert why_not_queued(queue, groups(None, 8)) == ""
    assert why_not_queued(queue, groups(None, 8, 9)) == (
        "Group 1 has 9 sequences, but a batch has 8: no batch could ever take it. Send smaller groups, or register the "
        "trainer with a larger batch_size."
    )


def test_a_group_without_sequences_is_refused() -> None:
    assert why_not_queued(queue_of(8), groups(None, 0)) == "Group 0 has no sequences. Send at least one."


def test_the_queue_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queues, "GROUPS_MAX", 3)
    queue = queue_of(8)
    push(queue, groups(None, 1, 1))
    assert why_no_room(queue, groups(None, 1)) == ""
    assert why_no_room(queue, groups(None, 1, 1)).startswith("2 groups are queued, but there is room for 3 of all keys")


def test_a_key_that_fills_the_queue_leaves_all_others_their_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queues, "GROUPS_MAX", 4)
    queue = queue_of(8, environment(0, 8), environment(1, 1))  # of two keys
    push(queue, groups(0, 3, 3, 1, 4))
    assert why_no_room(queue, groups(0, 1)).startswith("4 groups are queued")
    assert not why_no_room(queue, groups(1, 1, 1))
    assert not why_no_room(queue, groups(None, 1))
    push(queue, groups(1, 1, 1))
    assert why_no_room(queue, groups(1, 1))
    take(queue, list(queue.groups))
    assert not why_no_room(queue, groups(0, 1, 1, 1)), "what was taken takes no room"


def test_the_queue_of_an_earlier_releases_snapshot_is_counted_when_it_is_read() -> None:
    queue = queue_of(8, environment(0, 8))
    push(queue, [*groups(0, 3, 5), *groups(None, 2)])
    kept = msgspec.to_builtins(queue)
    del kept["holders"], kept["bytes"]
    assert msgspec.convert(kept, TrajectoryQueue) == queue


def test_groups_that_wait_to_be_combined_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queues, "HELD_MAX", 3)
    queue = queue_of(8, environment(0, 8))
    push(queue, groups(0, 3, 3))
    assert why_no_room(queue, [*groups(0, 3, 8, 8), *groups(None, 3)]) == ""
    assert why_no_room(queue, groups(0, 3, 3)) == (
        "2 groups of environment 0 (math_0) are waiting for others to make up its group_size of 8, but there is room "
        "for 3. Send groups of that size, or register the environment again with the size that it sends."
    )


@pytest.mark.parametrize("size", [0, -1, 16_385])
def test_a_batch_size_out_of_bounds_is_refused(size: int) -> None:
    assert why_no_batch_size(size) == f"batch_size is {size}: it must be from 1 to 16384 sequences."
    assert why_no_batch_size(16_384) == ""


@pytest.mark.parametrize(
    ("group_size", "weight", "minimum", "why"),
    [
        (0, 1.0, None, "group_size of math_0 is 0: it must be at least 1."),
        (4, float("nan"), None, "weight of math_0 is nan: it must be a finite number."),
        (4, 1.0, 1.5, "min_batch_allocation of math_0 is 1.5: it must be a fraction of a batch, from 0 to 1."),
        (4, 1.0, float("nan"), "min_batch_allocation of math_0 is nan: it must be a fraction of a batch, from 0 to 1."),
        (4, 0.0, 1.0, ""),
    ],
)
def test_an_environment_with_settings_that_mean_nothing_is_refused(
    group_size: int, weight: float, minimum: float | None, why: str
) -> None:
    assert why_not_joined(TrajectoryQueue(), environment(0, group_size, weight, minimum)) == why


def test_connected_environments_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queues, "ENVIRONMENTS_MAX", 1)
    queue = queue_of(8, environment(0, 4))
    assert why_not_joined(queue, environment(0, 4)) == ""
    assert why_not_joined(queue, environment(1, 4)).startswith("1 environments are connected, 1 of them by this key")
    of_admin = msgspec.structs.replace(environment(1, 4), admin=True)
    assert why_not_joined(queue, of_admin) == "", "the hive's own key has a share beside that of keys without a name"
    leave(queue, 0)
    assert why_not_joined(queue, environment(1, 4)) == ""


# ---- virtual time ---------------------------------------------------------------------------------------------


def test_what_is_taken_counts_by_the_weight_of_its_environment() -> None:
    queue = queue_of(6, environment(0, 2, weight=2.0), environment(1, 4, weight=1.0))
    push(queue, [*groups(0, 2, 2), *groups(1, 4, 4), *groups(None, 2)])
    take(queue, [1, 3])
    assert [virtual_time(queue, owner) for owner in (0, 1, queues.OTHERS)] == [1.0, 4.0, 0.0]
    assert queue.clock == 0.0
    take(queue, [2, 5])
    assert [virtual_time(queue, owner) for owner in (0, 1, queues.OTHERS)] == [2.0, 4.0, 2.0]
    assert queue.clock == 0.0
    take(queue, [4])
    assert (virtual_time(queue, 1), queue.clock) == (8.0, 4.0)


def test_an_environment_that_had_nothing_queued_has_saved_nothing_up() -> None:
    """Its time is the clock's when it comes back: 12 here, the time at which the last batch began."""
    queue = queue_of(4, environment(0, 4), environment(1, 4))
    push(queue, groups(0, 4, 4, 4, 4))
    for _ in range(4):
        next_batch(queue)
    assert queue.clock == 12.0
    push(queue, groups(1, 4))
    assert virtual_time(queue, 1) == 12.0


def test_an_environment_whose_groups_fitted_no_batch_catches_up_on_one_batch_at_most() -> None:
    queue = queue_of(4, environment(0, 4), environment(1, 3))
    push(queue, [*groups(1, 3), *groups(0, *[4] * 10)])
    for _ in range(10):
        next_batch(queue)
    assert queue.clock == 36.0
    assert virtual_time(queue, 1) == 32.0


def test_held_groups_of_very_many_sizes_are_combined_with_those_held_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queues, "SIZES_HELD_MAX", 3)
    queue = queue_of(20, environment(0, 20))
    push(queue, groups(0, 3, 5, 7, 9))
    assert queue.environments[0].held_groups == 4
    push(queue, groups(0, 11))
    assert queue.environments[0].held_groups == 5, "11 and 9 make up 20, and 9 is not among the sizes looked at"
    push(queue, groups(0, 12))
    assert queue.combined == {6: (1, 2, 6)}


def test_thousands_of_held_groups_of_as_many_sizes_cost_little_to_fold() -> None:
    """Looking at all sizes for each group took 26 s here."""
    queue = queue_of(16_384, environment(0, 16_383))
    start = process_time()
    push(queue, groups(0, *(2 * size for size in range(1, 3_900))))
    assert queue.environments[0].held_groups == 3_899
    assert process_time() - start < 10
