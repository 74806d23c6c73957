"""What is limited for all is shared by keys."""

from collections import Counter

from bombus.hive.shares import has_share, trim_fairly


def taken(held: Counter[str], holder: str, limit: int) -> int:
    """Let a holder take as much as it can, and return what it has."""
    while has_share(held, holder, limit):
        held[holder] += 1
    return held[holder]


def test_one_key_takes_all_that_is_free_and_leaves_each_other_key_its_share() -> None:
    held: Counter[str] = Counter()
    assert taken(held, "greedy", 16) == 16
    assert taken(held, "second", 16) == 8
    assert taken(held, "third", 16) == 5
    assert taken(held, "greedy", 16) == 16, "and it gets nothing more"
    held["greedy"] = 4
    assert taken(held, "greedy", 16) == 5, "until others have given something back"


def test_a_key_has_one_place_however_many_there_are() -> None:
    held = Counter({str(number): 1 for number in range(100)})
    assert taken(held, "late", 4) == 1


def test_what_is_larger_than_one_counts_as_much_as_it_is() -> None:
    held = Counter({"a": 90})
    assert not has_share(held, "a", 100, 20)
    assert has_share(held, "b", 100, 50)
    assert not has_share(held, "b", 100, 51)


def test_the_oldest_of_those_who_have_most_are_forgotten() -> None:
    kept = {f"a{number}": "a" for number in range(20)} | {"b0": "b", "b1": "b"}
    trim_fairly(kept, 16, lambda holder: holder)
    assert list(kept) == [*(f"a{number}" for number in range(6, 20)), "b0", "b1"]
    kept |= {f"c{number}": "c" for number in range(6)}
    trim_fairly(kept, 16, lambda holder: holder)
    assert Counter(kept.values()) == {"a": 8, "b": 2, "c": 6}
