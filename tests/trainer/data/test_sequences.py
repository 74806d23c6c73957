"""Call records become sequences, and every sampled token is trained exactly once."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bombus.errors import LogCorrupted
from bombus.hive.records import CallRecord, CallStatus
from bombus_trainer.data.sequences import merge_calls
from tests.trainer.small_batches import call


def test_a_tool_episode_of_six_turns_is_one_sequence_whose_mask_is_exactly_what_was_sampled() -> None:
    records = [call("c0", [1, 2, 3], [10, 11])]
    for turn in range(1, 6):
        records.append(call(f"c{turn}", [20, 21], [30 + turn, 40 + turn], parent=records[-1]))
    merged = merge_calls("e", records)
    (sequence,) = merged.sequences
    expected = [1, 2, 3, 10, 11]
    for turn in range(1, 6):
        expected += [20, 21, 30 + turn, 40 + turn]
    assert sequence.tokens_T.tolist() == expected
    assert sequence.loss_mask_T.tolist() == [False] * 3 + [True] * 2 + [False, False, True, True] * 5
    assert sequence.calls_T.tolist() == [-1] * 3 + [0] * 2 + [at for turn in range(1, 6) for at in (-1, -1, turn, turn)]
    assert (merged.calls, merged.merged_calls, merged.trained_tokens) == (6, 5, 12)


def test_a_prefix_that_branches_share_is_trained_in_the_first_of_them() -> None:
    root = call("a", [1], [2, 3])
    left = call("b", [4], [5], parent=root)
    right = call("c", [6], [7], parent=root)
    first, second = merge_calls("e", [root, left, right]).sequences
    assert first.tokens_T.tolist() == [1, 2, 3, 4, 5]
    assert first.loss_mask_T.tolist() == [False, True, True, False, True]
    assert second.tokens_T.tolist() == [1, 2, 3, 6, 7]
    assert second.loss_mask_T.tolist() == [False, False, False, False, True]


def test_choices_are_branches_and_a_child_extends_the_choice_it_names() -> None:
    root = call("a", [1], [2], [3], [4])
    child = call("b", [5], [6], parent=root, parent_choice=1)
    lines = [each.tokens_T.tolist() for each in merge_calls("e", [root, child]).sequences]
    assert lines == [[1, 2], [1, 4], [1, 3, 5, 6]]


def test_a_prompt_that_extends_an_earlier_call_token_for_token_merges_without_a_named_parent() -> None:
    root = call("a", [1, 2], [3])
    short = call("b", [1, 2, 3, 4], [5])
    longest = call("c", [1, 2, 3, 4, 5, 6], [7])
    merged = merge_calls("e", [root, short, longest])
    (sequence,) = merged.sequences
    assert sequence.loss_mask_T.tolist() == [False, False, True, False, True, False, True]
    assert merged.merged_calls == 2


def test_a_call_that_was_cut_off_is_never_trained_but_may_be_a_parent() -> None:
    root = call("a", [1], [2, 3], status=CallStatus.CUT_OFF)
    child = call("b", [4], [5], parent=root)
    (sequence,) = merge_calls("e", [root, child]).sequences
    assert sequence.loss_mask_T.tolist() == [False, False, False, False, True]
    assert merge_calls("e", [root]).sequences == ()


def test_a_parent_outside_the_episodes_calls_is_read_and_not_trained() -> None:
    late = call("late", [1], [2, 3])
    child = call("b", [4], [5], parent=late)
    (sequence,) = merge_calls("e", [child], context=[late]).sequences
    assert sequence.tokens_T.tolist() == [1, 2, 3, 4, 5]
    assert sequence.loss_mask_T.tolist() == [False, False, False, False, True]
    assert sequence.calls_T.tolist() == [-1, -1, -1, -1, 0]


def test_a_sequence_ends_after_its_last_trained_token() -> None:
    root = call("a", [1], [2])
    child = call("b", [4, 4, 4], [5], parent=root, status=CallStatus.CUT_OFF)
    (sequence,) = merge_calls("e", [root, child]).sequences
    assert sequence.tokens_T.tolist() == [1, 2]


def test_a_call_that_was_held_to_a_form_is_read_and_not_trained() -> None:
    """A token that was the only one left has the logprob 0, whatever the policy says of it."""
    root = call("a", [1], [2], logprob=0.0, constrained=("tool_choice",))
    child = call("b", [4], [5], parent=root)
    merged = merge_calls("e", [root, child])
    (sequence,) = merged.sequences
    assert sequence.loss_mask_T.tolist() == [False, False, False, True]
    assert (merged.calls, merged.merged_calls, merged.trained_tokens) == (2, 1, 1)
    assert merge_calls("e", [root]).sequences == ()


def test_greedy_calls_are_not_trained_and_temperatures_and_versions_follow_their_tokens() -> None:
    root = call("a", [1], [2], temperature=0.5, version=3)
    greedy = call("b", [4], [5], parent=root, temperature=0.0)
    last = call("c", [6], [7], parent=greedy, version=4)
    (sequence,) = merge_calls("e", [root, greedy, last]).sequences
    assert sequence.loss_mask_T.tolist() == [False, True, False, False, False, True]
    assert sequence.temperatures_T.tolist() == [1.0, 0.5, 1.0, 1.0, 1.0, 1.0]
    assert sequence.versions_T.tolist() == [-1, 3, -1, 0, -1, 4]


@pytest.mark.parametrize(
    ("records", "why"),
    [
        ([call("b", [4], [5], parent=call("gone", [1], [2]))], "parent gone is not among"),
        ([call("a", [1], [2], prompt_tokens=7)], "the record says 7"),
        ([call("a", [1], [2], logprob=float("nan"))], "not finite"),
    ],
)
def test_records_that_do_not_fit_together_are_corrupt(records: list[CallRecord], why: str) -> None:
    with pytest.raises(LogCorrupted, match=why):
        merge_calls("e", records)


@st.composite
def call_trees(draw: st.DrawFn) -> list[CallRecord]:
    """Draw up to eight calls: with a named parent, with a prompt that may extend another call, or with a new entry.

    Sampled ids are unique, so that each can be found again; prompts use very few ids, so that they collide.
    """
    records: list[CallRecord] = []
    unique = iter(range(1000, 10_000))
    tails = st.lists(st.integers(0, 1), min_size=1, max_size=3)
    for number in range(draw(st.integers(1, 8))):
        sampled = [[next(unique) for _ in range(draw(st.integers(0, 3)))] for _ in range(draw(st.integers(1, 3)))]
        status = draw(st.sampled_from([CallStatus.COMPLETE, CallStatus.COMPLETE, CallStatus.CUT_OFF]))
        parent = draw(st.sampled_from(records)) if draw(st.booleans()) and records else None
        choice = draw(st.integers(0, len(parent.choices) - 1)) if parent else 0
        records.append(call(f"c{number}", draw(tails), *sampled, parent=parent, parent_choice=choice, status=status))
    return records


@given(call_trees())
@settings(max_examples=150, deadline=None)
def test_every_sampled_token_is_trained_exactly_once(records: list[CallRecord]) -> None:
    merged = merge_calls("e", records)
    trained = Counter(token for each in merged.sequences for token in each.tokens_T[each.loss_mask_T].tolist())
    expected = Counter(
        token
        for record in records
        if record.status == CallStatus.COMPLETE
        for choice in record.choices
        for token in choice.token_ids()
    )
    assert trained == expected
    for each in merged.sequences:
        assert each.loss_mask_T[-1]
        assert not np.any(each.loss_mask_T & (each.calls_T < 0))
