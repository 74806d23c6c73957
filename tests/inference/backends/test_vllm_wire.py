"""vLLM's wire format, with answers as recorded from version 0.32."""

import json
from typing import Any

import msgspec
import pytest

from bombus.errors import Code, Refused
from bombus.hive.generation import CallShape, Constraint, Generate
from bombus_inference.backends.answers import ChoiceDelta
from bombus_inference.backends.http_calls import BackendFailed
from bombus_inference.backends.limits import Limits
from bombus_inference.backends.vllm.prometheus import NAMES, vllm_metrics
from bombus_inference.backends.vllm.structured import structured_outputs
from bombus_inference.backends.vllm.wire import VersionSpan, parse_deltas, request_body, versions_of
from bombus_inference.backends.wire import WeightLabel
from bombus_inference.server import HELP
from tests.inference.backends.small_engines import request

ENTRY: dict[str, Any] = {
    "token_id": 30,
    "logprob": -3.75,
    "rank": 20,
    "top_logprobs": [{"token_id": 30, "logprob": -3.75, "rank": 20}],
}
CHUNK: dict[str, Any] = {
    "request_id": "generate-tokens-1", "usage": None, "output_mode": "tokens",
    "choices": [
        {
            "index": 1, "finish_reason": "stop", "stop_reason": 39, "token_ids": [30], "routed_experts": None,
            "sampling_mask": None, "weight_versions": [{"version": "7/3", "start": 0, "end": 2}],
            "logprobs": {"content": [ENTRY]},
        }
    ],
}  # fmt: skip


def test_a_chunk_becomes_a_delta_with_a_version_for_each_token_so_far() -> None:
    assert parse_deltas(json.dumps(CHUNK).encode(), 7, 0) == [
        ChoiceDelta(choice=1, tokens=[30], logprobs=[-3.75], tops=[], finish="stop", versions=[3, 3])
    ]


def test_alternatives_leave_out_the_sampled_token_if_it_is_not_among_the_most_likely() -> None:
    tops = [{"token_id": 30, "logprob": -3.75, "rank": 20}, {"token_id": 8, "logprob": -3.25, "rank": 1}]
    chunk = {"choices": [{**CHUNK["choices"][0], "logprobs": {"content": [{**ENTRY, "top_logprobs": tops}]}}]}
    assert parse_deltas(json.dumps(chunk).encode(), 7, 1)[0].tops == [((8, -3.25),)]


def test_cached_prompt_tokens_are_in_the_usage() -> None:
    chunk = {**CHUNK, "usage": {"prompt_tokens": 500, "prompt_tokens_details": {"cached_tokens": 384}}}
    assert parse_deltas(json.dumps(chunk).encode(), 7, 0)[0].cached_prompt_tokens == 384


def test_an_error_in_a_stream_is_raised() -> None:
    with pytest.raises(BackendFailed, match="out of memory"):
        parse_deltas(b'{"error": {"message": "out of memory", "type": "InternalServerError", "code": 500}}', 7, 0)


def test_logprobs_of_other_tokens_are_an_error() -> None:
    chunk = {"choices": [{**CHUNK["choices"][0], "token_ids": [31]}]}
    with pytest.raises(BackendFailed, match="do not belong to the tokens"):
        parse_deltas(json.dumps(chunk).encode(), 7, 0)


def test_an_end_without_versions_is_an_error() -> None:
    chunk = {"choices": [{**CHUNK["choices"][0], "weight_versions": None}]}
    with pytest.raises(BackendFailed, match="does not say which weights"):
        parse_deltas(json.dumps(chunk).encode(), 7, 0)


@pytest.mark.parametrize(
    ("spans", "words"),
    [
        ([("6/3", 0, 2)], "labelled '6/3'"),
        ([("default", 0, 2)], "labelled 'default'"),
        ([("7/3", 0, 2), ("7/4", 3, 4)], "leave out tokens"),
    ],
)
def test_tokens_of_another_run_or_without_our_label_are_refused(spans: list[tuple[str, int, int]], words: str) -> None:
    with pytest.raises(BackendFailed, match=words):
        versions_of([VersionSpan(*span) for span in spans], 7)


def test_spans_are_one_version_for_each_token() -> None:
    assert str(WeightLabel(7, 3)) == "7/3"
    assert versions_of([VersionSpan("7/3", 0, 2), VersionSpan("7/4", 2, 3)], 7) == [3, 3, 4]


def parameters_of(generate: Generate) -> dict[str, Any]:
    """Return the sampling parameters that are sent for a request with prompt [4] and at most 8 tokens in all."""
    parameters: dict[str, Any] = json.loads(request_body(generate, [4], 8, "policy", stream=False))["sampling_params"]
    return parameters


def test_a_request_sets_every_sampling_parameter() -> None:
    generate = request([4, 5], n=2, max_tokens=9, seed=1, top_k=3, stop=(7,), top_logprobs=2, stream=True)
    body = json.loads(request_body(generate, [4, 5], 8, "adapter", stream=True))
    assert body["token_ids"] == [4, 5]
    assert body["model"] == "adapter"
    assert body["stream"]
    expected = {
        "n": 2,
        "max_tokens": 6,
        "seed": 1,
        "top_k": 3,
        "stop_token_ids": [7],
        "ignore_eos": True,
        "logprobs": 3,
    }
    assert {name: body["sampling_params"][name] for name in expected} == expected
    assert "seed" not in parameters_of(request([4], seed=None))


