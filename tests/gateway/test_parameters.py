"""Every parameter of every API is carried out, refused, or named as left out; a new one needs its place here."""

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import pytest

from bombus.errors import Code, Refused
from bombus_gateway.anthropic import request as messages
from bombus_gateway.atropos import vllm_generate
from bombus_gateway.decoding.json_body import field_names
from bombus_gateway.generate.dialect import GenerateDialect
from bombus_gateway.openai import request as openai
from bombus_gateway.operations_wire import generate, sampling
from bombus_gateway.responses import request as responses

HI = [{"role": "user", "content": "hi"}]
FUNCTION = {"name": "f", "parameters": {"type": "object"}}
TOOLS = [{"type": "function", "function": FUNCTION}]
# How a client names a request, caches or keeps it: no answer depends on these, and nobody waits for anything.
SAID = "said of the request, and asks for nothing"
DONE, LEFT_OUT, REFUSED = "carried out", "left out by name", "refused by name"


def named(found: Any) -> list[str]:
    """Return the names of what was left out of a call."""
    return [each.field for each in found.completion.unsupported]


class ModelAPI(NamedTuple):
    """An API: what reads its bodies, one that asks for nothing, and its parameters with values that do.

    `fields` are all that it knows, of the body or of its part `within`.
    """

    read: Callable[[bytes], Any]
    base: dict[str, Any]
    fields: set[str]
    asks: Mapping[str, tuple[Any, str]]
    left_out: Callable[[Any], list[str]] = named
    within: str = ""


def nothing_left_out(found: object) -> list[str]:
    return []


