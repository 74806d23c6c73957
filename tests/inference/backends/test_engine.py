"""The engine gives the distributions and tokens of plain transformers, whatever shares its batch and its cache."""

import math
import random
from typing import Any

import msgspec
import pytest
import torch
from transformers import PreTrainedModel

from bombus.errors import Code, EngineFault, Refused
from bombus.hive.generation import Generate
from bombus_inference.backends.torch.engine import Engine
from bombus_inference.backends.torch.patching import TensorPatch
from bombus_inference.settings import ComputeSettings
from tests.inference.backends.small_engines import (
    CONTEXT,
    VOCABULARY,
    Answers,
    another,
    answer,
    engine_for,
    finish,
    llama,
    paged,
    qwen,
    reference_logits,
    reference_logprobs,
    request,
    worst_difference,
)

MODELS = {"llama": llama, "qwen": qwen}


@pytest.fixture(params=sorted(MODELS), scope="module")
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return MODELS[request.param]()


def prompts(count: int, seed: int = 0, longest: int = 70) -> list[list[int]]:
    """Return prompts of mixed lengths, of which two thirds begin alike."""
    numbers = random.Random(seed)
    common = [numbers.randrange(VOCABULARY) for _ in range(longest)]
    made = []
    for index in range(count):
        tail = [numbers.randrange(VOCABULARY) for _ in range(numbers.randint(1, 20))]
        made.append((common[: numbers.randint(0, longest - 20)] if index % 3 else []) + tail)
    return made


def test_logprobs_agree_with_a_plain_forward_pass_for_mixed_lengths_and_shared_prefixes(model: PreTrainedModel) -> None:
    engine = engine_for(model)
    inputs = prompts(24)
    for ticket, prompt in enumerate(inputs):
        engine.add(ticket, request(prompt, seed=ticket, max_tokens=30))
    answers = finish(engine)
    assert engine.stats.cached_tokens > 0
    for ticket, prompt in enumerate(inputs):
        made = answers[ticket].only
        assert len(made.tokens) == 30
        assert worst_difference(model, prompt, made) < 1e-4


def test_a_conversation_that_goes_on_finds_its_earlier_turns_in_the_cache(model: PreTrainedModel) -> None:
    engine = engine_for(model)
    first = list(range(10, 40))
    turn = answer(engine, request(first, max_tokens=9)).only
    longer = [*first, *turn.tokens, 1, 2, 3]
    again = answer(engine, request(longer, max_tokens=9)).only
    assert again.cached == 36  # the last sampled token's keys and values were never computed: 38 // 4 blocks
    assert worst_difference(model, longer, again) < 1e-4


def test_greedy_gives_what_transformers_generates(model: PreTrainedModel) -> None:
    engine = engine_for(model)
    inputs = prompts(9, seed=1)
    for ticket, prompt in enumerate(inputs):
        engine.add(ticket, request(prompt, temperature=0.0, max_tokens=20))
    answers = finish(engine)
    for ticket, prompt in enumerate(inputs):
        ids = torch.tensor([prompt])
        expected = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=20,
            eos_token_id=-1,
            pad_token_id=0,
        )
        assert answers[ticket].only.tokens == expected[0, len(prompt) :].tolist()
        assert worst_difference(model, prompt, answers[ticket].only) < 1e-4


def test_the_same_seed_gives_the_same_tokens_whatever_else_is_in_the_batch(model: PreTrainedModel) -> None:
    body = request(list(range(20)), seed=7, max_tokens=25)
    alone = answer(engine_for(model), body).only
    engine = engine_for(model)
    for ticket, prompt in enumerate(prompts(15), start=100):
        engine.add(ticket, request(prompt, seed=None, temperature=0.7, max_tokens=ticket % 30 + 1))
    engine.step()
    engine.add(1, body)
    among = finish(engine)[1].only
    assert among.tokens == alone.tokens
    assert among.logprobs == pytest.approx(alone.logprobs, abs=1e-4)


def test_the_choices_of_a_request_differ_and_prefill_their_prompt_once(model: PreTrainedModel) -> None:
    engine = engine_for(model)
    prompt = list(range(41))
    made = answer(engine, request(prompt, n=6, max_tokens=10))
    assert len({tuple(choice.tokens) for choice in made.choices.values()}) == 6
    assert engine.stats.prefill_tokens == 41 + 5 * 1  # ten blocks are shared, the last token is computed by each
    for choice in made.choices.values():
        assert worst_difference(model, prompt, choice) < 1e-4


