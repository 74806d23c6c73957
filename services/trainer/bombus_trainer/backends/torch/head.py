"""Computes logprobs of chosen tokens from hidden states, with the logits of only a few rows in memory at a time.

The full logits of a batch would be by far the largest tensor in training. Here only a slice of them exists at a time;
the backward pass recomputes them only if the output matrix itself is trained.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bombus.architectures.logits import AS_IS, LogitsForm


@dataclass(frozen=True, eq=False)
class OutputLayer:
    """An output layer: its matrix W [V, H], its bias [V] if any, and the transformation that is applied to its
    logits."""

    weight_VH: Tensor
    bias_V: Tensor | None = None
    form: LogitsForm = AS_IS


@dataclass(frozen=True, eq=False)
class HeadPlan:
    """Which of U hidden states predict the N targets (`head_of_term_N` never decreases), and at which temperature."""

    head_of_term_N: Tensor
    targets_N: Tensor
    temperatures_U: Tensor
    rows_max: int

    def slices(self) -> list[tuple[slice, slice]]:
        """Return slices of the hidden states, each with the slice of its terms."""
        heads = len(self.temperatures_U)
        starts = torch.arange(0, heads, self.rows_max, device=self.head_of_term_N.device)
        edges = [*torch.searchsorted(self.head_of_term_N, starts).tolist(), len(self.targets_N)]
        return [
            (slice(start, min(start + self.rows_max, heads)), slice(edges[index], edges[index + 1]))
            for index, start in enumerate(starts.tolist())
        ]


def chosen_logprobs(
    hidden_UH: Tensor, output: OutputLayer, head: HeadPlan, entropy_grad: bool = False
) -> tuple[Tensor, Tensor]:
    """Compute log softmax(logits / temperature)[target] for each term [N], and each term's entropy [N].

    The entropy has a gradient only with `entropy_grad`, which costs a second product with W. Everything is computed in
    float32, whatever the inputs are.
    """
    logprobs_N, entropy_U = _ChosenLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden_UH, output.weight_VH, output.bias_V, output.form, head, entropy_grad
    )
    return logprobs_N, entropy_U[head.head_of_term_N]


def chosen_logits(hidden_UH: Tensor, output: OutputLayer, head: HeadPlan) -> Tensor:
    """Compute only the target's logits / temperature for each term [N], with gradient, in float32."""
    products_NH = hidden_UH[head.head_of_term_N].float() * output.weight_VH[head.targets_N].float()
    outputs_N = products_NH.sum(dim=1)
    if output.bias_V is not None:
        outputs_N = outputs_N + output.bias_V[head.targets_N].float()
    return output.form(outputs_N) / head.temperatures_U[head.head_of_term_N]


def _logits(hidden_UH: Tensor, output: OutputLayer, temperatures_U: Tensor) -> tuple[Tensor, Tensor | float]:
    """Return logits / temperature [U, V], and d logits / d (hidden W^T)."""
    outputs_UV = (hidden_UH @ output.weight_VH.t()).float()
    if output.bias_V is not None:
        outputs_UV = outputs_UV + output.bias_V.float()
    logits_UV = output.form(outputs_UV)
    return logits_UV / temperatures_U[:, None], output.form.slope(logits_UV)