SAMPLING: dict[str, tuple[Any, str]] = {
    "n": (2, DONE), "stop": ("x", DONE), "stop_token_ids": ([5], DONE), "stream": (True, DONE),
    "temperature": (0.5, DONE), "top_p": (0.5, DONE), "top_k": (5, DONE), "seed": (1, DONE), "max_tokens": (5, DONE),
    "frequency_penalty": (0.5, DONE), "presence_penalty": (0.5, DONE), "repetition_penalty": (1.5, DONE),
    "min_p": (0.5, DONE), "logit_bias": ({"5": 1.0}, DONE), "user": ("u", SAID), "stream_options": ({}, REFUSED),
}  # fmt: skip
CHAT: dict[str, tuple[Any, str]] = {
    **SAMPLING, "tools": (TOOLS, DONE), "tool_choice": ("required", LEFT_OUT), "logprobs": (True, DONE),
    "top_logprobs": (2, REFUSED), "max_completion_tokens": (5, DONE), "chat_template_kwargs": ({"a": 1}, DONE),
    "functions": ([FUNCTION], LEFT_OUT), "function_call": ({"name": "f"}, LEFT_OUT), "audio": ({}, LEFT_OUT),
    "modalities": (["audio"], LEFT_OUT), "prediction": ({}, LEFT_OUT),
    "response_format": ({"type": "json_object"}, DONE),
    "reasoning_effort": ("low", DONE), "web_search_options": ({}, LEFT_OUT), "metadata": ({"a": "b"}, SAID),
    "parallel_tool_calls": (False, DONE), "store": (True, SAID), "service_tier": ("flex", LEFT_OUT),
    "verbosity": ("low", LEFT_OUT), "prompt_cache_key": ("k", SAID), "prompt_cache_retention": ("24h", SAID),
    "safety_identifier": ("s", SAID), "reasoning_effort.": ("much", LEFT_OUT), "tool_choice.": ("odd", LEFT_OUT),
    "tools.strict": ([{"type": "function", "function": {**FUNCTION, "strict": True}}], LEFT_OUT),
    "nobody_knows": (1, LEFT_OUT),
}  # fmt: skip
COMPLETIONS: dict[str, tuple[Any, str]] = {
    **SAMPLING, "logprobs": (2, DONE), "best_of": (5, LEFT_OUT), "echo": (True, REFUSED), "suffix": ("x", REFUSED),
    "reasoning_effort": ("low", LEFT_OUT),
}  # fmt: skip
MESSAGES: dict[str, tuple[Any, str]] = {
    "max_tokens": (5, DONE), "system": ("be kind", DONE), "tools": ([{"name": "f"}], DONE),
    "tool_choice": ({"type": "any"}, LEFT_OUT), "stop_sequences": (["x"], DONE), "stream": (True, DONE),
    "temperature": (0.5, DONE), "top_p": (0.5, DONE), "top_k": (5, DONE),
    "output_config": ({"effort": "low"}, DONE), "output_format": ({"type": "json_schema", "schema": {}}, DONE),
    "context_management": ({"edits": [{"type": "x"}]}, LEFT_OUT), "container": ("c", LEFT_OUT),
    "mcp_servers": ([{}], LEFT_OUT), "thinking": ({"type": "disabled"}, DONE), "metadata": ({}, SAID),
    "cache_control": ({"type": "ephemeral"}, SAID), "diagnostics": ({}, LEFT_OUT), "service_tier": ("x", LEFT_OUT),
    "speed": ("fast", LEFT_OUT), "inference_geo": ("eu", LEFT_OUT), "betas": (["x"], SAID),
    "thinking.type": ({"type": "much"}, LEFT_OUT), "thinking.depth": ({"type": "adaptive", "depth": 1}, LEFT_OUT),
    "output_config.effort": ({"effort": "some"}, LEFT_OUT), "output_config.task_budget": ({"task_budget": 1}, LEFT_OUT),
    "tools.strict": ([{"name": "f", "strict": True}], LEFT_OUT), "tool_choice.": ({"type": "odd"}, LEFT_OUT),
    "tools.input_examples": ([{"name": "f", "input_examples": [{}]}], LEFT_OUT),
    "tools.allowed_callers": ([{"name": "f", "allowed_callers": ["code_execution"]}], LEFT_OUT),
}  # fmt: skip
RESPONSES: dict[str, tuple[Any, str]] = {
    "instructions": ("be kind", DONE), "tools": ([{"type": "function", **FUNCTION}], DONE),
    "tool_choice": ("required", LEFT_OUT), "parallel_tool_calls": (False, DONE), "stream": (True, DONE),
    "stream_options": ({"include_obfuscation": False}, SAID), "temperature": (0.5, DONE), "top_p": (0.5, DONE),
    "top_logprobs": (2, LEFT_OUT), "max_output_tokens": (5, DONE), "previous_response_id": ("resp_" + "0" * 32, DONE),
    "include": (["reasoning.encrypted_content"], DONE), "text": ({"format": {"type": "json_object"}}, DONE),
    "truncation": ("auto", LEFT_OUT), "background": (True, REFUSED), "conversation": ("c", REFUSED),
    "prompt": ({"id": "p"}, REFUSED), "chat_template_kwargs": ({"a": 1}, DONE), "reasoning": ({"effort": "low"}, DONE),
    "store": (False, SAID), "metadata": ({"a": "b"}, SAID), "client_metadata": ({}, SAID),
    "prompt_cache_key": ("k", SAID), "prompt_cache_retention": ("24h", SAID), "prompt_cache_options": ({}, SAID),
    "safety_identifier": ("s", SAID), "service_tier": ("flex", LEFT_OUT), "user": ("u", SAID),
    "max_tool_calls": (1, SAID), "text.verbosity": ({"verbosity": "low"}, LEFT_OUT),
    "reasoning.context": ({"context": "all_turns"}, LEFT_OUT), "reasoning.effort": ({"effort": "much"}, LEFT_OUT),
    "text.colour": ({"colour": "red"}, LEFT_OUT), "include.": (["other"], LEFT_OUT),
    "tools.strict": ([{"type": "function", **FUNCTION, "strict": True}], LEFT_OUT),
}  # fmt: skip
PENALTIES: dict[str, tuple[Any, str]] = {
    "temperature": (0.5, DONE), "top_p": (0.5, DONE), "top_k": (5, DONE), "min_p": (0.5, DONE), "seed": (1, DONE),
    "presence_penalty": (0.5, DONE), "frequency_penalty": (0.5, DONE), "repetition_penalty": (1.5, DONE),
    "stop": ("x", DONE), "stop_token_ids": ([5], DONE), "ignore_eos": (True, DONE), "n": (2, DONE),
    "nobody_knows": (1, REFUSED),
}  # fmt: skip
VLLM: dict[str, tuple[Any, str]] = {
    **PENALTIES, "stream": (True, DONE), "max_tokens": (5, DONE), "logprobs": (2, DONE), "prompt_logprobs": (2, DONE),
    "min_tokens": (1, REFUSED), "detokenize": (False, DONE), "skip_special_tokens": (False, DONE),
    "include_stop_str_in_output": (True, DONE),
    "spaces_between_special_tokens": (False, SAID),  # no decoder that is taken here writes any
}  # fmt: skip
SGLANG: dict[str, tuple[Any, str]] = {
    "text": ("hi", REFUSED), "sampling_params": ({"n": 2}, DONE), "return_logprob": (True, DONE),
    "top_logprobs_num": (1, REFUSED), "lora_path": ("m", DONE), "stream": (True, REFUSED),
    "return_routed_experts": (True, REFUSED), "image_data": (["x"], REFUSED), "video_data": (["x"], REFUSED),
    "audio_data": (["x"], REFUSED), "logprob_start_len": (0, REFUSED), "rid": ("r", SAID), "model": ("m", SAID),
    "nobody_knows": (1, REFUSED),
}  # fmt: skip
SGLANG_PARAMS = {**PENALTIES, "max_new_tokens": (5, DONE), "sampling_seed": (1, DONE)}
SGLANG_PARAMS["return_routed_experts"] = (True, REFUSED)
TINKER: dict[str, tuple[Any, str]] = {
    "num_samples": (2, DONE), "prompt_logprobs": (True, DONE), "topk_prompt_logprobs": (2, DONE),
    "topk_sample_logprobs": (2, DONE), "prompt_alt_tokens_k": (2, REFUSED), "target_prompt_logprobs": ({}, REFUSED),
    "record_stability_info": (True, REFUSED), "nobody_knows": (1, REFUSED),
    "prompt_logprobs_last_n": (1, SAID),  # only with prompt_logprobs
}  # fmt: skip
TINKER_PARAMS = {name: PENALTIES[name] for name in ("temperature", "top_p", "top_k", "seed", "stop", "nobody_knows")}
TINKER_PARAMS["max_tokens"] = (5, DONE)