def test_wishes_are_sent_by_their_names_and_only_where_there_are_any() -> None:
    names = {"min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias"}
    plain = parameters_of(request([4]))
    assert names.isdisjoint(plain)
    parameters: dict[str, Any] = {
        "min_p": 0.1,
        "presence_penalty": 1.0,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.2,
    }
    body = json.loads(request_body(request([4], logit_bias={7: -3.0}, **parameters), [4], 8, "policy", stream=False))[
        "sampling_params"
    ]
    assert {name: body[name] for name in names} == parameters | {"logit_bias": {"7": -3.0}}


def test_its_metrics_get_our_names_summed_over_its_engines() -> None:
    text = (
        "# HELP vllm:num_requests_running Number of requests in model execution batches.\n"
        'vllm:num_requests_running{engine="0",model_name="policy"} 2.0\n'
        'vllm:num_requests_running{engine="1",model_name="policy"} 1.0\n'
        'vllm:prefix_cache_queries_total{engine="0",model_name="policy"} 400.0\n'
        'vllm:prefix_cache_hits_total{engine="0",model_name="policy"} 100.0\n'
        'vllm:engine_sleep_state{engine="0",sleep_state="awake"} 1.0\n'
    )
    assert vllm_metrics(text) == {
        "running": 3.0,
        "prefix_queried_tokens_total": 400.0,
        "cached_tokens_total": 100.0,
        "prefix_hit_ratio": 0.25,
    }
    assert {*NAMES.values()} <= HELP.keys(), "each is documented"


# ---- the form of an answer ----------------------------------------------------------------------------------------

HERMES = Constraint(
    calls=(CallShape('f", "arguments": ', '{"type": "object"}'),),
    opens='<tool_call>\n{"name": "',
    between='}\n</tool_call>\n<tool_call>\n{"name": "',
    closes="}\n</tool_call>",
)


def form_of(constraint: Constraint) -> Any:
    """Return the format of the structural tag."""
    tag = json.loads(str(structured_outputs(constraint)["structural_tag"]))
    assert tag["type"] == "structural_tag"
    return tag["format"]


def text(value: str) -> dict[str, str]:
    return {"type": "const_string", "value": value}


def in_order(*parts: Any) -> dict[str, Any]:
    return {"type": "sequence", "elements": [*parts]}


CALL = in_order(text(HERMES.calls[0].head), {"type": "json_schema", "json_schema": {"type": "object"}})


def test_json_alone_is_a_schema_whose_keywords_vllm_checks() -> None:
    assert structured_outputs(Constraint(schema='{"enum": [1]}')) == {"json": '{"enum": [1]}'}


def test_calls_are_what_opens_them_one_and_more_of_them_and_what_closes_them() -> None:
    more = {"type": "star", "content": in_order(text(HERMES.between), CALL)}
    assert form_of(HERMES) == in_order(text(HERMES.opens), CALL, more, text(HERMES.closes))


def test_one_call_of_several_tools_is_one_of_them() -> None:
    other = CallShape("g", "{}")
    one = Constraint(calls=(*HERMES.calls, other), closes="!")
    choice = {"type": "or", "elements": [CALL, in_order(text("g"), {"type": "json_schema", "json_schema": {}})]}
    assert form_of(one) == in_order(choice, text("!"))


def test_json_or_calls_are_either() -> None:
    either = form_of(msgspec.structs.replace(HERMES, schema='{"enum": [1]}'))
    assert either["type"] == "or"
    assert either["elements"] == [{"type": "json_schema", "json_schema": {"enum": [1]}}, form_of(HERMES)]


@pytest.mark.parametrize("opens", ["", "<think>"])
def test_reasoning_comes_first_and_may_be_left_out_unless_it_has_begun(opens: str) -> None:
    first, value = form_of(Constraint(schema="{}", thinks=opens, thought="</think>"))["elements"]
    assert value == {"type": "json_schema", "json_schema": {}}
    whole = first["content"] if opens else first
    assert first["type"] == ("optional" if opens else "sequence")
    tag, space = whole["elements"]
    assert tag == {"type": "tag", "begin": opens, "content": {"type": "any_text"}, "end": "</think>"}
    assert space["type"] == "regex"


def test_only_a_request_with_a_constraint_has_structured_outputs() -> None:
    assert "structured_outputs" not in parameters_of(request([4]))
    held = msgspec.structs.replace(request([4]), constraint=Constraint(schema="{}"))
    assert parameters_of(held)["structured_outputs"] == {"json": "{}"}


def test_a_replica_that_cannot_constrain_refuses_rather_than_answer_freely() -> None:
    held = msgspec.structs.replace(request([4]), constraint=Constraint(schema="{}"))
    with pytest.raises(Refused, match="does not support structured output") as refused:
        Limits(64, 60, 1, 8).check(held, 1)
    assert refused.value.code == Code.UNSUPPORTED
    assert Limits(64, 60, 1, 8, constrains=True).check(held, 1) == [4]
