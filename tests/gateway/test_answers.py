"""What a replica cannot have sampled is refused at the edge, whatever asked for it."""

from math import inf, nan

import pytest

from bombus.hive.generation import Finished, Frame, Generate, PromptScores, Tokens
from bombus.hive.records import SamplingParams, pack_logprobs, pack_tokens
from bombus_gateway.call.answers import AnswerCheck, WrongAnswer
from bombus_gateway.call.replica_client import together

VOCABULARY, NEWEST = 96, 3
REQUEST = Generate(
    id="c",
    engine="main",
    run=1,
    prompt=pack_tokens([1, 2, 3]),
    sampling=SamplingParams(max_tokens=4),
    n=2,
    prompt_logprobs=True,
    top_prompt=1,
)


def tokens(ids: list[int], logprobs: list[float] | None = None, **other: object) -> Tokens:
    packed = pack_logprobs([-0.5] * len(ids) if logprobs is None else logprobs)
    return Tokens(**{"version": NEWEST, "tokens": pack_tokens(ids), "logprobs": packed, **other})  # type: ignore[arg-type]


def scores(logprobs: list[float], **other: object) -> PromptScores:
    given = {"version": NEWEST, "logprobs": pack_logprobs(logprobs), **other}
    return PromptScores(**given)  # type: ignore[arg-type]


END = Finished(reason="stop")
SCORED = scores([nan, -1.0, -2.0])


@pytest.mark.parametrize(
    ("frames", "why"),
    [
        ([tokens([5, 6], [-1.0, nan])], "the logprob nan"),
        ([tokens([5, 6], [-inf, -1.0])], "the logprob -inf"),
        ([tokens([5], [inf])], "the logprob inf"),
        ([tokens([5], [0.5])], "the logprob 0.5"),
        ([tokens([-1])], "token -1"),
        ([tokens([5, VOCABULARY])], "token 96"),
        ([tokens([5, 6], [-1.0])], "1 logprobs for 2 tokens"),
        ([tokens([5], tokens=b"abcde")], "for 1.25 tokens"),
        ([tokens([5, 6, 7]), tokens([8, 9])], "5 tokens, but at most 4"),
        ([tokens([5], version=999)], "version 999, but the newest is 3"),
        ([tokens([5], version=-1)], "version -1"),
        ([tokens([5], choice=-1)], "choice -1 of 2"),
        ([tokens([5], choice=2)], "choice 2 of 2"),
        ([tokens([5], top=(((6, nan),),))], "an alternative has the logprob nan"),
        ([tokens([5], top=(((VOCABULARY, -1.0),),))], "token 96"),
        ([tokens([5, 6], top=(((7, -1.0),),))], "alternatives for 1 tokens"),
        ([SCORED, END], "choice 0 has no token"),
        ([SCORED, tokens([]), END], "choice 0 has no token"),
        ([SCORED, tokens([5]), END, tokens([5])], "continues after its end"),
        ([SCORED, tokens([5]), END, END], "continues after its end"),
        ([SCORED, Finished(reason="stop", choice=-1)], "choice -1"),
        ([SCORED, tokens([5]), Finished(reason="bored")], "finish reason 'bored'"),
        ([tokens([5]), END], "3 tokens of the prompt have no logprob"),
        ([scores([nan, -1.0, nan])], "the logprob nan"),
        ([scores([nan, -1.0, -2.0, -3.0])], "4 prompt tokens"),
        ([scores([-1.0], start=1)], "from 1 on"),
        ([scores([nan, -1.0], version=99)], "version 99"),
        ([scores([nan, -1.0], width=1)], "does not have 1 alternatives for each"),
        (
            [scores([nan, -1.0], width=1, top_tokens=pack_tokens([0, -4]), top_logprobs=pack_logprobs([nan, -1.0]))],
            "token -4",
        ),
    ],
)
def test_what_cannot_be_an_answer_is_refused_by_its_reason(frames: list[Frame], why: str) -> None:
    check = AnswerCheck(REQUEST, VOCABULARY, lambda: NEWEST)
    for frame in frames[:-1]:
        check(frame)
    with pytest.raises(WrongAnswer, match=why):
        check(frames[-1])


def test_what_can_be_an_answer_passes() -> None:
    check = AnswerCheck(REQUEST, VOCABULARY, lambda: NEWEST)
    top = {"top_tokens": pack_tokens([0, 7]), "top_logprobs": pack_logprobs([nan, -inf])}
    for frame in (
        scores([nan, -1.0], width=1, **top),
        scores([-inf], start=2, width=1, top_tokens=pack_tokens([7]), top_logprobs=pack_logprobs([-0.1])),
        tokens([0, VOCABULARY - 1], [0.0, 1e-6], version=NEWEST - 1),
        tokens([]),
        tokens([5], top=(((6, -inf), (5, -0.5)),), version=NEWEST + 1),
        Finished(reason="length"),
        tokens([1, 2, 3, 4], choice=1),
        Finished(choice=1, reason="stop"),
    ):
        check(frame)


def test_tokens_that_arrive_together_are_one_frame_where_choice_and_version_are_the_same() -> None:
    single: list[Frame] = [tokens([5]), tokens([6, 7]), tokens([8], choice=1), tokens([9], version=2), END]
    assert together(single) == [tokens([5, 6, 7]), *single[2:]]
    assert together([single[0]]) == [single[0]]


@pytest.mark.parametrize(
    "wrong",
    [
        Tokens(version=NEWEST, tokens=b"ab", logprobs=b"ab"),
        tokens([5], [-1.0, -2.0]),
        tokens([5], top=(((6, -1.0),),)),
    ],
)
def test_a_frame_that_cannot_be_joined_is_checked_as_it_came(wrong: Tokens) -> None:
    """Two wrong frames could otherwise make a right one: two halves of a token, say."""
    frames: list[Frame] = [tokens([5]), wrong, wrong, tokens([6])]
    assert together(frames) == frames
