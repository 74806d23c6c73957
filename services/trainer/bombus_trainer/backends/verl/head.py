"""The output layer for models in verl's engine: it returns the trained tokens' logprobs and entropies, not logits.

verl itself computes the logits of a whole micro-batch, and several copies of them; its fused kernels need one
temperature for all tokens. This module instead runs the torch backend's head (`backends.torch.head`) within verl's
forward pass. It does not import verl.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from bombus_trainer.backends.torch.head import HeadPlan, OutputLayer, chosen_logprobs
from bombus_trainer.data.packing import Terms
from bombus_trainer.data.sharding import MicroBatch


@dataclass(frozen=True, eq=False)
class TermQuery:
    """Which of the hidden states [B x T] at the head predict the N terms, with the terms' targets and temperatures.

    If ranks share a row, `first` is the index of this query's first term among all terms of the micro-batch.
    """

    rows_N: Tensor
    head: HeadPlan
    first: int = 0

    def within(self, start: int, end: int) -> "TermQuery":
        """Return the query for a head that gets only the hidden states from `start` to `end`, and so fewer terms."""
        edges = torch.tensor([start, end], device=self.rows_N.device)
        first, last = torch.searchsorted(self.rows_N, edges).tolist()
        targets_N, temperatures_N = (
            values_N[first:last] for values_N in (self.head.targets_N, self.head.temperatures_U)
        )
        here = torch.arange(last - first, device=self.rows_N.device)
        head = HeadPlan(here, targets_N, temperatures_N, self.head.rows_max)
        return TermQuery(self.rows_N[first:last] - start, head, first)


class TermsHead(nn.Module):
    """Replaces a model's output matrix, and keeps the matrix as a parameter of the same name.

    `forward` returns [2, N]: the logprobs of the terms in `query`, with gradient, and their entropies, with gradient if
    `entropy_grad`. `result` is the last return value. Logits are computed in slices of at most `logits_bytes_max`
    bytes, or of 16 rows if that is more. Raises `ValueError` for an output layer that is not just a matrix.
    """

    def __init__(self, output: nn.Module | None, logits_bytes_max: int, entropy_grad: bool) -> None:
        super().__init__()
        if not isinstance(output, nn.Linear) or output.bias is not None:
            raise ValueError(f"its output layer is not just a matrix, but {output}")
        self.weight: nn.Parameter = output.weight
        self.rows_max: int = max(16, logits_bytes_max // (4 * output.out_features))
        self.entropy_grad: bool = entropy_grad
        self.query: TermQuery | None = None
        self.result: Tensor | None = None

    def forward(self, hidden_BTH: Tensor) -> Tensor:
        assert self.query is not None, "the engine sets the query before it passes a micro-batch on"
        chosen_NH = hidden_BTH.flatten(0, 1).index_select(0, self.query.rows_N)
        with torch.autocast(hidden_BTH.device.type, enabled=False):  # the head chooses its own precision
            output = OutputLayer(self.weight)
            self.result = torch.stack(chosen_logprobs(chosen_NH, output, self.query.head, self.entropy_grad))
        return self.result


def tensors_of(micro_batch: MicroBatch) -> dict[str, Tensor]:
    """Return a micro-batch as verl's input, jagged [B, T], with targets and temperatures where `loss_mask` is 1.

    A sequence's last token is only a target, not an input.
    """
    lengths = [len(item.tokens_T) - 1 for item in micro_batch]
    starts = np.cumsum([0, *lengths])
    terms = Terms.concatenate([item.terms for item in micro_batch])
    parts = [start + item.positions_N - 1 for start, item in zip(starts, micro_batch, strict=False)]
    rows_N = np.concatenate(parts)
    mask_T, targets_T, temperatures_T = np.zeros(sum(lengths)), np.zeros(sum(lengths)), np.ones(sum(lengths))
    mask_T[rows_N], targets_T[rows_N], temperatures_T[rows_N] = 1.0, terms.targets_N, terms.temperatures_N
    flat = {
        "input_ids": np.concatenate([item.tokens_T[:-1] for item in micro_batch]),
        "position_ids": np.concatenate([np.arange(length) for length in lengths]),
        "loss_mask": mask_T.astype(np.float32),
        "targets": targets_T.astype(np.int64),
        "temperatures": temperatures_T.astype(np.float32),
    }
    offsets = torch.from_numpy(starts)
    return {name: jagged(torch.from_numpy(values_T), offsets) for name, values_T in flat.items()}


def query_of(tensors: dict[str, Tensor], packed: bool, rows_max: int) -> TermQuery:
    """Return the head's query for a micro-batch from `tensors_of`, on the same device."""
    mask = tensors["loss_mask"]
    kept_T = mask.values() > 0
    among_T = kept_T
    if not packed:
        lengths_B = mask.offsets().diff()  # type: ignore[attr-defined]
        size = (len(lengths_B), int(lengths_B.max()))  # the default width is not always the longest length
        among_T = torch.nested.to_padded_tensor(mask, 0.0, output_size=size).flatten()
    targets_N, temperatures_N = (tensors[name].values()[kept_T] for name in ("targets", "temperatures"))
    head = HeadPlan(torch.arange(len(targets_N), device=mask.device), targets_N, temperatures_N, rows_max)
    return TermQuery(among_T.nonzero()[:, 0], head)


def of_sequences(values_N: Tensor, mask: Tensor) -> Tensor:
    """Return the terms' values [N] as a tensor that is jagged by sequence [B, N]."""
    ends_T = torch.nn.functional.pad((mask.values() > 0).cumsum(0), (1, 0))
    return jagged(values_N, ends_T[mask.offsets()])  # type: ignore[attr-defined]


def jagged(values: Tensor, offsets: Tensor) -> Tensor:
    return torch.nested.nested_tensor_from_jagged(values, offsets)
