"""Scores of sequences as vLLM writes them, as recorded from version 0.32."""

import json
import math
from typing import Any

import pytest

from bombus.hive.records import unpack_logprobs, unpack_tokens
from bombus_inference.backends.http_calls import BackendFailed
from bombus_inference.backends.vllm.scoring import parse_scores, scoring_body

TOKENS = [5, 17, 3]
ROWS: list[Any] = [
    None,
    {
        "17": {"logprob": -4.5, "rank": 30, "decoded_token": None},
        "44": {"logprob": -0.25, "rank": 1, "decoded_token": None},
        "9": {"logprob": -2.5, "rank": 2, "decoded_token": None},
    },
    {
        "3": {"logprob": -0.5, "rank": 1, "decoded_token": None},
        "8": {"logprob": -1.5, "rank": 2, "decoded_token": None},
    },
]


def answer(rows: object) -> bytes:
    return json.dumps({"request_id": "g", "choices": [], "prompt_logprobs": rows}).encode()


def test_a_sequence_is_scored_without_sampling_anything_of_use() -> None:
    body = json.loads(scoring_body(TOKENS, 2, "zeros"))
    assert (body["model"], body["token_ids"]) == ("zeros", TOKENS)
    assert body["sampling_params"] == {"max_tokens": 1, "prompt_logprobs": 2, "ignore_eos": True, "detokenize": False}


def test_each_token_but_the_first_has_its_logprob_and_the_most_likely_alternatives() -> None:
    scored = parse_scores(answer(ROWS), TOKENS, 2)
    assert scored.logprobs == [-4.5, -0.5]
    assert scored.tops == [((44, -0.25), (9, -2.5)), ((3, -0.5), (8, -1.5))]
    (frame,) = scored.frames(2, version=0)
    first, *others = unpack_logprobs(frame.logprobs)
    assert math.isnan(first)
    assert others == [-4.5, -0.5]
    assert unpack_tokens(frame.top_tokens) == [0, 0, 44, 9, 3, 8]
    assert unpack_logprobs(frame.top_logprobs)[2:] == [-0.25, -2.5, -0.5, -1.5]


def test_without_alternatives_there_are_logprobs_alone() -> None:
    scored = parse_scores(answer(ROWS), TOKENS, 0)
    (frame,) = scored.frames(0, version=0)
    assert (scored.tops, frame.top_tokens) == ([(), ()], b"")


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (None, "scored 0 of 3 tokens"),
        (ROWS[:2], "scored 2 of 3 tokens"),
        ([None, {"44": {"logprob": -0.25}}, ROWS[2]], "no score for token 17"),
        ([None, {"17": {"logprob": -9999.0}}, ROWS[2]], "not finite"),
        ([None, {"17": {"logprob": -4.5}}, ROWS[2]], "gave 1 of 2 alternatives"),
    ],
)
def test_an_answer_that_cannot_be_right_is_a_failure(rows: object, words: str) -> None:
    with pytest.raises(BackendFailed, match=words):
        parse_scores(answer(rows), TOKENS, 2)


def test_an_error_in_place_of_scores_is_a_failure_with_its_words() -> None:
    with pytest.raises(BackendFailed, match="no room"):
        parse_scores(b'{"error": {"message": "no room"}}', TOKENS, 0)
