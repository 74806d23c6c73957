"""Drawing tokens: distributions, truncation, and expected values by hand."""

import math
import random
from collections.abc import Sequence

import pytest
import torch

from bombus.hive.records import SamplingParams
from bombus_inference.backends.torch.edits import LogitEdits
from bombus_inference.backends.torch.sampling import Draw, draw

# Probabilities 0.5, 0.25, 0.125, 0.125
LOGITS = torch.tensor([0.5, 0.25, 0.125, 0.125]).log()


def drawn(uniform: float, **how: float) -> tuple[int, float]:
    one = Draw(
        temperature=how.get("temperature", 1.0),
        top_p=how.get("top_p", 1.0),
        top_k=int(how.get("top_k", 0)),
        uniform=uniform,
    )
    made = draw(LOGITS[None], [one])
    return made.tokens[0], made.logprobs[0]


@pytest.mark.parametrize(
    ("uniform", "token", "probability"),
    [(0.0, 0, 0.5), (0.49, 0, 0.5), (0.51, 1, 0.25), (0.76, 2, 0.125), (0.9999999, 3, 0.125)],
)
def test_a_token_is_drawn_by_its_share_of_the_unit_interval(uniform: float, token: int, probability: float) -> None:
    found, logprob = drawn(uniform)
    assert found == token
    assert logprob == pytest.approx(math.log(probability), abs=1e-6)


def test_greedy_takes_the_most_likely_token_and_reports_the_unmodified_logprob() -> None:
    assert drawn(0.99, temperature=0.0, top_k=1) == pytest.approx((0, math.log(0.5)))


def test_top_k_keeps_the_most_likely_and_normalises() -> None:
    assert drawn(0.99, top_k=2) == pytest.approx((1, math.log(1 / 3)))


def test_top_p_keeps_the_fewest_that_reach_it() -> None:
    assert drawn(0.99, top_p=0.6) == pytest.approx((1, math.log(1 / 3)))
    assert drawn(0.99, top_p=0.5) == pytest.approx((0, 0.0))


def test_top_p_applies_to_what_top_k_left() -> None:
    # After top_k 2 the shares are 2/3 and 1/3: 0.6 is reached by the first alone.
    assert drawn(0.99, top_k=2, top_p=0.6) == pytest.approx((0, 0.0))


def test_half_the_temperature_squares_the_odds() -> None:
    _, logprob = drawn(0.0, temperature=0.5)
    assert logprob == pytest.approx(math.log(0.25 / (0.25 + 0.0625 + 2 * 0.015625)))


def test_each_row_is_drawn_with_its_own_parameters() -> None:
    draws = [
        Draw(1.0, 1.0, 0, 0.6),
        Draw(0.0, 1.0, 0, 0.0),
        Draw(1.0, 0.5, 0, 0.99),
        Draw(2.0, 1.0, 3, 0.0, top_logprobs=4),
    ]
    made = draw(LOGITS.repeat(4, 1), draws)
    assert made.tokens == [1, 0, 0, 0]
    assert [len(top) for top in made.tops] == [0, 0, 0, 3]  # what top_k removed is not an alternative


def test_many_draws_follow_the_distribution() -> None:
    torch.manual_seed(0)
    uniform = torch.rand(20_000).tolist()
    made = draw(LOGITS.expand(20_000, -1), [Draw(1.0, 1.0, 0, u) for u in uniform])
    shares = torch.bincount(torch.tensor(made.tokens), minlength=4) / 20_000
    assert shares.tolist() == pytest.approx([0.5, 0.25, 0.125, 0.125], abs=0.015)


# ---- bias, penalties and min_p --------------------------------------------------------------------------------------


def edited(
    sampling: SamplingParams, *, logits: torch.Tensor = LOGITS, prompt: Sequence[int] = (), sampled: Sequence[int] = ()
) -> list[float]:
    """Return the probabilities from which the next token is drawn."""
    edits = LogitEdits.of(sampling, prompt)
    for token in sampled:
        if edits is not None:
            edits.accept(token)
    one = Draw(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        uniform=0.0,
        top_logprobs=20,
        min_p=sampling.min_p,
        edits=edits,
    )
    (top,) = draw(logits[None], [one]).tops
    return [math.exp(dict(top).get(token, -math.inf)) for token in range(len(logits))]


def plainly_edited(
    logits: Sequence[float], sampling: SamplingParams, prompt: Sequence[int], sampled: Sequence[int]
) -> list[float]:
    """Return the same as vLLM's formulas give it, one token at a time, without truncation to top_k and top_p."""
    found = []
    for token, logit in enumerate(logits):
        logit += sampling.logit_bias.get(token, 0.0)
        if token in (*prompt, *sampled):
            logit = logit / sampling.repetition_penalty if logit > 0 else logit * sampling.repetition_penalty
        logit -= sampling.frequency_penalty * sampled.count(token)
        logit -= sampling.presence_penalty * (token in sampled)
        found.append(math.exp(logit / sampling.temperature))
    most = max(found)
    kept = [share if share / most >= sampling.min_p else 0.0 for share in found]
    return [share / sum(kept) for share in kept]


