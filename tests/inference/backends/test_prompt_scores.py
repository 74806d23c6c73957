"""Prompts are scored as transformers scores them, however they are cut into passes and whatever the cache holds."""

import math
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
import torch
from transformers import PreTrainedModel

from bombus.errors import Code, Refused
from bombus.hive.generation import SCORES_A_FRAME_MAX, Generate
from bombus.hive.records import unpack_logprobs
from bombus_inference.backends.limits import Limits
from bombus_inference.backends.torch.prompt_scores import PromptScoring, ScoredPiece, rows_at_once, score
from tests.inference.backends.small_adapters import address_of, loaded, random_adapter, with_merged
from tests.inference.backends.small_engines import (
    Answer,
    Answers,
    another,
    answer,
    engine_for,
    finish,
    llama,
    qwen,
    reference_logprobs,
    request,
    worst_difference,
)

MODELS = {"llama": llama, "qwen": qwen}
PROMPT = [number * 7 % 60 for number in range(90)]


@pytest.fixture(params=sorted(MODELS), scope="module")
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return MODELS[request.param]()


def scored(body: Generate, top: int = 0, adapter: str = "") -> Generate:
    return msgspec.structs.replace(body, prompt_logprobs=True, top_prompt=top, adapter=adapter)


def check(model: PreTrainedModel, prompt: Sequence[int], made: Answer) -> None:
    """Compare with the log-softmax of transformers' own forward pass."""
    expected = reference_logprobs(model, prompt[:1], prompt[1:])
    chosen = expected.gather(1, torch.tensor(prompt[1:])[:, None]).squeeze(1)
    assert math.isnan(made.prompt_logprobs[0])
    assert made.prompt_logprobs[1:] == pytest.approx(chosen.tolist(), abs=1e-4)


@pytest.mark.parametrize("budget", [7, 32, 1024])
def test_scores_equal_those_of_transformers_in_passes_of_any_size(model: PreTrainedModel, budget: int) -> None:
    made = answer(engine_for(model, prefill_tokens_max=budget), scored(request(PROMPT, max_tokens=1)))
    check(model, PROMPT, made)
    assert len(made.only.tokens) == 1
    assert worst_difference(model, PROMPT, made.only) < 1e-4


@pytest.mark.parametrize("at_once", [1, 4, 10, 100])
def test_the_scores_do_not_depend_on_how_many_logits_are_computed_at_once(at_once: int) -> None:
    logits_TV = torch.log(torch.tensor([[1.0, 2.0, 5.0], [8.0, 1.0, 1.0]])).repeat(5, 1)
    seen: list[slice] = []

    def head(rows: slice) -> torch.Tensor:
        seen.append(rows)
        return logits_TV[rows]

    piece = score(head, first=2, targets=[1, 0, 2, 2], width=2, at_once=at_once)
    assert all(rows.stop - rows.start <= at_once for rows in seen)
    assert [math.exp(logprob) for logprob in piece.logprobs] == pytest.approx([2 / 8, 8 / 10, 5 / 8, 1 / 10])
    assert piece.top_tokens[:4] == [2, 1, 0, 1]
    assert [math.exp(logprob) for logprob in piece.top_logprobs[:3]] == pytest.approx([5 / 8, 2 / 8, 8 / 10])


def test_logits_of_a_large_vocabulary_are_computed_for_few_tokens_at_once() -> None:
    assert rows_at_once(1 << 18) == 64  # 2^24 logits
    assert rows_at_once(1 << 30) == 1


def test_a_prompt_in_the_cache_is_scored_again(model: PreTrainedModel) -> None:
    engine = engine_for(model)
    answer(engine, request(PROMPT))
    assert answer(engine, request(PROMPT)).only.cached == 88
    again = answer(engine, scored(request(PROMPT)))
    assert again.only.cached == 0
    check(model, PROMPT, again)
    assert answer(engine, request(PROMPT)).only.cached == 88


def test_one_choice_scores_the_prompt_and_the_others_share_its_keys_and_values(model: PreTrainedModel) -> None:
    engine = engine_for(model)
    made = answer(engine, scored(request(PROMPT[:41], n=5, max_tokens=6)))
    check(model, PROMPT[:41], made)
    assert engine.stats.prefill_tokens == 41 + 4 * 1
    assert all(worst_difference(model, PROMPT[:41], choice) < 1e-4 for choice in made.choices.values())


