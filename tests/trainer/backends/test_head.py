"""Logprobs and entropies computed in slices, against autograd on whole logits."""

import pytest
import torch

from bombus.architectures.logits import LogitsForm
from bombus_trainer.backends.torch.head import HeadPlan, OutputLayer, chosen_logits, chosen_logprobs

HIDDEN, VOCABULARY, HEADS = 8, 17, 7
HEAD_OF_TERM = torch.tensor([0, 0, 1, 2, 3, 3, 4, 5, 6])


def given() -> tuple[torch.Tensor, torch.Tensor, HeadPlan]:
    random = torch.Generator().manual_seed(0)
    hidden = torch.randn(HEADS, HIDDEN, generator=random).requires_grad_()
    weight = torch.randn(VOCABULARY, HIDDEN, generator=random).requires_grad_()
    targets = torch.randint(VOCABULARY, (len(HEAD_OF_TERM),), generator=random)
    temperatures = torch.tensor([1.0, 0.5, 1.0, 2.0, 1.0, 0.7, 1.0])
    return hidden, weight, HeadPlan(HEAD_OF_TERM, targets, temperatures, rows_max=3)


def whole(hidden: torch.Tensor, weight: torch.Tensor, head: HeadPlan) -> tuple[torch.Tensor, torch.Tensor]:
    logprobs = torch.log_softmax((hidden @ weight.t()) / head.temperatures_U[:, None], dim=1)
    entropy = -(logprobs.exp() * logprobs).sum(dim=1)
    return logprobs[head.head_of_term_N, head.targets_N], entropy[head.head_of_term_N]


@pytest.mark.parametrize("pulls", [(1.0, 0.0), (0.0, 1.0), (1.0, -0.3)])
@pytest.mark.parametrize("trained", ["both", "hidden", "weight"])
def test_gradients_of_logprobs_and_entropies_are_those_on_whole_logits(
    pulls: tuple[float, float], trained: str
) -> None:
    hidden, weight, head = given()
    hidden.requires_grad_(trained != "weight")
    weight.requires_grad_(trained != "hidden")
    leaves = [leaf for leaf in (hidden, weight) if leaf.requires_grad]
    pull = torch.randn(2, len(HEAD_OF_TERM), generator=torch.Generator().manual_seed(1))

    def total(logprobs: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
        return (pulls[0] * pull[0] * logprobs + pulls[1] * pull[1] * entropy).sum()

    expected = torch.autograd.grad(total(*whole(hidden, weight, head)), leaves)
    actual = torch.autograd.grad(total(*chosen_logprobs(hidden, OutputLayer(weight), head, entropy_grad=True)), leaves)
    for mine, theirs in zip(actual, expected, strict=True):
        assert theirs.abs().max() > 0.1
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)


def test_a_bias_a_scale_and_a_soft_cap_are_part_of_the_logits_and_of_their_gradients() -> None:
    hidden, weight, head = given()
    bias = torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(2)).requires_grad_()
    leaves = [hidden, weight, bias]
    output = OutputLayer(weight, bias, LogitsForm(scale=0.7, cap=2.0))
    pull = torch.randn(2, len(HEAD_OF_TERM), generator=torch.Generator().manual_seed(1))

    capped = 2.0 * torch.tanh(0.7 * (hidden @ weight.t() + bias) / 2.0) / head.temperatures_U[:, None]
    logprobs = torch.log_softmax(capped, dim=1)
    entropy = -(logprobs.exp() * logprobs).sum(dim=1)[head.head_of_term_N]
    theirs = torch.stack([logprobs[head.head_of_term_N, head.targets_N], entropy])
    mine = torch.stack(chosen_logprobs(hidden, output, head, entropy_grad=True))
    torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)
    expected = torch.autograd.grad((theirs * pull).sum(), leaves)
    for actual, wanted in zip(torch.autograd.grad((mine * pull).sum(), leaves), expected, strict=True):
        torch.testing.assert_close(actual, wanted, atol=1e-5, rtol=1e-5)


def test_values_are_those_on_whole_logits() -> None:
    hidden, weight, head = given()
    for mine, theirs in zip(
        chosen_logprobs(hidden, OutputLayer(weight), head, True), whole(hidden, weight, head), strict=True
    ):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)


def test_the_logits_of_targets_are_those_among_all_with_their_gradients() -> None:
    hidden, weight, head = given()
    bias = torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(2)).requires_grad_()
    leaves = [hidden, weight, bias]
    capped = 2.0 * torch.tanh(0.7 * (hidden @ weight.t() + bias) / 2.0) / head.temperatures_U[:, None]
    theirs = capped[head.head_of_term_N, head.targets_N]
    mine = chosen_logits(hidden, OutputLayer(weight, bias, LogitsForm(scale=0.7, cap=2.0)), head)
    torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)
    for actual, wanted in zip(
        torch.autograd.grad(mine.square().sum(), leaves),
        torch.autograd.grad(theirs.square().sum(), leaves),
        strict=True,
    ):
        torch.testing.assert_close(actual, wanted, atol=1e-5, rtol=1e-5)


def test_without_a_bonus_the_entropy_has_no_gradient() -> None:
    hidden, weight, head = given()
    logprobs, entropy = chosen_logprobs(hidden, OutputLayer(weight), head)
    assert logprobs.requires_grad
    assert not entropy.requires_grad


def test_no_tensor_of_a_batch_holds_a_vocabulary_for_each_row() -> None:
    hidden, weight, head = given()
    kept: list[int] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        chosen_logprobs(hidden, OutputLayer(weight), head, entropy_grad=True)
    assert kept
    assert max(kept) <= max(hidden.numel(), weight.numel(), HEADS * HIDDEN)