def test_requests_with_the_same_prompt_in_one_batch_prefill_it_once(model: PreTrainedModel) -> None:
    engine = engine_for(model, prefill_tokens_max=16)
    prompt = list(range(49))
    for ticket in range(5):
        engine.add(ticket, request(prompt, seed=ticket))
    answers = finish(engine)
    assert engine.stats.prefill_tokens == 49 + 4 * 1
    assert all(worst_difference(model, prompt, made.only) < 1e-4 for made in answers.values())


def test_a_temperature_gives_the_logprobs_of_the_tempered_distribution(model: PreTrainedModel) -> None:
    prompt = [5, 6, 7]
    made = answer(engine_for(model), request(prompt, temperature=0.6, max_tokens=20)).only
    expected = torch.log_softmax(reference_logprobs(model, prompt, made.tokens) / 0.6, dim=-1)
    chosen = expected.gather(1, torch.tensor(made.tokens)[:, None]).squeeze(1)
    assert made.logprobs == pytest.approx(chosen.tolist(), abs=1e-4)


def test_penalties_give_the_logprobs_of_the_distribution_that_they_leave(model: PreTrainedModel) -> None:
    parameters: dict[str, Any] = {
        "presence_penalty": 1.5,
        "frequency_penalty": 0.7,
        "repetition_penalty": 1.3,
        "logit_bias": {3: 2.0},
    }
    prompt = [5, 6, 7, 5]
    body = request(prompt, n=2, max_tokens=8, temperature=0.8, **parameters)
    for made in answer(engine_for(model), body).choices.values():
        for at, row in enumerate(reference_logits(model, prompt, made.tokens)):
            sampled = made.tokens[:at]
            row[3] += 2.0
            for token in {*prompt, *sampled}:
                row[token] = row[token] / 1.3 if row[token] > 0 else row[token] * 1.3
            for token in set(sampled):
                row[token] -= 0.7 * sampled.count(token) + 1.5
            expected = (row / 0.8).log_softmax(-1)[made.tokens[at]].item()
            assert made.logprobs[at] == pytest.approx(expected, abs=1e-4)


def test_alternatives_are_the_most_likely_tokens_of_each_position(model: PreTrainedModel) -> None:
    prompt = [5, 6, 7]
    made = answer(engine_for(model), request(prompt, top_logprobs=4, max_tokens=6)).only
    values, tokens = reference_logprobs(model, prompt, made.tokens).topk(4)
    assert [[token for token, _ in row] for row in made.top] == tokens.tolist()
    assert [value for row in made.top for _, value in row] == pytest.approx(values.flatten().tolist(), abs=1e-4)


def test_a_stop_token_ends_a_completion_and_is_its_last_token(model: PreTrainedModel) -> None:
    prompt = [1, 2, 3]
    free = answer(engine_for(model), request(prompt, max_tokens=20)).only
    stop = free.tokens[6]
    made = answer(engine_for(model), request(prompt, max_tokens=20, stop=(stop,))).only
    assert made.tokens == free.tokens[: free.tokens.index(stop) + 1]
    assert made.finish == "stop"
    assert free.finish == "length"


def test_a_completion_ends_where_the_model_does(model: PreTrainedModel) -> None:
    made = answer(engine_for(model), request([1] * (CONTEXT - 5), max_tokens=0)).only
    assert (len(made.tokens), made.finish) == (5, "length")


