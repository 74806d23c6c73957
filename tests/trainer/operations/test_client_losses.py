"""Every loss that a caller can name: terms and gradients worked out by hand, and what is refused."""

from math import log

import pytest
import torch
from torch import Tensor

from bombus.errors import Refused
from bombus.operations import LossSpec
from bombus_trainer.operations.client_losses import CLIENT_LOSSES, ScoredTokens, read_loss, term_metrics

# Three tokens of one sequence: their probabilities now and as they were sent, so r is 2, 1/2 and 1.
NOW, SENT, ADVANTAGES = (0.5, 0.25, 0.4), (0.25, 0.5, 0.4), (1.0, -2.0, 3.0)
LN2, LN4, LN25 = log(2.0), log(4.0), log(2.5)  # LN25: of 1 / 0.4


def logs(probabilities: tuple[float, ...]) -> Tensor:
    return torch.tensor(probabilities).log()


def tokens(now: tuple[float, ...] = NOW, /, **inputs: Tensor) -> ScoredTokens:
    given = {"logprobs": logs(SENT), "advantages": torch.tensor(ADVANTAGES), **inputs}
    ones_N = torch.ones(len(now))
    return ScoredTokens(
        logprobs_N=logs(now).requires_grad_(),
        inputs=given,
        sequences_N=torch.zeros(len(now), dtype=torch.int64),
        sequences=1,
        counted_N=ones_N,
        first_N=ones_N,
    )


