"""The head of verl's engine against whole logits: packed and padded, with several temperatures in a sequence."""

import pytest
import torch
from torch import nn

from bombus_trainer.backends.verl.head import TermsHead, of_sequences, query_of, tensors_of
from bombus_trainer.data.packing import Terms
from bombus_trainer.data.sharding import MicroBatch
from tests.trainer.small_batches import item

HIDDEN, VOCABULARY = 8, 31
LOGITS_BYTES = 16 * 4 * VOCABULARY  # slices of 16 rows, the smallest


def micro_batch() -> MicroBatch:
    """Make three sequences of 5, 2 and 30 tokens to compute; the second has nothing to train."""
    first = item([1, 2, 3, 4, 5, 6], [1, 3, 5])
    first.terms.temperatures_N[:] = [0.5, 1.0, 2.0]
    return [first, item([7, 8, 9], [], first_id=3), item(list(range(31)), range(2, 31), first_id=3, temperature=1.3)]


def whole(hidden_T: list[torch.Tensor], weight_VH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the same from the logits of every sequence alone."""
    chosen, entropies = [], []
    for hidden_TH, each in zip(hidden_T, micro_batch(), strict=True):
        positions_N = torch.from_numpy(each.positions_N)
        logits_NV = hidden_TH[positions_N - 1] @ weight_VH.t() / torch.from_numpy(each.terms.temperatures_N)[:, None]
        logprobs_NV = torch.log_softmax(logits_NV, dim=1)
        chosen.append(logprobs_NV.gather(1, torch.from_numpy(each.tokens_T)[positions_N][:, None])[:, 0])
        entropies.append(-(logprobs_NV.exp() * logprobs_NV).sum(dim=1))
    return torch.cat(chosen), torch.cat(entropies)


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("entropy_grad", [True, False])
def test_logprobs_and_entropies_of_the_terms_are_those_of_whole_logits(packed: bool, entropy_grad: bool) -> None:
    torch.manual_seed(0)
    hidden = [torch.randn(len(each.tokens_T) - 1, HIDDEN, requires_grad=True) for each in micro_batch()]
    output = nn.Linear(HIDDEN, VOCABULARY, bias=False)
    head = TermsHead(output, LOGITS_BYTES, entropy_grad)
    tensors = tensors_of(micro_batch())
    head.query = query_of(tensors, packed, head.rows_max)
    together = torch.cat(hidden)[None] if packed else nn.utils.rnn.pad_sequence(hidden, batch_first=True)
    logprobs_N, entropy_N = head(together)
    expected_N, entropies_N = whole(hidden, output.weight)
    torch.testing.assert_close(logprobs_N, expected_N)
    torch.testing.assert_close(entropy_N, entropies_N)
    leaves = [hidden[0], hidden[2], output.weight]
    pull = 0.3 if entropy_grad else 0.0
    found = torch.autograd.grad(logprobs_N.sum() + pull * entropy_N.sum(), leaves)
    wanted = torch.autograd.grad(expected_N.sum() + pull * entropies_N.sum(), leaves)
    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)
    assert head.rows_max == 16


def test_terms_are_found_in_each_part_of_a_row() -> None:
    """Three of 37 tokens before the ninth predict a term, and all from the ninth on: 3 + 5 of the first 13."""
    torch.manual_seed(0)
    hidden = torch.randn(1, 37, HIDDEN)
    head = TermsHead(nn.Linear(HIDDEN, VOCABULARY, bias=False), LOGITS_BYTES, entropy_grad=False)
    whole_query = head.query = query_of(tensors_of(micro_batch()), True, head.rows_max)
    together = head(hidden)
    parts, firsts = [], []
    for start, end in ((0, 13), (13, 26), (26, 39)):  # as three ranks share them, with two tokens of padding
        head.query = whole_query.within(start, end)
        firsts.append(head.query.first)
        parts.append(head(torch.cat([hidden, torch.zeros(1, 2, HIDDEN)], dim=1)[:, start:end]))
    assert firsts == [0, 8, 21]
    torch.testing.assert_close(torch.cat(parts, dim=1), together)


def test_results_come_back_by_sequence() -> None:
    tensors = tensors_of(micro_batch())
    terms = Terms.concatenate([each.terms for each in micro_batch()])
    jagged = of_sequences(torch.from_numpy(terms.targets_N), tensors["loss_mask"])
    assert [each.tolist() for each in jagged.unbind()] == [[2, 4, 6], [], list(range(2, 31))]


def test_positions_begin_again_and_each_document_is_a_row_of_its_own() -> None:
    tensors = tensors_of(micro_batch())
    assert tensors["input_ids"].offsets().tolist() == [0, 5, 7, 37]  # type: ignore[attr-defined]
    assert [each.tolist() for each in tensors["position_ids"].unbind()] == [[*range(5)], [0, 1], [*range(30)]]
    assert [each.tolist() for each in tensors["input_ids"].unbind()][:2] == [[1, 2, 3, 4, 5], [7, 8]]


def test_nothing_of_the_size_of_all_logits_is_kept_for_the_backward_pass() -> None:
    hidden = torch.randn(1, 37, HIDDEN, requires_grad=True)
    head = TermsHead(nn.Linear(HIDDEN, VOCABULARY, bias=False), LOGITS_BYTES, entropy_grad=True)
    head.query = query_of(tensors_of(micro_batch()), True, head.rows_max)
    kept: list[int] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        head(hidden)
    assert max(kept) <= max(37, VOCABULARY) * HIDDEN


@pytest.mark.parametrize("output", [nn.Linear(4, 8), nn.Identity(), None])
def test_an_output_layer_that_is_more_than_a_matrix_is_refused(output: nn.Module | None) -> None:
    with pytest.raises(ValueError, match="its output layer is not just a matrix, but"):
        TermsHead(output, LOGITS_BYTES, entropy_grad=False)
