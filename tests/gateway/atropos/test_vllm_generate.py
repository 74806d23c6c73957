"""`/generate` in vLLM's form."""

import json
import math
from typing import Any

import pytest

from bombus.errors import Refused
from bombus.hive.records import FinishReason, SamplingParams
from bombus_gateway.atropos.vllm_generate import (
    ScoredPrompt,
    VllmRequest,
    is_vllm,
    read_vllm,
    shown_text,
    write_vllm,
)
from bombus_gateway.operations_wire.samples import SampledTokens
from bombus_gateway.operations_wire.sampling import SampleRequest
from tests.gateway.openai_hive import IM_END, TEXT, tokens_of
from tests.gateway.operations_wire.protobuf_bodies import float32s, int32s

PROMPT = ScoredPrompt("Hi")
TOKENS = {"prompt": {"prompt_token_ids": [1, 2]}}


def body(**fields: object) -> bytes:
    return json.dumps(fields).encode()


def test_what_an_environment_sends_is_read() -> None:
    given = body(**TOKENS, logprobs=0, n=2, max_tokens=12, temperature=0.5, top_p=0.9, stop="\n", stop_token_ids=[3])
    sampling = SamplingParams(max_tokens=12, temperature=0.5, top_p=0.9, stop_token_ids=(3,))
    asked = SampleRequest(prompt=int32s(1, 2), sampling=sampling, samples=2, stops=("\n",))
    assert read_vllm(given) == VllmRequest(asked=asked, logprobs=True)


def test_vllm_samples_sixteen_tokens_and_with_null_as_many_as_fit() -> None:
    assert read_vllm(body(**TOKENS)).asked.sampling == SamplingParams(max_tokens=16)
    assert read_vllm(body(**TOKENS, max_tokens=None)).asked.sampling == SamplingParams(max_tokens=0)


def test_all_else_that_changes_a_sample_is_read() -> None:
    given = body(
        **TOKENS,
        logprobs=2,
        top_k=-1,
        min_p=0.1,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        repetition_penalty=1.5,
        seed=7,
        ignore_eos=True,
        stream=True,
        detokenize=True,
        skip_special_tokens=False,
    )
    sampling = SamplingParams(
        max_tokens=16,
        min_p=0.1,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        repetition_penalty=1.5,
        seed=7,
        top_logprobs=2,
    )
    asked = SampleRequest(prompt=int32s(1, 2), sampling=sampling, ends_at_eos=False)
    assert read_vllm(given) == VllmRequest(asked=asked, logprobs=True, streamed=True, with_specials=True)


@pytest.mark.parametrize("prompt", ["Hello", {"prompt": "Hello"}])
def test_a_prompt_may_be_a_text(prompt: object) -> None:
    found = read_vllm(body(prompt=prompt))
    assert (found.text, found.asked.prompt) == ("Hello", b"")


def test_a_teacher_is_asked_for_the_logprobs_of_a_prompt() -> None:
    found = read_vllm(body(prompt={"prompt_token_ids": [1, 2, 3]}, prompt_logprobs=4, max_tokens=1, temperature=0.0))
    assert (found.prompt_logprobs, found.logprobs) == (True, False)
    assert (found.asked.scored, found.asked.top_prompt) == (2, 4)  # the first token has nothing before it


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (body(), "prompt is missing"),
        (body(prompt=""), "The prompt is missing or given twice: send prompt_token_ids, or a text"),
        (body(prompt={}), "The prompt is missing or given twice"),
        (body(prompt={"prompt_token_ids": []}), "The prompt is missing or given twice"),
        (body(prompt={"prompt_token_ids": [1], "prompt": "a"}), "The prompt is missing or given twice"),
        (body(prompt={"prompt_token_ids": [1], "multi_modal_data": {}}), "unknown field `multi_modal_data`"),
        (body(prompt={"prompt_token_ids": [-1]}), "prompt_token_ids must be at most 16777216 token ids"),
        (body(prompt={"prompt_token_ids": [1 << 31]}), "prompt_token_ids must be at most 16777216 token ids"),
        (body(prompt={"prompt_token_ids": [1.5]}), "got `float`"),
        (body(prompt=[1, 2]), "Expected `str | object`, got `array`"),
        (body(prompt="a", guided_regex="a*"), "Object contains unknown field `guided_regex`"),
        (body(prompt="a", min_tokens=4), "min_tokens is not offered here"),
        (body(prompt="a", n=0), "n is 0, but must be from 1 to 256"),
        (body(prompt="a", max_tokens=0), "max_tokens is 0, but must be from 1 to"),
        (body(prompt="a", temperature=-1.0), "temperature is -1.0"),
        (body(prompt="a", top_p=0.0), "top_p is 0"),
        (body(prompt="a", logprobs=21), "logprobs is 21, but must be from 0 to 20"),
        (body(prompt="a", logprobs=-1), "logprobs is -1, but must be from 0 to 20"),
        (body(prompt="a", prompt_logprobs=1), "send the prompt as prompt_token_ids"),
        (body(**TOKENS, prompt_logprobs=21), "prompt_logprobs is 21, but must be from 0 to 20"),
        (body(prompt="a", temperature=math.nan), "temperature is NaN or infinite"),
        (b"{", "could not be read as JSON"),
    ],
)
def test_what_cannot_be_sampled_is_refused_in_words(given: bytes, why: str) -> None:
    with pytest.raises(Refused) as refused:
        read_vllm(given)
    assert why in refused.value.why