def test_without_tokens_to_generate_a_prompt_is_only_scored(model: PreTrainedModel) -> None:
    engine = engine_for(model)
    made = answer(engine, scored(request(PROMPT, max_tokens=0)))
    check(model, PROMPT, made)
    assert (made.only.tokens, made.only.finish) == ([], "length")
    assert engine.stats.blocks_held == 0
    assert not engine.has_work


def test_a_prompt_of_one_token_has_no_score(model: PreTrainedModel) -> None:
    made = answer(engine_for(model), scored(request([7], max_tokens=0), top=2))
    assert [math.isnan(logprob) for logprob in made.prompt_logprobs] == [True]
    assert [token for token, _ in made.prompt_tops[0]] == [0, 0]


def test_alternatives_are_the_most_likely_tokens_at_each_place(model: PreTrainedModel) -> None:
    made = answer(engine_for(model, prefill_tokens_max=16), scored(request(PROMPT, max_tokens=0), top=5))
    expected = reference_logprobs(model, PROMPT[:1], PROMPT[1:]).topk(5, dim=-1)
    assert len(made.prompt_tops) == len(PROMPT)
    for row, tokens, logprobs in zip(made.prompt_tops[1:], expected.indices.tolist(), expected.values.tolist()):
        assert [token for token, _ in row] == tokens
        assert [logprob for _, logprob in row] == pytest.approx(logprobs, abs=1e-4)


def test_scores_are_at_temperature_1_and_without_the_edits_of_what_is_sampled(model: PreTrainedModel) -> None:
    parameters: dict[str, Any] = {"temperature": 0.3, "top_k": 2, "logit_bias": {3: 50.0}, "repetition_penalty": 2.0}
    check(model, PROMPT, answer(engine_for(model), scored(request(PROMPT, max_tokens=2, **parameters))))


def test_plain_logprobs_of_sampled_tokens_are_those_of_the_model_at_temperature_1(model: PreTrainedModel) -> None:
    parameters: dict[str, Any] = {"temperature": 0.5, "top_k": 4, "presence_penalty": 1.0, "top_logprobs": 2}
    body = msgspec.structs.replace(request(PROMPT, **parameters), plain_logprobs=True)
    made = answer(engine_for(model), body).only
    assert worst_difference(model, PROMPT, made) < 1e-4
    most_likely = reference_logprobs(model, PROMPT, made.tokens).topk(2, dim=-1).indices.tolist()
    assert [[token for token, _ in row] for row in made.top] == most_likely
    other = answer(engine_for(model), request(PROMPT, **parameters)).only
    assert made.tokens == other.tokens  # the same draws
    assert worst_difference(model, PROMPT, other) > 0.1


def test_scores_of_several_adapters_in_one_pass_are_those_of_merged_models(model: PreTrainedModel) -> None:
    factors = {address_of(seed): random_adapter(model, seed, rank=seed) for seed in (1, 2, 3)}
    engine = engine_for(model, prefill_tokens_max=64)
    for address, each in factors.items():
        engine.add_adapter(address, loaded(each))
    for ticket, address in enumerate(["", *factors]):
        engine.add(ticket, scored(request(PROMPT[ticket:], max_tokens=3), adapter=address))
    answers = finish(engine)
    check(model, PROMPT, answers[0])
    for ticket, each in enumerate(factors.values(), start=1):
        check(with_merged(model, each), PROMPT[ticket:], answers[ticket])


def test_scores_are_of_one_version_when_the_weights_change_in_the_middle_of_a_prompt(model: PreTrainedModel) -> None:
    engine = engine_for(model, prefill_tokens_max=16)
    engine.add(1, scored(request(PROMPT, max_tokens=2)))
    answers = Answers()
    for _ in range(3):
        answers.take(engine.step())
    new = another(model)
    engine.swap_weights(new.state_dict(), 1, 1)
    made = finish(engine, answers)[1]
    check(new, PROMPT, made)
    assert made.prompt_version == 1
    assert set(made.only.versions) == {1}