def test_streaming_gives_one_frame_per_token_and_otherwise_there_is_one_frame(model: PreTrainedModel) -> None:
    streamed = answer(engine_for(model), request([1, 2], stream=True)).only
    unstreamed = answer(engine_for(model), request([1, 2], stream=False)).only
    assert (streamed.frames, unstreamed.frames) == (12, 1)
    assert streamed.tokens == unstreamed.tokens
    assert streamed.logprobs == pytest.approx(unstreamed.logprobs, abs=1e-6)


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (request([1] * CONTEXT), Code.PROMPT_TOO_LONG),
        (request([]), Code.MALFORMED),
        (request([VOCABULARY]), Code.MALFORMED),
        (request([-1]), Code.MALFORMED),
        (request([1], n=0), Code.MALFORMED),
        (request([1], temperature=float("nan")), Code.MALFORMED),
        (request([1], temperature=-1.0), Code.MALFORMED),
        (request([1], top_p=0.0), Code.MALFORMED),
        (request([1], top_logprobs=21), Code.MALFORMED),
        (request([1], min_p=1.1), Code.MALFORMED),
        (request([1], min_p=float("nan")), Code.MALFORMED),
        (request([1], presence_penalty=2.1), Code.MALFORMED),
        (request([1], frequency_penalty=-2.1), Code.MALFORMED),
        (request([1], frequency_penalty=float("inf")), Code.MALFORMED),
        (request([1], repetition_penalty=0.0), Code.MALFORMED),
        (request([1], repetition_penalty=float("inf")), Code.MALFORMED),
        (request([1], logit_bias={VOCABULARY: 1.0}), Code.MALFORMED),
        (request([1], logit_bias={-1: 1.0}), Code.MALFORMED),
        (request([1], logit_bias={0: 101.0}), Code.MALFORMED),
        (request([1], logit_bias={0: float("nan")}), Code.MALFORMED),
        (request([1], logit_bias=dict.fromkeys(range(1025), 1.0)), Code.MALFORMED),
        (request([1], run=2), Code.WRONG_PHASE),
    ],
)
def test_what_cannot_be_served_is_refused_with_a_code(body: Generate, code: Code) -> None:
    engine = engine_for(llama())
    with pytest.raises(Refused) as refusal:
        engine.add(1, body)
    assert refusal.value.code == code
    assert not engine.has_work


def test_a_full_queue_refuses_requests() -> None:
    engine = engine_for(llama(), max_waiting=4)
    engine.add(1, request([1], n=4))
    with pytest.raises(Refused) as refusal:
        engine.add(2, request([1]))
    assert refusal.value.code == Code.OVERLOADED


def test_a_cache_that_cannot_hold_one_sequence_is_refused_when_the_engine_is_made() -> None:
    with pytest.raises(EngineFault, match="kv_cache_bytes"):
        engine_for(llama(), kv_cache_bytes=1 << 16)


