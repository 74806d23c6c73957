"""Frames from deltas: what may go out at once, what is held back, and which answers are errors."""

import pytest

from bombus.hive.generation import Finished, Frame, Tokens
from bombus.hive.records import pack_logprobs, pack_tokens
from bombus_inference.backends.answers import ChoiceDelta, FrameAssembler, most_likely
from bombus_inference.backends.http_calls import BackendFailed
from tests.inference.backends.small_engines import request


def tokens(version: int, ids: list[int], choice: int = 0) -> Tokens:
    return Tokens(
        choice=choice, version=version, tokens=pack_tokens(ids), logprobs=pack_logprobs([-float(one) for one in ids])
    )


def delta(*ids: int, choice: int = 0, finish: str | None = None, versions: list[int] | None = None) -> ChoiceDelta:
    logprobs = [-float(one) for one in ids]
    return ChoiceDelta(choice=choice, tokens=ids, logprobs=logprobs, finish=finish, versions=versions)


class Weights:
    """`same` says whether they are still those that a request was sent to."""

    same = True


def take(answer: FrameAssembler, *deltas: ChoiceDelta) -> list[Frame]:
    return [frame for one in deltas for frame in answer.take(one)]


def test_a_stream_is_passed_on_at_once_while_the_weights_stay_the_same() -> None:
    answer = FrameAssembler(request([1], stream=True), 3, lambda: True, 4)
    frames = take(answer, delta(5, 6), delta(7), delta(8, finish="stop", versions=[3, 3, 3, 3]))
    assert frames == [tokens(3, [5, 6]), tokens(3, [7]), tokens(3, [8]), Finished(reason="stop")]


def test_without_streaming_tokens_come_at_the_end_in_one_frame_for_each_version() -> None:
    answer = FrameAssembler(request([1]), 3, lambda: False, 4)
    frames = take(answer, delta(5, 6), delta(7, 8, finish="length", versions=[3, 3, 4, 4]))
    assert frames == [tokens(3, [5, 6]), tokens(4, [7, 8]), Finished(reason="length")]


def test_after_a_change_of_weights_tokens_wait_until_the_server_reports_which_version_sampled_them() -> None:
    weights = Weights()
    answer = FrameAssembler(request([1], stream=True), 3, lambda: weights.same, 4)
    assert take(answer, delta(5)) == [tokens(3, [5])]
    weights.same = False
    assert take(answer, delta(6), delta(7)) == []
    frames = take(answer, delta(8, finish="length", versions=[3, 3, 4, 4]))
    assert frames == [tokens(3, [6]), tokens(4, [7, 8]), Finished(reason="length")]


def test_choices_are_kept_apart() -> None:
    answer = FrameAssembler(request([1], n=2, stream=True), 0, lambda: True, 1)
    frames = take(
        answer,
        delta(5, choice=1),
        delta(6, choice=0, finish="length", versions=[0]),
        delta(7, choice=1, finish="length", versions=[0, 0]),
    )
    assert frames == [
        tokens(0, [5], choice=1),
        tokens(0, [6]),
        Finished(reason="length"),
        tokens(0, [7], choice=1),
        Finished(choice=1, reason="length"),
    ]


def test_a_server_whose_weights_stay_during_a_call_need_not_report_versions() -> None:
    assert take(FrameAssembler(request([1]), 2, lambda: True, 4), delta(5, finish="stop"))[0] == tokens(2, [5])
    with pytest.raises(BackendFailed, match="does not say"):
        take(FrameAssembler(request([1]), 2, lambda: False, 4), delta(5, finish="stop"))


@pytest.mark.parametrize(
    ("deltas", "words"),
    [
        ([delta(5), delta(6, finish="stop", versions=[4, 4])], "did not sample"),
        ([delta(5, finish="stop", versions=[3, 3])], "2 of 1 tokens"),
        ([delta(5, finish="abort", versions=[3])], "stopped midway: abort"),
        ([delta(5, 6, finish="length", versions=[3, 3])], "stopped after 2 of 4 tokens"),
        ([delta(5, choice=1)], "was not requested"),
        ([delta(5, finish="stop", versions=[3]), delta(6)], "already finished"),
        ([ChoiceDelta(choice=0, tokens=[5], logprobs=[])], "1 tokens and 0 logprobs"),
        ([ChoiceDelta(choice=0, tokens=[5], logprobs=[float("nan")])], "not finite"),
        ([ChoiceDelta(choice=0, tokens=[5], logprobs=[-9999.0])], "not finite"),
    ],
)
def test_an_answer_that_cannot_be_right_is_an_error(deltas: list[ChoiceDelta], words: str) -> None:
    answer = FrameAssembler(request([1], stream=True), 3, lambda: True, 4)
    with pytest.raises(BackendFailed, match=words):
        take(answer, *deltas)


def test_alternatives_are_reported_if_requested_and_required_for_each_token() -> None:
    answer = FrameAssembler(request([1], top_logprobs=1), 0, lambda: True, 4)
    (frame, _) = take(
        answer, ChoiceDelta(choice=0, tokens=[5], logprobs=[-1.0], tops=[((6, -0.5),)], finish="stop", versions=[0])
    )
    assert isinstance(frame, Tokens)
    assert frame.top == (((6, -0.5),),)
    with pytest.raises(BackendFailed, match="0 of 1"):
        take(FrameAssembler(request([1], top_logprobs=1), 0, lambda: True, 4), delta(5))


def test_the_most_likely_are_in_order_and_what_cannot_be_sampled_is_left_out() -> None:
    assert most_likely([(9, -3.0), (4, -1.0), (7, -9999.0), (2, -2.0)], 2) == ((4, -1.0), (2, -2.0))
    assert most_likely([(9, -3.0), (7, -9999.0)], 3) == ((9, -3.0),)
