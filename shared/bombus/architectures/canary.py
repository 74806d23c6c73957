"""Computes a model's canary: logprobs of fixed sequences in float64, whatever the model's own precision, and a sum of
the bits of its weights.

In float64 the same weights give the same logprobs to seven digits on any machine, so any difference is a difference in
the weights. Only one layer at a time is in float64, which bounds the memory.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from bombus.architectures.logits import LogitsForm
from bombus.weights.canary import canary_sequences

if TYPE_CHECKING:
    from transformers import PreTrainedModel

AT_ONCE = 1 << 24  # elements of a tensor that are converted at once

Exact = Callable[[nn.Module, str, Tensor], Tensor]  # returns the values of the module's tensor of that name in float64


def in_double(module: nn.Module, name: str, value: Tensor) -> Tensor:
    """Return the values as they are."""
    return value.double()


@torch.no_grad()
def canary_logprobs(model: "PreTrainedModel", exact: Exact = in_double) -> tuple[float, ...]:
    """Return the logprobs of all tokens but the first in each of the canary's sequences, computed in one pass.

    `exact` returns the values to compute with. The family's own code may raise anything.
    """
    sequences = canary_sequences(int(model.config.get_text_config().vocab_size))
    tokens_BT = torch.tensor(sequences, device=model.device)
    with _plain_kernels(model), _in_float64(model, exact):
        hidden_BTD = model.get_decoder()(input_ids=tokens_BT[:, :-1], use_cache=False).last_hidden_state
    logprobs_N = _logprobs(model, hidden_BTD.flatten(0, 1).double(), tokens_BT[:, 1:].flatten(), exact)
    return tuple(logprobs_N.tolist())


def _logprobs(model: "PreTrainedModel", hidden_ND: Tensor, targets_N: Tensor, exact: Exact) -> Tensor:
    """Return the logprobs of the targets [N], with only one part of the output layer at a time in float64."""
    head, form = model.get_output_embeddings(), LogitsForm.of(model.config)
    bias_V = getattr(head, "bias", None)
    total_N = hidden_ND.new_full((len(hidden_ND),), -torch.inf)
    chosen_N = torch.zeros_like(total_N)
    at_once = max(1, AT_ONCE // head.weight.shape[1])
    for start in range(0, len(head.weight), at_once):
        part = slice(start, start + at_once)
        bias = None if bias_V is None else exact(head, "bias", bias_V[part])
        logits_NV = form(linear(hidden_ND, exact(head, "weight", head.weight[part]), bias))
        total_N = torch.logaddexp(total_N, logits_NV.logsumexp(dim=-1))
        here_N = (targets_N >= start) & (targets_N < start + logits_NV.shape[1])
        chosen_N[here_N] = logits_NV[here_N, targets_N[here_N] - start]
    return chosen_N - total_N


@contextmanager
def _plain_kernels(model: "PreTrainedModel") -> Iterator[None]:
    """Within the block, attention and experts are computed by transformers' own code, whose kernels take float64."""
    attention, experts = model.config._attn_implementation, model.config._experts_implementation
    try:
        model.set_attn_implementation("eager")
        model.set_experts_implementation("eager")
        yield
    finally:
        model.set_attn_implementation(attention)
        model.set_experts_implementation(experts)


@contextmanager
def _in_float64(model: "PreTrainedModel", exact: Exact) -> Iterator[None]:
    """Within the block, each part of the decoder is in float64 while it computes."""
    decoder, embedding = model.get_decoder(), model.get_input_embeddings()
    swapped = _Swapped(exact)

    def enter(part: nn.Module, arguments: object) -> None:
        for module in part.modules():
            swapped.swap(module)

    def look_up(module: nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Convert only the rows of an embedding that are used."""
        assert isinstance(module, nn.Embedding)
        rows, tokens = arguments[0].unique(return_inverse=True)
        swapped.put(module.__dict__, "padding_idx", None)
        swapped.put(module._parameters, "weight", exact(module, "weight", module.weight[rows]))
        return tokens, *arguments[1:]

    handles = []
    try:
        for part in _parts(decoder):
            if isinstance(part, nn.Embedding) and part is embedding:
                handles.append(part.register_forward_pre_hook(look_up))
            else:
                handles.append(part.register_forward_pre_hook(enter))
            handles.append(part.register_forward_hook(lambda *_: swapped.undo()))
        yield
    finally:
        swapped.undo()
        for handle in handles:
            handle.remove()


def _parts(decoder: nn.Module) -> Iterator[nn.Module]:
    """Yield the decoder's layers, and its other parts."""
    for child in decoder.children():
        if isinstance(child, nn.ModuleList):
            yield from child
        else:
            yield child


class _Swapped:
    """Tensors in modules that are temporarily replaced."""

    def __init__(self, exact: Exact) -> None:
        self._exact = exact
        self._own: list[tuple[Any, str, object]] = []

    def swap(self, module: nn.Module) -> None:
        """Replace a module's own floating-point tensors: parameters, buffers and plain attributes."""
        for store in (module._parameters, module._buffers, module.__dict__):
            for name, value in list(store.items()):
                if isinstance(value, Tensor) and value.is_floating_point():
                    self.put(store, name, self._exact(module, name, value))

    def put(self, store: Any, name: str, value: object) -> None:
        """Replace an entry of one of a module's dictionaries."""
        self._own.append((store, name, store[name]))
        store[name] = value

    def undo(self) -> None:
        while self._own:
            store, name, value = self._own.pop()
            store[name] = value


def sum_of_bits(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Return a sum over the bits of all values, in whatever order and precision they are held.

    Each value counts with the bits that it has in float32, which represents bfloat16 and float16 exactly.
    """
    total = 0
    for name, tensor in tensors:
        factor = int.from_bytes(sha256(name.encode()).digest()[:8], "little") | 1
        for part in tensor.detach().flatten().split(AT_ONCE):
            whole = part.float().view(torch.int32) if part.is_floating_point() else part
            total += factor * int(whole.sum(dtype=torch.int64))
    return f"{total % 2**64:016x}"