def test_scores_that_are_complete_stay_when_the_weights_change(model: PreTrainedModel) -> None:
    engine = engine_for(model)
    engine.add(1, scored(request(PROMPT, max_tokens=20)))
    answers = Answers()
    for _ in range(5):
        answers.take(engine.step())
    engine.swap_weights(another(model).state_dict(), 1, 1)
    made = finish(engine, answers)[1]
    check(model, PROMPT, made)
    assert made.prompt_version == 0
    assert set(made.only.versions) == {0, 1}


def test_a_stream_has_the_scores_before_its_first_token(model: PreTrainedModel) -> None:
    engine = engine_for(model)
    engine.add(1, scored(request(PROMPT, max_tokens=5, stream=True)))
    answers = Answers()
    answers.take(engine.step())
    assert len(answers[1].prompt_logprobs) == len(PROMPT)
    assert len(answers[1].only.tokens) == 1
    finish(engine, answers)
    check(model, PROMPT, answers[1])


def test_scores_survive_preemption(model: PreTrainedModel) -> None:
    engine = engine_for(model, kv_cache_bytes=1 << 17, max_model_len=110, prefill_tokens_max=40)
    for ticket in range(6):
        engine.add(ticket, scored(request(PROMPT[: 60 + ticket], seed=ticket, max_tokens=40)))
    answers = finish(engine)
    assert engine.stats.preemptions > 0
    for ticket in range(6):
        check(model, PROMPT[: 60 + ticket], answers[ticket])


def test_a_model_whose_logits_are_not_numbers_gives_a_fault_and_no_scores() -> None:
    model = llama()
    model.lm_head.weight.data[3] = math.nan
    made = answer(engine_for(model), scored(request(PROMPT, max_tokens=0)))
    assert made.fault is not None
    assert "not finite" in made.fault.why
    assert made.prompt_logprobs == []


@pytest.mark.parametrize(
    ("scores", "top", "why"),
    [(True, 21, "21 alternatives .* at most 20 are"), (False, 1, "none are reported without its logprobs")],
)
def test_alternatives_out_of_range_are_refused(model: PreTrainedModel, scores: bool, top: int, why: str) -> None:
    body = msgspec.structs.replace(request(PROMPT), prompt_logprobs=scores, top_prompt=top)
    with pytest.raises(Refused, match=why) as refused:
        engine_for(model).add(1, body)
    assert refused.value.code == Code.MALFORMED


def test_long_prompts_travel_in_frames_of_bounded_size() -> None:
    prompt = [0] * (SCORES_A_FRAME_MAX + 3)
    scoring = PromptScoring(prompt, width=1)
    rest = len(prompt) - 1
    scoring.take(0, ScoredPiece([-1.0] * rest, [5] * rest, [-0.5] * rest), version=2)
    assert scoring.complete
    first, last = scoring.frames()
    assert (first.start, len(first.logprobs) // 4, len(first.top_tokens) // 4) == (0, 65_536, 65_536)
    assert (last.start, last.version, unpack_logprobs(last.logprobs)) == (65_536, 2, [-1.0, -1.0, -1.0])
    assert unpack_logprobs(last.top_logprobs) == [-0.5] * 3


def test_a_replica_that_scores_nothing_refuses_what_it_cannot_know_and_takes_the_rest() -> None:
    limits = Limits(max_model_len=100, vocabulary=60, choices_max=8, waiting_max=8)
    body = request(PROMPT, max_tokens=2)
    for refused, why in (
        (scored(body), "does not score prompts"),
        (msgspec.structs.replace(request(PROMPT, temperature=0.5), plain_logprobs=True), "at temperature 1"),
        (msgspec.structs.replace(request(PROMPT, top_k=3), plain_logprobs=True), "truncation"),
        (msgspec.structs.replace(body, adapter=address_of(1)), "serves no adapters"),
    ):
        with pytest.raises(Refused, match=why) as raised:
            limits.check(refused, 1)
        assert raised.value.code == Code.UNSUPPORTED
    assert limits.check(msgspec.structs.replace(body, plain_logprobs=True), 1) == PROMPT