class _ChosenLogprobs(torch.autograd.Function):
    """d logprob_n / d hidden_u = (s_n W[target_n] - (p_u s_u) W) / temperature_u, with s the slopes of the logits.

    So (p_u s_u) W is all that the backward pass needs. Since d entropy_u / d logit_v = -p_v (log p_v + entropy_u), the
    entropy needs (p_u (log p_u + entropy_u) s_u) W.
    """

    @staticmethod
    def forward(  # noqa: PLR0913 - the inputs of an autograd function are one list
        ctx: Any,
        hidden_UH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        form: LogitsForm,
        head: HeadPlan,
        entropy_grad: bool,
    ) -> tuple[Tensor, Tensor]:
        wide_VH = _wide(weight_VH)
        output = OutputLayer(wide_VH, bias_V, form)
        logprobs_N = torch.empty(len(head.targets_N), dtype=torch.float32, device=hidden_UH.device)
        slopes_N = torch.empty_like(logprobs_N)
        entropy_U = torch.empty(len(hidden_UH), dtype=torch.float32, device=hidden_UH.device)
        needs_hidden = ctx.needs_input_grad[0]
        expected_UH = torch.empty(hidden_UH.shape if needs_hidden else (0,), device=hidden_UH.device)
        narrowing_UH = torch.empty(hidden_UH.shape if needs_hidden and entropy_grad else (0,), device=hidden_UH.device)
        for heads, terms in head.slices():
            logits_UV, slope = _logits(hidden_UH[heads].to(wide_VH.dtype), output, head.temperatures_U[heads])
            total_U = logits_UV.logsumexp(dim=1)
            at_N = head.head_of_term_N[terms] - heads.start
            logprobs_N[terms] = logits_UV[at_N, head.targets_N[terms]] - total_U[at_N]
            slopes_N[terms] = slope[at_N, head.targets_N[terms]] if isinstance(slope, Tensor) else slope
            probs_UV = torch.softmax(logits_UV, dim=1)
            entropy_U[heads] = total_U - (probs_UV * logits_UV).sum(dim=1)
            if needs_hidden:
                expected_UH[heads] = ((probs_UV * slope).to(wide_VH.dtype) @ wide_VH).float()
                if entropy_grad:
                    pull_UV = _narrowing(probs_UV, logits_UV, total_U, entropy_U[heads]) * slope
                    narrowing_UH[heads] = (pull_UV.to(wide_VH.dtype) @ wide_VH).float()
        ctx.save_for_backward(hidden_UH, weight_VH, bias_V, expected_UH, narrowing_UH, slopes_N)
        ctx.head, ctx.form = head, form
        if not entropy_grad:
            ctx.mark_non_differentiable(entropy_U)
        ctx.entropy_grad = entropy_grad
        return logprobs_N, entropy_U

    @staticmethod
    def backward(
        ctx: Any, grad_N: Tensor, entropy_grad_U: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None, None]:
        hidden_UH, weight_VH, bias_V, expected_UH, narrowing_UH, slopes_N = ctx.saved_tensors
        head: HeadPlan = ctx.head
        at_N, targets_N = head.head_of_term_N, head.targets_N
        grad_U = grad_N.new_zeros(len(hidden_UH)).index_add_(0, at_N, grad_N)
        grad_hidden = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            chosen_NH = weight_VH[targets_N].float() * (grad_N * slopes_N)[:, None]
            pulled_UH = torch.zeros_like(expected_UH).index_add_(0, at_N, chosen_NH)
            pulled_UH -= grad_U[:, None] * expected_UH
            if ctx.entropy_grad:
                pulled_UH -= entropy_grad_U[:, None] * narrowing_UH
            grad_hidden = (pulled_UH / head.temperatures_U[:, None]).to(hidden_UH.dtype)
        if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
            grads = _OutputGradients(grad_N, grad_U, entropy_grad_U if ctx.entropy_grad else None)
            grad_weight, grad_bias = _output_gradients(hidden_UH, OutputLayer(weight_VH, bias_V, ctx.form), head, grads)
        return grad_hidden, grad_weight, grad_bias, None, None, None


def _narrowing(probs_UV: Tensor, logits_UV: Tensor, total_U: Tensor, entropy_U: Tensor) -> Tensor:
    """Compute p (log p + entropy), the negative gradient of the entropy [U, V]."""
    return probs_UV * (logits_UV - total_U[:, None] + entropy_U[:, None])


@dataclass(frozen=True, eq=False)
class _OutputGradients:
    """The gradients of the logprobs, by term and summed by hidden state, and of the entropies (None if not needed)."""

    logprobs_N: Tensor
    logprobs_U: Tensor
    entropy_U: Tensor | None


def _output_gradients(
    hidden_UH: Tensor, output: OutputLayer, head: HeadPlan, grads: _OutputGradients
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of an output layer's matrix and, if it has one, of its bias."""
    weight_VH, bias_V = output.weight_VH, output.bias_V
    wide = OutputLayer(_wide(weight_VH), bias_V, output.form)
    total_VH = torch.zeros(weight_VH.shape, dtype=torch.float32, device=weight_VH.device)
    total_V = torch.zeros(weight_VH.shape[0], dtype=torch.float32, device=weight_VH.device)
    for heads, terms in head.slices():
        slice_UH = hidden_UH[heads].to(wide.weight_VH.dtype)
        logits_UV, slope = _logits(slice_UH, wide, head.temperatures_U[heads])
        probs_UV = torch.softmax(logits_UV, dim=1)
        of_entropy_UV = None
        if grads.entropy_U is not None:
            sum_U = logits_UV.logsumexp(dim=1)
            entropy_U = sum_U - (probs_UV * logits_UV).sum(dim=1)
            of_entropy_UV = _narrowing(probs_UV, logits_UV, sum_U, entropy_U).mul_(grads.entropy_U[heads, None])
        grads_UV = probs_UV.mul_(-grads.logprobs_U[heads, None])
        at_N = head.head_of_term_N[terms] - heads.start
        grads_UV.index_put_((at_N, head.targets_N[terms]), grads.logprobs_N[terms], accumulate=True)
        if of_entropy_UV is not None:
            grads_UV -= of_entropy_UV
        grads_UV /= head.temperatures_U[heads, None]
        grads_UV *= slope
        total_VH += (grads_UV.to(wide.weight_VH.dtype).t() @ slice_UH).float()
        total_V += grads_UV.sum(dim=0)
    return total_VH.to(weight_VH.dtype), None if bias_V is None else total_V.to(bias_V.dtype)


def _wide(weight_VH: Tensor) -> Tensor:
    """Convert to float32 on a CPU, where this costs little and avoids rounding logits to bfloat16's three digits."""
    return weight_VH.float() if weight_VH.device.type == "cpu" else weight_VH