@pytest.mark.parametrize(
    ("names", "vllm"),
    [
        ({"prompt", "logprobs", "n"}, True),
        ({"prompt"}, True),
        ({"input_ids", "sampling_params"}, False),
        ({"text"}, False),
        ({"prompt", "text"}, False),
        (set(), False),
    ],
)
def test_the_forms_of_vllm_and_sglang_are_told_apart_by_their_fields(names: set[str], vllm: bool) -> None:
    assert is_vllm(names) == vllm


FIRST = SampledTokens(tokens=int32s(5, 6), logprobs=float32s(-1.0, -2.0), finish=FinishReason.LENGTH)
SECOND = SampledTokens(
    tokens=int32s(7),
    logprobs=float32s(-0.5),
    finish=FinishReason.STOP,
    top=[[(9, -0.25), (7, -0.5)]],
)


def test_samples_are_told_with_the_logprob_of_each_token() -> None:
    request = read_vllm(body(**TOKENS, logprobs=0, n=2))
    plain = SampledTokens(tokens=SECOND.tokens, logprobs=SECOND.logprobs, finish=SECOND.finish)
    assert json.loads(write_vllm(request, [FIRST, plain], ["ab", "c"], PROMPT)) == {
        "text": ["ab", "c"],
        "prompt": "Hi",
        "finish_reasons": ["length", "stop"],
        "logprobs": [[[{"5": -1.0}], [{"6": -2.0}]], [[{"7": -0.5}]]],
        "prompt_token_ids": [1, 2],
        "token_ids": [[5, 6], [7]],
    }


def test_the_token_that_was_sampled_comes_before_the_others() -> None:
    """Clients take the first of a place for it."""
    answer = json.loads(write_vllm(read_vllm(body(**TOKENS, logprobs=2)), [SECOND], ["c"], PROMPT))
    ((place,),) = answer["logprobs"][0]
    assert list(place.items()) == [("7", -0.5), ("9", -0.25)]


def test_without_logprobs_the_answer_is_text() -> None:
    answer = json.loads(write_vllm(read_vllm(body(**TOKENS)), [FIRST], ["ab"], PROMPT))
    assert answer == {"text": ["ab"], "prompt": "Hi", "finish_reasons": ["length"]}


def test_a_streamed_answer_is_a_line_of_prompt_and_text() -> None:
    request = read_vllm(body(**TOKENS, logprobs=0, stream=True))
    line = write_vllm(request, [FIRST, SECOND], ["ab", "c"], PROMPT)
    assert line.endswith(b"}\n")
    assert json.loads(line) == {"text": ["Hiab", "Hic"]}


ENDED = [*tokens_of("a fox", end=False), IM_END]
STOPPED = tokens_of("a fox. b", end=False)


@pytest.mark.parametrize(
    ("how", "tokens", "shown"),
    [
        ({}, ENDED, "as it was read"),
        ({"detokenize": False}, ENDED, ""),
        ({"skip_special_tokens": False}, ENDED, "a fox"),
        ({"include_stop_str_in_output": True}, ENDED, "a fox"),
        ({"include_stop_str_in_output": True, "skip_special_tokens": False}, ENDED, "a fox<|im_end|>"),
        ({"skip_special_tokens": False, "stop": "."}, STOPPED, "a fox"),
        ({"include_stop_str_in_output": True, "stop": ["b", "."]}, STOPPED, "a fox."),
        ({"stop": "<|im_end|>", "skip_special_tokens": False}, ENDED, "a fox"),
    ],
)  # fmt: skip
def test_the_text_of_an_answer_is_written_as_vllm_writes_it(how: dict[str, Any], tokens: list[int], shown: str) -> None:
    sample = SampledTokens(tokens=int32s(*tokens), logprobs=b"", finish=FinishReason.STOP)
    assert shown_text(read_vllm(body(**TOKENS, **how)), sample, "as it was read", TEXT.tokenizer) == shown


def test_stop_texts_need_a_text_as_in_vllm() -> None:
    with pytest.raises(Refused, match="stop texts need decoded text"):
        read_vllm(body(**TOKENS, detokenize=False, stop="x"))


def test_the_logprobs_of_a_prompt_begin_with_nothing() -> None:
    request = read_vllm(body(prompt={"prompt_token_ids": [1, 2, 3]}, prompt_logprobs=1))
    scores = float32s(math.nan, -1.0, -2.0)
    answer = json.loads(write_vllm(request, [FIRST], ["a"], ScoredPrompt("Hi", scores, [(), [(2, -1.0)], [(9, -0.5)]])))
    assert answer["prompt_logprobs"] == [None, {"2": -1.0}, {"3": -2.0, "9": -0.5}]
    assert list(answer["prompt_logprobs"][2]) == ["3", "9"]


def test_a_prompt_of_one_token_has_no_logprobs() -> None:
    request = read_vllm(body(prompt={"prompt_token_ids": [1]}, prompt_logprobs=1))
    assert request.asked.scored == 0
    assert json.loads(write_vllm(request, [FIRST], ["a"], PROMPT))["prompt_logprobs"] == [None]


def test_an_aborted_generation_is_no_sample() -> None:
    aborted = SampledTokens(tokens=int32s(5), logprobs=float32s(-1.0), finish=FinishReason.TOOL_CALLS)
    with pytest.raises(ValueError, match="ended with tool_calls"):
        write_vllm(read_vllm(body(**TOKENS)), [aborted], [""], PROMPT)
