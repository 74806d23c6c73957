"""`/generate` in SGLang's form."""

import msgspec
import pytest

from bombus.errors import Refused
from bombus.hive.records import FinishReason, SamplingParams
from bombus_gateway.operations_wire.generate import GenerateRequest, read_generate, write_generated
from bombus_gateway.operations_wire.samples import SampledTokens
from bombus_gateway.operations_wire.sampling import SampleRequest
from tests.gateway.operations_wire.protobuf_bodies import float32s, int32s


def body(**fields: object) -> bytes:
    return msgspec.json.encode(fields)


def test_a_request_of_tokens_is_read_with_all_that_it_says() -> None:
    params = {
        "max_new_tokens": 12,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 20,
        "stop": ["\n"],
        "stop_token_ids": [3],
        "seed": 1,
        "n": 2,
    }
    found = read_generate(
        body(input_ids=[1, 2], sampling_params=params, return_logprob=True, lora_path="a", model="m", other=None)
    )
    sampling = SamplingParams(max_tokens=12, temperature=0.5, top_p=0.9, top_k=20, seed=1, stop_token_ids=(3,))
    asked = SampleRequest(prompt=int32s(1, 2), sampling=sampling, samples=2, stops=("\n",))
    assert found == GenerateRequest(asked, "", "a", True)


def test_a_text_is_a_prompt_and_sglang_samples_128_tokens() -> None:
    found = read_generate(body(text="Hello", sampling_params={"ignore_eos": True, "sampling_seed": 4, "seed": 3}))
    sampling = SamplingParams(max_tokens=128, seed=4)
    assert found == GenerateRequest(SampleRequest(prompt=b"", sampling=sampling, ends_at_eos=False), "Hello")


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (body(), "The prompt is missing or given twice: send either input_ids or a text"),
        (body(text="a", input_ids=[1]), "The prompt is missing or given twice"),
        (body(input_ids=[]), "at least one token id; send one prompt at a time"),
        (body(input_ids=[[1], [2]]), "send one prompt at a time"),
        (body(input_ids=[1.5]), "input_ids has 1.5 at 0, but tokens are 32-bit integers"),
        (body(text=["a", "b"]), "text: Expected `str | null`"),
        (body(text="a", stream=True), "stream is not offered here: leave it out"),
        (body(text="a", top_logprobs_num=1), "top_logprobs_num is not offered"),
        (body(text="a", return_routed_experts=True), "return_routed_experts is not offered"),
        (body(text="a", sampling_params={"return_routed_experts": True}), "return_routed_experts is not offered"),
        (body(text="a", sampling_params={"regex": "a*"}), "Object contains unknown field `regex`"),
        (body(text="a", sampling_params={"n": 0}), "n is 0, but must be from 1 to 256"),
        (body(text="a", sampling_params={"max_new_tokens": 0}), "max_new_tokens is 0"),
        (body(text="a", sampling_params={"stop_token_ids": [-1]}), "stop takes up to 16 token ids"),
        (b"{", "could not be read as JSON"),
    ],
)
def test_what_cannot_be_sampled_is_refused_in_words(given: bytes, why: str) -> None:
    with pytest.raises(Refused) as refused:
        read_generate(given)
    assert why in refused.value.why


def sample(finish: FinishReason) -> SampledTokens:
    return SampledTokens(tokens=int32s(5, 6), logprobs=float32s(-1.0, -2.0), finish=finish)


def test_a_sample_alone_is_an_object_with_a_text_as_its_reason() -> None:
    assert write_generated([sample(FinishReason.LENGTH)], ["ab"], 3, logprobs=True) == {
        "text": "ab",
        "output_ids": [5, 6],
        "meta_info": {
            "finish_reason": "length",
            "prompt_tokens": 3,
            "completion_tokens": 2,
            "output_token_logprobs": [[-1.0, 5, None], [-2.0, 6, None]],
        },
    }


def test_several_samples_are_a_list() -> None:
    answer = write_generated([sample(FinishReason.STOP)] * 2, ["a", "b"], 3, logprobs=False)
    assert isinstance(answer, list)
    assert [each["text"] for each in answer] == ["a", "b"]
    assert answer[0]["meta_info"] == {"finish_reason": "stop", "prompt_tokens": 3, "completion_tokens": 2}


def test_an_aborted_generation_is_no_sample() -> None:
    with pytest.raises(ValueError, match="ended with tool_calls"):
        write_generated([sample(FinishReason.TOOL_CALLS)], [""], 3, logprobs=False)