def test_a_job_with_longer_sequences_than_the_cache_holds_is_served_up_to_that_length(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = llama()
    blocks = 20
    some = ComputeSettings(kv_cache_bytes=2 * blocks * _block_bytes(model), block_tokens=4)
    engine = Engine(paged(model), some, run=1, version=0, job_tokens=CONTEXT)
    assert engine.max_model_len == blocks * 4 - 1
    assert f"sequences end at 79 tokens, not at the job's {CONTEXT}" in caplog.text
    engine.add(1, request([1] * 70, max_tokens=50))
    engine.add(2, request([2] * 70, max_tokens=50))
    answers = finish(engine)
    assert [(len(answers[ticket].only.tokens), answers[ticket].only.finish) for ticket in (1, 2)] == [(9, "length")] * 2
    with pytest.raises(Refused, match="has 79 tokens; this model takes 79 for prompt and completion") as caught:
        engine.add(3, request([3] * 79))
    assert caught.value.code == Code.PROMPT_TOO_LONG


def test_the_least_of_the_length_limits_applies() -> None:
    def longest(job_tokens: int | None, **settings: Any) -> int:
        chosen = ComputeSettings(kv_cache_bytes=4 << 20, block_tokens=4, **settings)
        return Engine(paged(llama()), chosen, run=1, version=0, job_tokens=job_tokens).max_model_len

    assert longest(100) == 100
    assert longest(None) == CONTEXT
    assert longest(1 << 20) == CONTEXT, "the model's own limit"
    assert longest(100, max_model_len=60) == 60
    assert longest(100, max_model_len=120) == 100


def test_an_aborted_request_frees_its_blocks_and_gets_no_more_frames(model: PreTrainedModel) -> None:
    engine = engine_for(model)
    engine.add(1, request(list(range(50)), n=3, stream=True, max_tokens=100))
    engine.add(2, request([4, 5, 6]))
    engine.step()
    engine.abort(1)
    answers = finish(engine)
    assert list(answers) == [2]
    assert engine.stats.blocks_held == 0


def test_a_tiny_cache_makes_sequences_wait_or_restart_with_the_same_result(model: PreTrainedModel) -> None:
    inputs = prompts(10, seed=3)
    requests = [request(prompt, seed=ticket, max_tokens=40) for ticket, prompt in enumerate(inputs)]

    def run(**settings: object) -> tuple[Answers, int]:
        engine = engine_for(model, **settings)
        for ticket, one in enumerate(requests):
            engine.add(ticket, one)
        answers = finish(engine)
        assert engine.stats.blocks_held == 0
        return answers, engine.stats.preemptions

    roomy, none = run()
    # Room for 116 tokens, a little more than the longest sequence. The other half of the bytes is for rows.
    tight, some = run(kv_cache_bytes=2 * 116 // 4 * _block_bytes(model), max_model_len=112, prefill_tokens_max=24)
    assert none == 0
    assert some > 0
    for ticket, prompt in enumerate(inputs):
        assert tight[ticket].only.tokens == roomy[ticket].only.tokens
        assert worst_difference(model, prompt, tight[ticket].only) < 1e-4


def _block_bytes(model: PreTrainedModel) -> int:
    pool = engine_for(model)._pool
    return pool.block_bytes(pool.shapes, 4, torch.float32)


def test_a_swap_in_the_middle_gives_two_spans_and_drops_nothing(model: PreTrainedModel) -> None:
    engine = engine_for(model)
    prompt = list(range(30))
    engine.add(1, request(prompt, max_tokens=20))
    answers = Answers()
    for _ in range(8):
        answers.take(engine.step())
    newer = another(model)
    engine.swap_weights(newer.state_dict(), version=1, run=1)
    made = finish(engine, answers)[1].only
    assert made.versions == [0] * 8 + [1] * 12
    assert made.frames == 2
    assert engine.stats.blocks_held == 0


def test_tokens_after_a_swap_have_the_logprobs_of_the_new_weights_alone(model: PreTrainedModel) -> None:
    engine = engine_for(model)
    inputs = prompts(6, seed=3)
    for ticket, prompt in enumerate(inputs):
        engine.add(ticket, request(prompt, seed=ticket, n=2, max_tokens=20))
    answers = Answers()
    for _ in range(8):
        answers.take(engine.step())
    newer = another(model)
    engine.swap_weights(newer.state_dict(), version=1, run=1)
    finish(engine, answers)
    for ticket, prompt in enumerate(inputs):
        for made in answers[ticket].choices.values():
            old = made.versions.count(0)
            assert 0 < old < 20
            for policy, part in ((model, slice(0, old)), (newer, slice(old, 20))):
                all_logprobs = reference_logprobs(policy, prompt, made.tokens)
                expected = all_logprobs.gather(1, torch.tensor(made.tokens)[:, None]).squeeze(1)[part]
                assert float((expected - torch.tensor(made.logprobs[part])).abs().max()) < 1e-4


def test_after_a_swap_new_requests_use_new_keys_and_values_only(model: PreTrainedModel) -> None:
    engine = engine_for(model)
    prompt = list(range(30))
    engine.add(1, request(prompt, max_tokens=30))
    for _ in range(5):
        engine.step()
    newer = another(model)
    engine.swap_weights(newer.state_dict(), version=1, run=1)
    engine.add(2, request(prompt))
    answers = finish(engine)
    again = answer(engine, request([*prompt, *answers[1].only.tokens, 3])).only
    assert answers[2].only.cached == 28  # what request 1 has computed again
    assert worst_difference(newer, prompt, answers[2].only) < 1e-4
    assert again.cached == 56  # what request 1 has computed with the new weights: all but its last token
    assert worst_difference(newer, [*prompt, *answers[1].only.tokens, 3], again) < 1e-4


def test_after_a_delta_keys_and_values_of_the_old_weights_are_not_used(model: PreTrainedModel) -> None:
    engine, prompt = engine_for(model), list(range(30))
    answer(engine, request(prompt))
    newer = another(model)
    patches = {name: TensorPatch(value.detach().flatten(), None) for name, value in newer.named_parameters()}
    engine.patch_weights(patches, version=1, run=1)
    made = answer(engine, request(prompt)).only
    assert made.cached == 0
    assert worst_difference(newer, prompt, made) < 1e-4


def test_a_prompt_that_is_partly_computed_at_a_swap_restarts(model: PreTrainedModel) -> None:
    engine = engine_for(model, prefill_tokens_max=16)
    prompt = list(range(50))
    engine.add(1, request(prompt))
    engine.step()
    newer = another(model)
    engine.swap_weights(newer.state_dict(), version=1, run=1)
    made = finish(engine)[1].only
    assert made.versions == [1] * 12
    assert worst_difference(newer, prompt, made) < 1e-4


def test_weights_of_another_shape_are_refused_and_change_nothing() -> None:
    engine = engine_for(llama())
    before = answer(engine, request([1, 2])).only
    state = dict(llama(seed=1).state_dict())
    state["model.norm.weight"] = torch.ones(3)
    with pytest.raises(EngineFault, match=r"model\.norm\.weight"):
        engine.swap_weights(state, version=1, run=1)
    assert answer(engine, request([1, 2])).only == before


def test_weights_that_are_not_finite_fail_the_request_and_not_the_engine() -> None:
    engine = engine_for(llama())
    good = dict(llama().state_dict())
    bad = {name: torch.full_like(tensor, torch.nan) for name, tensor in good.items()}
    engine.swap_weights(bad, version=1, run=1)
    fault = answer(engine, request([1, 2])).fault
    assert fault is not None
    assert "not finite" in fault.why
    assert engine.stats.blocks_held == 0
    engine.swap_weights(good, version=2, run=1)
    assert worst_difference(llama(), [1, 2], answer(engine, request([1, 2])).only) < 1e-4


def at_temperature(request: Generate, temperature: float) -> Generate:
    sampling = msgspec.structs.replace(request.sampling, temperature=temperature)
    return msgspec.structs.replace(request, sampling=sampling)


def test_a_request_whose_logprobs_alone_are_not_finite_leaves_the_cache_to_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("bombus_inference.backends.limits.TEMPERATURE_MIN", 0.0)
    engine = engine_for(llama())
    engine.add(1, request(list(range(50)), max_tokens=8))
    engine.step()
    engine.add(2, at_temperature(request([4, 5], max_tokens=2), 5e-324))
    answers = finish(engine)
    assert answers[2].fault is not None
    assert worst_difference(llama(), list(range(50)), answers[1].only) < 1e-4
    again = answer(engine, request(list(range(50)), max_tokens=8))
    assert again.only.tokens == answers[1].only.tokens
    assert engine.stats.cached_tokens > 0, "keys and values of the honest request are still there"


@pytest.mark.parametrize("temperature", [5e-324, 0.0099, -0.1, math.nan])
def test_a_temperature_over_which_logits_are_not_finite_is_refused(temperature: float) -> None:
    engine = engine_for(llama())
    with pytest.raises(Refused, match="temperature"):
        engine.add(1, at_temperature(request([1, 2]), temperature))


def test_sequences_of_very_different_lengths_decode_side_by_side(model: PreTrainedModel) -> None:
    """There are rows of several capacities, some are outgrown, and not all of them fit in memory."""
    numbers = random.Random(5)
    inputs = [
        [numbers.randrange(VOCABULARY) for _ in range(length)] for length in (1, 5, 30, 50, 60, 100, 110, 126, 200)
    ]
    for budget in (4 << 20, 600 << 10):
        engine = engine_for(model, kv_cache_bytes=budget)
        for ticket, prompt in enumerate(inputs):
            engine.add(ticket, request(prompt, seed=ticket, max_tokens=50 if ticket % 2 else 7))
        answers = finish(engine)
        for ticket, prompt in enumerate(inputs):
            assert worst_difference(model, prompt, answers[ticket].only) < 1e-4


@pytest.mark.parametrize("dtype", [torch.bfloat16])
def test_half_precision_stays_near_the_plain_model(dtype: torch.dtype) -> None:
    model = llama().to(dtype)
    engine = engine_for(model)
    inputs = prompts(6)
    for ticket, prompt in enumerate(inputs):
        engine.add(ticket, request(prompt, seed=ticket))
    for ticket, made in finish(engine).items():
        assert worst_difference(model, inputs[ticket], made.only) < 0.2