Row = tuple[str, dict[str, float | str], dict[str, Tensor], list[float], list[float]]
TABLE: list[Row] = [
    # -w lp, and its gradient -w
    ("cross_entropy", {}, {"weights": torch.tensor([1.0, -2.0, 0.5])}, [LN2, -2 * LN4, LN25 / 2], [-1.0, 2.0, -0.5]),
    ("per_token_ce", {}, {"weights": torch.ones(3)}, [LN2, LN4, LN25], [-1.0, -1.0, -1.0]),
    # -r A, whose gradient is itself
    ("importance_sampling", {}, {}, [-2.0, 1.0, -3.0], [-2.0, 1.0, -3.0]),
    # min(2, 1.2); min(-1, -1.6); min(3, 3): the first two are held, and have no gradient
    ("importance_sampling", {"eps_clip": 0.2}, {}, [-1.2, 1.6, -3.0], [0.0, 0.0, -3.0]),
    ("importance_sampling", {"eps_clip": 0.2, "eps_clip_high": 1.5}, {}, [-2.0, 1.6, -3.0], [-2.0, 0.0, -3.0]),
    ("ppo", {}, {}, [-1.2, 1.6, -3.0], [0.0, 0.0, -3.0]),
    ("ppo", {"clip_low_threshold": 0.4, "clip_high_threshold": 3.0}, {}, [-2.0, 1.0, -3.0], [-2.0, 1.0, -3.0]),
    # thresholds of each token: the first may go to 3, the second down to 0.4
    (
        "ppo",
        {},
        {"clip_high_threshold": torch.tensor([3.0, 1.2, 1.2]), "clip_low_threshold": torch.tensor([0.8, 0.4, 0.8])},
        [-2.0, 1.0, -3.0],
        [-2.0, 1.0, -3.0],
    ),
    # -r A lp with r constant: 2 ln 2, -(1/2)(-2)(-ln 4), 3 ln 2.5
    ("cispo", {}, {}, [2 * LN2, -LN4, 3 * LN25], [-2.0, 1.0, -3.0]),
    # r held within 0.8 and 1.5
    (
        "cispo",
        {"clip_low_threshold": 0.8, "clip_high_threshold": 1.5},
        {},
        [1.5 * LN2, -1.6 * LN4, 3 * LN25],
        [-1.5, 1.6, -3.0],
    ),
    # -(lp A - (0.5 / 2) (lp - q)^2): (lp - q)^2 is ln(2)^2, ln(2)^2, 0. The gradient is -(A - 0.5 (lp - q))
    (
        "dro",
        {"beta": 0.5},
        {},
        [LN2 + 0.25 * LN2**2, -2 * LN4 + 0.25 * LN2**2, 3 * LN25],
        [-1.0 + 0.5 * LN2, 2.0 - 0.5 * LN2, -3.0],
    ),
    # The ratio is the geometric mean of 2 and 1/2, so 1
    (
        "gspo",
        {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1},
        {"sequence_ratio_mask": torch.tensor([1.0, 1.0, 0.0])},
        [-1.0, 2.0, -3.0],
        [-1.0, 2.0, -3.0],
    ),
    # The ratio is 2 for all: min(2, 1.2); min(-4, -2.4); min(6, 3.6)
    (
        "gspo",
        {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
        {"sequence_ratio_mask": torch.tensor([1.0, 0.0, 0.0])},
        [-1.2, 4.0, -3.6],
        [0.0, 4.0, 0.0],
    ),
    ("policy_loss", {}, {}, [-1.2, 1.6, -3.0], [0.0, 0.0, -3.0]),
    ("policy_loss", {"eps_clip_high": 1.5}, {}, [-2.0, 1.6, -3.0], [-2.0, 0.0, -3.0]),
    # r of 2 and 1/2 are outside of [1 / 1.5, 1.5]
    ("policy_loss", {"icepop_beta": 1.5}, {}, [0.0, 0.0, -3.0], [0.0, 0.0, -3.0]),
    # old / rollout is 0.25 / 0.5, 0.5 / 0.1 held at 2, and 1: it multiplies the gradient as well
    (
        "policy_loss",
        {"use_tis": 1.0, "eps_clip": 0.9, "eps_clip_high": 9.0},
        {"rollout_logprobs": logs((0.5, 0.1, 0.4))},
        [-1.0, 2.0, -3.0],
        [-1.0, 2.0, -3.0],
    ),
    # the same with a lower bound: 0.25 / 0.5 is held at 0.75
    (
        "policy_loss",
        {"use_tis": 1.0, "tis_clip_low": 0.75, "eps_clip": 0.9, "eps_clip_high": 9.0},
        {"rollout_logprobs": logs((0.5, 0.1, 0.4))},
        [-1.5, 2.0, -3.0],
        [-1.5, 2.0, -3.0],
    ),
    # min(2, 1.28); min(-1, -1.6); 3, plus 0.1 times the KL. d = lp - reference is ln 2, 0, 0
    (
        "drgrpo",
        {"kl_type": "k1"},
        {"ref_logprobs": logs((0.25, 0.25, 0.4))},
        [-1.28 + 0.1 * LN2, 1.6, -3.0],
        [0.1, 0.1, -2.9],
    ),
    (
        "drgrpo",
        {"kl_type": "k2"},
        {"ref_logprobs": logs((0.25, 0.25, 0.4))},
        [-1.28 + 0.05 * LN2**2, 1.6, -3.0],
        [0.1 * LN2, 0.0, -3.0],
    ),
    # exp(-d) + d - 1 is 1/2 + ln 2 - 1, and its gradient 1 - exp(-d)
    (
        "drgrpo",
        {},
        {"ref_logprobs": logs((0.25, 0.25, 0.4))},
        [-1.28 + 0.1 * (LN2 - 0.5), 1.6, -3.0],
        [0.05, 0.0, -3.0],
    ),
    # The geometric mean of 2, 1/2 and 1
    ("drgrpo", {"beta": 0.0, "ratio_type": "sequence"}, {}, [-1.0, 2.0, -3.0], [-1.0, 2.0, -3.0]),
]


@pytest.mark.parametrize(("name", "config", "inputs", "terms", "gradient"), TABLE)
def test_a_loss_is_the_one_worked_out_by_hand(
    name: str, config: dict[str, float | str], inputs: dict[str, Tensor], terms: list[float], gradient: list[float]
) -> None:
    given = tokens(**inputs)
    found = read_loss(LossSpec(name, config)).of(given)
    assert found.terms_N.tolist() == pytest.approx(terms, abs=1e-5)
    found.terms_N.sum().backward()
    assert given.logprobs_N.grad is not None
    assert given.logprobs_N.grad.tolist() == pytest.approx(gradient, abs=1e-5)


def test_every_loss_is_in_the_table() -> None:
    assert {row[0] for row in TABLE} == set(CLIENT_LOSSES)


def test_the_third_bound_holds_what_a_negative_advantage_can_cost() -> None:
    # r is 8 and A is -1: -min(-8, -1.2) = 8, and at most 3
    given = tokens((0.8,), logprobs=logs((0.1,)), advantages=torch.tensor([-1.0]))
    plain = read_loss(LossSpec("policy_loss")).of(given).terms_N
    held = read_loss(LossSpec("policy_loss", {"eps_clip_c": 3.0})).of(given).terms_N
    assert (plain.tolist(), held.tolist()) == ([pytest.approx(8.0, rel=1e-5)], [pytest.approx(3.0)])


@pytest.mark.parametrize(
    ("config", "clipped"),
    [({}, 2.0), ({"eps_clip_c": 3.0}, 3.0), ({"icepop_beta": 1.5}, 3.0), ({"eps_clip_c": 9.0}, 2.0)],
)
def test_a_token_is_counted_as_clipped_whichever_bound_of_the_loss_has_changed_it(
    config: dict[str, float | str], clipped: float
) -> None:
    # r is 2, 1/2 and 8, and A 1, -2 and -1: the first two are held by the clip, the third by what is beyond it
    given = tokens((0.5, 0.25, 0.8), logprobs=logs((0.25, 0.5, 0.1)), advantages=torch.tensor([1.0, -2.0, -1.0]))
    found = term_metrics(read_loss(LossSpec("policy_loss", config)).of(given), given)
    assert found["clipped:sum"] == clipped


def test_the_z_loss_is_added_once_for_each_token_that_counts() -> None:
    given = ScoredTokens(
        logprobs_N=torch.tensor([-1.0, -2.0, -3.0]),
        inputs={"weights": torch.tensor([0.5, 0.5, 1.0])},
        sequences_N=torch.zeros(3, dtype=torch.int64),
        sequences=1,
        counted_N=torch.ones(3),
        first_N=torch.tensor([1.0, 0.0, 1.0]),  # two targets of one token, and one of another
        logsumexp_N=torch.tensor([2.0, 2.0, 3.0]),
    )
    found = read_loss(LossSpec("cross_entropy", {"z_loss_coef": 0.1})).of(given)
    assert found.terms_N.tolist() == pytest.approx([0.5 + 0.1 * 4, 1.0, 3.0 + 0.1 * 9])


def test_sequences_have_a_ratio_each() -> None:
    given = tokens(sequence_ratio_mask=torch.ones(3))
    apart = ScoredTokens(
        given.logprobs_N, given.inputs, torch.tensor([0, 1, 1]), 2, counted_N=torch.ones(3), first_N=torch.ones(3)
    )
    wide: dict[str, float | str] = {"clip_low_threshold": 0.0, "clip_high_threshold": 9.0}
    found = read_loss(LossSpec("gspo", wide)).of(apart)
    # 2 for the first, and the root of 1/2 for the others
    assert found.terms_N.tolist() == pytest.approx([-2.0, 2 * 0.5**0.5, -3 * 0.5**0.5], rel=1e-5)


def test_the_metrics_are_of_tokens_that_count() -> None:
    given = tokens()
    counted = ScoredTokens(
        given.logprobs_N, given.inputs, given.sequences_N, 1, torch.tensor([1.0, 0.0, 1.0]), torch.ones(3)
    )
    found = term_metrics(read_loss(LossSpec("ppo")).of(counted), counted)
    # k3 of r = 2 is 2 - ln 2 - 1
    expected = {"ratio:min": 1.0, "ratio:max": 2.0, "clipped:sum": 1.0, "kl_sampled_k3:sum": 1 - LN2}
    assert found == pytest.approx({**expected, "entropy_sampled:sum": LN4 + LN25}, rel=1e-5)
    assert all(":" in name for name in found)


def test_the_divergence_in_the_metrics_is_that_of_the_policy_that_has_sampled() -> None:
    sent, now = (0.5, 0.25, 0.25), (0.05, 0.2, 0.75)
    drawn = [0, 0, 1, 2]  # each as often as it was likely, so that the mean is the divergence itself
    given = tokens(
        tuple(now[token] for token in drawn),
        logprobs=logs(tuple(sent[token] for token in drawn)),
        advantages=torch.ones(4),
    )
    found = term_metrics(read_loss(LossSpec("importance_sampling")).of(given), given)
    divergence = sum(before * log(before / after) for before, after in zip(sent, now, strict=True))
    assert found["kl_sampled_k3:sum"] / len(drawn) == pytest.approx(divergence, rel=1e-5)


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        (LossSpec("custom"), r"no loss 'custom': the losses are cispo, cross_entropy, drgrpo, dro, gspo, .*, ppo"),
        (LossSpec("dro", {"alpha": 1.0}), "the loss dro has no parameter 'alpha': its parameters are beta"),
        (LossSpec("per_token_ce", {"x": 1.0}), "per_token_ce has no parameter 'x': it has none"),
        (LossSpec("gspo"), "missing required field `clip_low_threshold`"),
        (LossSpec("drgrpo", {"kl_type": "k9"}), r"kl_type"),
        (LossSpec("ppo", {"clip_low_threshold": "much"}), r"Expected `float`, got `str` - at `\$.clip_low_threshold`"),
        (LossSpec("ppo", {"clip_low_threshold": 2.0}), "clip_low_threshold is above clip_high_threshold"),
        (LossSpec("policy_loss", {"eps_clip_c": 1.0}), "eps_clip_c"),
        (LossSpec("policy_loss", {"tis_clip_low": 3.0}), "tis_clip_low is above tis_clip_high"),
        (LossSpec("importance_sampling", {"eps_clip_high": 0.3}), "eps_clip_high needs eps_clip"),
        (LossSpec("cispo", {"clip_high_threshold": float("nan")}), "clip_high_threshold"),
        (LossSpec("cross_entropy", {"z_loss_coef": -1.0}), "z_loss_coef"),
    ],
)
def test_a_wrong_loss_is_refused_in_a_sentence(spec: LossSpec, why: str) -> None:
    with pytest.raises(Refused, match=why):
        read_loss(spec)
