"""Exact fills, beside a search through all selections."""

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bombus.hive.trajectories import filling
from bombus.hive.trajectories.filling import SEARCHES_MAX, SIZES_LOOKED_AT_MAX, ExactFill, Pool, reachable, select

counts = st.dictionaries(st.integers(1, 7), st.integers(0, 2), max_size=3)
pools = st.lists(st.builds(Pool, counts, st.integers(0, 6)), min_size=1, max_size=3)


def all_selections(pools: list[Pool], total: int) -> list[list[dict[int, int]]]:
    """Return every way to take groups of the pools that has the total and what each pool needs."""
    of_each = []
    for pool in pools:
        numbers = product(*(range(count + 1) for count in pool.counts.values()))
        taken = (dict(zip(pool.counts, number)) for number in numbers)
        of_each.append([each for each in taken if sequences(each) >= pool.need])
    return [list(each) for each in product(*of_each) if sum(map(sequences, each)) == total]


def sequences(taken: dict[int, int]) -> int:
    return sum(size * number for size, number in taken.items())


def test_four_groups_of_three_and_one_of_four_make_up_seven_and_ten_but_not_eight() -> None:
    pool = Pool({3: 4, 4: 1})
    assert select([pool], 7) == [{3: 1, 4: 1}]
    assert select([pool], 10) == [{3: 2, 4: 1}]
    assert select([pool], 8) is None
    sums = reachable(pool.counts, 16)
    assert [each for each in range(17) if sums >> each & 1] == [0, 3, 4, 6, 7, 9, 10, 12, 13, 16]


def test_a_selection_has_what_each_pool_needs() -> None:
    assert select([Pool({4: 2}), Pool({4: 2}, need=5)], 8) == [{}, {4: 2}]
    assert select([Pool({4: 2}), Pool({4: 2}, need=5)], 4) is None
    assert select([Pool({4: 2}), Pool({}, need=1)], 8) is None


def test_groups_larger_than_the_total_are_in_no_selection() -> None:
    assert select([Pool({9: 3, 2: 4})], 8) == [{2: 4}]


@settings(deadline=None)
@given(pools, st.integers(0, 24))
def test_a_selection_is_found_exactly_when_there_is_one(pools: list[Pool], total: int) -> None:
    found = select(pools, total)
    every = all_selections(pools, total)
    if found is None:
        assert not every
    else:
        complete = [{size: taken.get(size, 0) for size in pool.counts} for taken, pool in zip(found, pools)]
        assert complete in every


@settings(deadline=None)
@given(pools, st.integers(1, 24), st.lists(st.tuples(st.integers(0, 2), st.integers(1, 7)), max_size=12))
def test_a_group_is_taken_exactly_when_some_selection_has_it_and_what_was_taken(
    pools: list[Pool], total: int, wanted: list[tuple[int, int]]
) -> None:
    every = all_selections(pools, total)
    fill = ExactFill(pools, total)
    assert fill.exists == bool(every)
    taken: list[dict[int, int]] = [{} for _ in pools]
    for index, size in wanted:
        if index >= len(pools):
            continue
        more = [dict(each) for each in taken]
        more[index][size] = more[index].get(size, 0) + 1
        is_possible = any(has(selection, more) for selection in every)
        assert fill.could_take(index, size) == is_possible
        assert fill.take(index, size) == is_possible
        if is_possible:
            taken = more
    assert fill.left == total - sum(map(sequences, taken))


def has(selection: list[dict[int, int]], taken: list[dict[int, int]]) -> bool:
    return all(whole.get(size, 0) >= n for whole, some in zip(selection, taken) for size, n in some.items())


def test_after_its_last_search_a_fill_is_completed_with_the_selection_that_was_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(filling, "SEARCHES_MAX", 1)
    fill = ExactFill([Pool({4: 2, 3: 2, 2: 1})], 8)
    sizes = [size for size in (4, 3, 2) if fill.could_take(0, size)]
    assert sizes in ([4], [3, 2]), "only those of the one selection that was found"
    while fill.left:
        assert any(fill.take(0, size) for size in sizes)


def test_the_most_sequences_that_a_batch_has_are_found_among_a_million_groups_of_one() -> None:
    assert select([Pool({1: 1_000_000})], 16_384) == [{1: 16_384}]


def test_many_pools_of_many_sizes_leave_room_for_few_searches() -> None:
    """Each of them looks at all sizes of all pools: without this bound one batch took more than a second here."""
    pools = [Pool(dict.fromkeys(range(1, 65), 2), need=40) for _ in range(64)]
    fill = ExactFill(pools, 4_096)
    assert fill.exists
    assert fill._searches_left < SIZES_LOOKED_AT_MAX / 64**2
    assert ExactFill(pools[:1], 128)._searches_left == SEARCHES_MAX - 1, "one pool has all of them"
