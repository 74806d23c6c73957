"""Drawing tokens: distributions, truncation, and expected values by hand."""

import math

import pytest
import torch

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
