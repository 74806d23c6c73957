"""What is read from the log of an episode."""

from bombus.hive.records import CallRecord, CallRef, Choice, SamplingParams, pack_logprobs, pack_tokens
from tests.harnesses.evidence import Rewrite, evidence_of


def record(
    name: str, tail: list[int], sampled: list[int], prompt_tokens: int, parent: str = "", auxiliary_call: str = ""
) -> CallRecord:
    return CallRecord(
        id=name,
        engine="main",
        run=1,
        episode="e",
        parent=CallRef(0, parent, b"") if parent else None,
        prompt_tail=pack_tokens(tail),
        prompt_tokens=prompt_tokens,
        choices=(Choice(pack_tokens(sampled), pack_logprobs([-1.0] * len(sampled))),),
        sampling=SamplingParams(),
        auxiliary_call=auxiliary_call,
    )


def text_of(tokens: object) -> str:
    return str(tokens)


def test_a_chain_of_calls_is_one_sequence_in_which_all_is_trained_once() -> None:
    first, second = record("a", [1, 2], [3, 4], 2), record("b", [5], [6], 5, parent="a")
    evidence = evidence_of([first, second], text_of)
    assert (evidence.calls, evidence.sequences, evidence.rewrites) == (2, 1, ())
    assert evidence.lost == evidence.twice == ()


def test_a_rewrite_is_shown_from_the_first_token_that_differs() -> None:
    first, second = record("a", [1, 2], [3, 4], 2), record("b", [1, 2, 3, 9, 5], [6], 5)
    evidence = evidence_of([first, second], text_of)
    assert evidence.sequences == 2
    assert evidence.rewrites == (Rewrite(1, 3, "[4]", "[9, 5]"),)


def test_a_prompt_that_begins_with_a_whole_line_is_no_rewrite() -> None:
    first, second = record("a", [1, 2], [3, 4], 2), record("b", [1, 2, 3, 4, 5], [6], 5)
    evidence = evidence_of([first, second], text_of)
    assert (evidence.sequences, evidence.rewrites) == (1, ())


def test_auxiliary_calls_are_counted_apart_and_are_neither_sequences_nor_rewrites() -> None:
    title, first = record("t", [9], [8], 1, auxiliary_call="title"), record("a", [1, 2], [3], 2)
    summary = record("s", [7], [6, 6], 4, parent="a", auxiliary_call="compaction")
    last = record("b", [5], [4], 7, parent="s")
    evidence = evidence_of([title, first, summary, last], text_of)
    assert (evidence.calls, evidence.auxiliary_calls, evidence.sequences, evidence.rewrites) == (4, 2, 1, ())
    assert evidence.lost == evidence.twice == ()


def test_a_turn_that_shares_its_beginning_with_an_auxiliary_call_alone_is_no_rewrite() -> None:
    title, first = record("t", [1, 9], [8], 2, auxiliary_call="title"), record("a", [1, 2], [3], 2)
    assert evidence_of([title, first], text_of).rewrites == ()