def sampled(body: bytes) -> sampling.SampleRequest:
    """Return what an `asample` asks for, or raise what its failure says."""
    asked = sampling.read_sample(body).asked
    if not isinstance(asked, sampling.SampleRequest):
        raise Refused(Code.UNSUPPORTED, asked.error)
    return asked


TOKENS = {"prompt_token_ids": [1, 2]}
SAMPLE: dict[str, Any] = {"sampling_session_id": "s", "seq_id": 1, "type": "sample", "sampling_params": {}}
SAMPLE["prompt"] = {"chunks": [{"tokens": [1, 2, 3], "type": "encoded_text"}]}
APIS = {
    "chat": ModelAPI(openai.read_chat, {"model": "m", "messages": HI}, field_names(openai.ChatBody), CHAT),
    "completions": ModelAPI(
        openai.read_completion, {"model": "m", "prompt": "a"}, field_names(openai.CompletionBody), COMPLETIONS
    ),
    "messages": ModelAPI(
        messages.read_messages, {"model": "m", "messages": HI}, field_names(messages.MessagesBody), MESSAGES
    ),
    "responses": ModelAPI(
        responses.read_response_request,
        {"model": "m", "input": "hi"},
        field_names(responses.ResponsesBody),
        RESPONSES,
    ),
    "generate, vLLM's": ModelAPI(
        vllm_generate.read_vllm, {"prompt": TOKENS}, field_names(vllm_generate._Generate), VLLM, nothing_left_out
    ),
    "generate, SGLang's": ModelAPI(
        generate.read_generate, {"input_ids": [1]}, field_names(generate._Generate), SGLANG, nothing_left_out
    ),
    "generate, SGLang's params": ModelAPI(
        generate.read_generate,
        {"input_ids": [1]},
        field_names(generate._GenerateParams),
        SGLANG_PARAMS,
        nothing_left_out,
        "sampling_params",
    ),
    "asample": ModelAPI(sampled, SAMPLE, field_names(sampling._Sample) - {"sampling_params"}, TINKER, nothing_left_out),
    "asample's params": ModelAPI(
        sampled, SAMPLE, field_names(sampling._Params), TINKER_PARAMS, nothing_left_out, "sampling_params"
    ),
}


def each_parameter() -> Iterator[Any]:
    for name, api in APIS.items():
        for field, (value, outcome) in api.asks.items():
            yield pytest.param(api, field, value, outcome, id=f"{name}: {field}")


@pytest.mark.parametrize("name", APIS)
def test_every_field_that_an_api_knows_has_its_outcome_here(name: str) -> None:
    api = APIS[name]
    assert api.fields - set(api.base) - set(api.asks) == set()


@pytest.mark.parametrize(("api", "field", "value", "outcome"), each_parameter())
def test_a_parameter_is_carried_out_refused_or_named(api: ModelAPI, field: str, value: Any, outcome: str) -> None:
    sent = field.partition(".")[0]
    asked = {api.within: {**api.base.get(api.within, {}), sent: value}} if api.within else {sent: value}
    base, body = (json.dumps({**api.base, **more}).encode() for more in ({}, asked))
    before = api.read(base)
    if outcome == REFUSED:
        with pytest.raises(Refused) as refused:
            api.read(body)
        assert sent in f"{refused.value.why} {getattr(refused.value, 'param', '')}" or sent == "text"
        return
    found = api.read(body)
    assert api.left_out(before) == []
    assert api.left_out(found) == ([field.rstrip(".")] if outcome == LEFT_OUT else [])
    if outcome == DONE:
        assert found != before
    elif outcome == SAID:
        assert neutral(found) == neutral(before)


@pytest.mark.parametrize("value", [None, False, 0, 0.0, -0.0, "", [], {}])
@pytest.mark.parametrize("name", ["generate, SGLang's", "asample", "asample's params"])
def test_a_field_that_nobody_knows_may_have_a_value_that_asks_for_nothing(name: str, value: Any) -> None:
    api = APIS[name]
    asked = {"nobody_knows": value}
    body = {**api.base, **({api.within: {**api.base[api.within], **asked}} if api.within else asked)}
    assert api.read(json.dumps(body).encode()) == api.read(json.dumps(api.base).encode())


def neutral(found: Any) -> Any:
    """Return what was read without what only the answer repeats."""
    return getattr(found, "completion", found)


@pytest.mark.parametrize(
    ("more", "left_out"),
    [({"ignore_eos": True}, ["ignore_eos"]), ({"temperature": 0.5, "skip_special_tokens": False}, [])],
)
def test_an_episodes_generate_names_what_its_engine_decides(more: dict[str, Any], left_out: list[str]) -> None:
    found = GenerateDialect().read(json.dumps({"prompt": TOKENS, **more}).encode(), {}).completion
    assert [each.field for each in found.unsupported] == left_out