def test_a_bias_is_added_to_the_logit_of_its_token() -> None:
    # 0.125 becomes 1: the shares are 0.5, 0.25, 1 and 0.125 of 1.875.
    found = edited(SamplingParams(logit_bias={2: math.log(8)}))
    assert found == pytest.approx([0.5 / 1.875, 0.25 / 1.875, 1 / 1.875, 0.125 / 1.875])


def test_presence_counts_once_and_frequency_each_time() -> None:
    half = math.log(2)
    # Token 0 was sampled twice and token 1 once: 0.25, 0.125, 0.125 and 0.125 of 0.625.
    found = edited(SamplingParams(presence_penalty=half), prompt=[2, 2], sampled=[0, 1, 0])
    assert found == pytest.approx([0.4, 0.2, 0.2, 0.2])
    # 0.125 four times over: 0.5 / 4, 0.25 / 2.
    found = edited(SamplingParams(frequency_penalty=half), prompt=[2, 2], sampled=[0, 1, 0])
    assert found == pytest.approx([0.25] * 4)


def test_repetition_counts_the_prompt_too_and_moves_a_logit_away_from_0_or_towards_it() -> None:
    # Logits 1 and -1 become 0.5 and -2, and the last one stays.
    found = edited(
        SamplingParams(repetition_penalty=2.0), logits=torch.tensor([1.0, -1.0, 0.0]), prompt=[0], sampled=[1]
    )
    total = math.exp(0.5) + math.exp(-2) + 1
    assert found == pytest.approx([math.exp(0.5) / total, math.exp(-2) / total, 1 / total])


def test_a_bias_comes_before_the_penalties() -> None:
    # -1 + 3 is 2, and half of that is 1; the other order would give -2 + 3.
    found = edited(
        SamplingParams(repetition_penalty=2.0, logit_bias={0: 3.0}), logits=torch.tensor([-1.0, 1.0]), prompt=[0, 0]
    )
    assert found == pytest.approx([0.5, 0.5])


def test_min_p_is_relative_to_the_most_likely_token_after_the_temperature() -> None:
    assert edited(SamplingParams(min_p=0.5)) == pytest.approx([2 / 3, 1 / 3, 0, 0])
    assert edited(SamplingParams(min_p=0.5, temperature=0.5)) == pytest.approx([1, 0, 0, 0])  # 0.25 is a quarter of 1
    assert edited(SamplingParams(min_p=1.0)) == pytest.approx([1, 0, 0, 0])
    # top_p is of what min_p has left: 0.6 is reached by 2/3.
    assert edited(SamplingParams(min_p=0.5, top_p=0.6)) == pytest.approx([1, 0, 0, 0])


def test_greedy_takes_the_most_likely_token_after_bias_and_penalties() -> None:
    sampling = SamplingParams(temperature=0.0, logit_bias={3: math.log(8)}, min_p=1.0)
    made = draw(LOGITS[None], [Draw(0.0, 1.0, 0, 0.0, min_p=1.0, edits=LogitEdits.of(sampling, []))])
    assert made.tokens == [3]
    assert made.logprobs == pytest.approx([math.log(1 / 1.875)])


def test_all_wishes_together_are_as_vllms_formulas_have_them() -> None:
    rng = random.Random(14)
    for _ in range(200):
        logits = [rng.gauss(0, 3) for _ in range(12)]
        prompt, sampled = [rng.randrange(12) for _ in range(5)], [rng.randrange(12) for _ in range(rng.randrange(6))]
        sampling = SamplingParams(
            temperature=rng.choice([0.5, 1.0, 1.7]),
            min_p=rng.choice([0.0, 0.03]),
            presence_penalty=rng.uniform(-2, 2),
            frequency_penalty=rng.choice([0.0, rng.uniform(-2, 2)]),
            repetition_penalty=rng.choice([1.0, 0.7, 1.3]),
            logit_bias={rng.randrange(12): rng.uniform(-5, 5) for _ in range(3)},
        )
        found = edited(sampling, logits=torch.tensor(logits), prompt=prompt, sampled=sampled)
        assert found == pytest.approx(plainly_edited(logits, sampling, prompt, sampled), abs=1e-5)


def test_a_row_with_wishes_leaves_the_others_and_the_models_logits_alone() -> None:
    logits = LOGITS.repeat(2, 1)
    edits = LogitEdits.of(SamplingParams(logit_bias={0: -100.0}), [])
    made = draw(logits, [Draw(1.0, 1.0, 0, 0.0, min_p=0.9, edits=edits), Draw(1.0, 1.0, 0, 0.99)])
    assert made.tokens == [1, 3]
    assert made.logprobs == pytest.approx([0.0, math.log(0.125)], abs=1e-6)
    assert torch.equal(logits, LOGITS.repeat(2, 1))


def test_without_wishes_there_is_nothing_to_edit() -> None:
    assert LogitEdits.of(SamplingParams(temperature=0.5, top_p=0.5, min_p=0.5), range(100_000)) is None
