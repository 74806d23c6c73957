"""The check made when a model is loaded: the model is served or trained only if our results equal those of
transformers' forward pass.

The check ignores the family's name. If the family's code raises an exception, the model is refused too, with a message
of one sentence.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from torch import Tensor

from bombus.errors import EngineFault, in_one_line

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

log = logging.getLogger(__name__)

PROBE_TOKENS = 48  # enough for models without windows or large blocks
BEYOND_WINDOW = 24  # tokens in the probe beyond the longest window
COMPARED_MAX = 96  # the most tokens compared, at the end of a sequence, where they lie beyond the windows
# Differences in nats that rounding explains: MEAN_MAX for the mean, BULK_MAX for all logprobs in float32, or for 90 %
# of them in half precision, where rounding can route a token to another expert. In correctly computed random miniatures
# in bfloat16, the worst of 190 logprobs was off by 0.94 (mixtral), 0.71 (olmoe) and 1.23 (gpt_oss), as much as
# transformers' own two attentions differ from each other. 90 % were within 0.14, and the mean was at most 0.06.
MEAN_MAX = {torch.float32: 2e-4, torch.bfloat16: 0.1, torch.float16: 0.02}
BULK_MAX = {torch.float32: 1e-3, torch.bfloat16: 0.3, torch.float16: 0.06}
BULK = 0.9
GRADIENTS_MAX = 1e-2  # difference of float32 gradients that rounding explains, as a fraction of their norm
SCALES_OF_POSITIONS = ("dynamic", "longrope")  # kinds of rotary embedding that depend on the longest sequence length


@contextmanager
def refusing(config: "PretrainedConfig", what: str) -> Iterator[None]:
    """Turn any exception in the block into an `EngineFault` that names the architecture.

    `what` is "served" or "trained".
    """
    try:
        yield
    except Exception as error:  # a family's own code may raise anything, but users must not get a traceback
        raise EngineFault(_refusal(config, what, _sentence(error))) from error


def _refusal(config: "PretrainedConfig", what: str, why: str) -> str:
    return (
        f"this model's architecture ({config.model_type}) cannot be {what} here: {why}; docs/models.md lists which can"
    )


def _sentence(error: Exception) -> str:
    """Return an error's message on one line."""
    if isinstance(error, EngineFault):
        return " ".join(str(error).split())
    return f"its own code fails with this attention ({in_one_line(error)})"


def context_of(config: "PretrainedConfig") -> int:
    """Return the longest sequence length in tokens. Raises `EngineFault` if the configuration does not state it."""
    context = getattr(config.get_text_config(), "max_position_embeddings", None)
    if not isinstance(context, int) or context < 1:
        raise EngineFault(
            f"the configuration of this model ({config.model_type}) states no max_position_embeddings, so the length "
            "of its longest sequence is unknown: use another model"
        )
    return context


def sequence_limit(config: "PretrainedConfig", wanted: int) -> int:
    """Return the longest allowed sequence: `wanted` tokens, or the model's context if that is shorter (which is
    logged).

    Raises `EngineFault` for a model that does not support sequences of that length; see `check_positions`.
    """
    context = context_of(config)
    if context < wanted:
        log.info(
            "sequences end at %d tokens, the context of this model (%s), not at rollout.max_model_len, which is %d",
            *(context, config.model_type, wanted),
        )
    limit = min(wanted, context)
    check_positions(config, limit)
    return limit


def check_context(config: "PretrainedConfig", wanted: int) -> None:
    """Raise `EngineFault` for a model whose context is shorter than the `wanted` tokens of a job."""
    context = context_of(config)
    if context < wanted:
        raise EngineFault(
            f"rollout.max_model_len is {wanted}, but the context of this model ({config.model_type}) is {context} "
            f"tokens: set rollout.max_model_len to at most {context}, or use a model with a longer context"
        )


def check_positions(config: "PretrainedConfig", limit: int) -> None:
    """Raise `EngineFault` if the length of a sequence would change the position embeddings of its earlier tokens.

    Cached keys were computed before the sequence had its final length. `limit` is the length of the longest sequence.
    """
    text = config.get_text_config()
    for rope in _parameter_groups(getattr(text, "rope_parameters", None) or {}):
        kind = rope.get("rope_type")
        usual = rope.get("original_max_position_embeddings") or context_of(config)
        if kind in SCALES_OF_POSITIONS and limit > usual:
            raise EngineFault(
                f"the {kind} rotary embedding of this model ({config.model_type}) changes all positions once a "
                f"sequence is longer than {usual} tokens, but sequences may have {limit}: set rollout.max_model_len to "
                f"at most {usual}"
            )


def _parameter_groups(parameters: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the sets of rotary parameters in a configuration, which has one set for all layers or one for each kind of
    layer."""
    nested: list[Mapping[str, Any]] = [value for value in parameters.values() if isinstance(value, dict)]
    return nested or [parameters]


def probe_tokens(config: "PretrainedConfig", limit: int, least: int = PROBE_TOKENS) -> int:
    """Return how long a probe must be to exceed every window that is shorter than a sequence of `limit` tokens."""
    windows = [window for window in _windows(config.get_text_config().to_dict()) if window < limit]
    return min(max(least, *(window + BEYOND_WINDOW for window in windows), 0), limit, context_of(config))


def _windows(document: Mapping[str, Any]) -> Iterator[int]:
    """Yield every number in a configuration whose field name says that it limits attention."""
    for name, value in document.items():
        if isinstance(value, dict):
            yield from _windows(value)
        elif isinstance(value, int) and not isinstance(value, bool) and value > 0 and cuts_attention(name):
            yield value


def cuts_attention(name: str) -> bool:
    """Return whether the field `name` of a configuration is the length of an attention window or chunk."""
    return name != "max_window_layers" and ("window" in name or "chunk_size" in name)


def probe_sequences(vocabulary: int, tokens: int) -> list[Tensor]:
    """Return two sequences of about `tokens` ids that begin alike and end differently."""
    trunk = np.arange(tokens - tokens // 3)
    tails = [np.arange(tokens // 3 - shorter) * 5 + shift for shorter, shift in ((0, 1), (1, 3))]
    return [torch.from_numpy(np.concatenate([trunk * 7, trunk[-1] + tail]) % vocabulary) for tail in tails]


def uneven_sequences(vocabulary: int, window: int) -> list[Tensor]:
    """Return four sequences: two long answers to a prompt of 4 tokens, and two short answers to a prompt longer than
    `window`."""
    lines = []
    for prompt, answer in ((4, 2 * window), (3 * window, 4)):
        trunk = np.arange(prompt)
        lines += [np.concatenate([trunk * 7, np.arange(answer) * 5 + prompt + shift]) % vocabulary for shift in (1, 3)]
    return [torch.from_numpy(line) for line in lines]


def reference_logprobs(model: "PreTrainedModel", line_T: Tensor) -> Tensor:
    """Return the logprobs of a sequence's last tokens, computed with transformers' own attention and moved to the
    CPU."""
    ours = model.config._attn_implementation
    count = compared(line_T)
    model.set_attn_implementation("eager")
    try:
        ids = line_T.to(model.device)
        logits = model(input_ids=ids[None, :-1], use_cache=False, logits_to_keep=count).logits[0, -count:]
    finally:
        model.set_attn_implementation(ours)
    return chosen(logits, ids[-count:]).cpu()


def compared(line_T: Tensor) -> int:
    """Return how many of a sequence's last tokens to compare."""
    return min(len(line_T) - 1, COMPARED_MAX)


def check_gradients(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> None:
    """Raise `EngineFault` if the gradients of all parameters differ from transformers' by more than rounding."""
    apart, size = (
        torch.stack([each.norm() for each in gradients]).norm()
        for gradients in ([one - other for one, other in zip(ours, theirs, strict=True)], theirs)
    )
    if not apart <= GRADIENTS_MAX * size:
        raise EngineFault(
            f"its gradients differ by {float(apart / size):.3g} times their size from those of transformers' own "
            "passes, so it computes something that bombus does not"
        )


def chosen(logits_TV: Tensor, targets_T: Tensor) -> Tensor:
    return torch.log_softmax(logits_TV.float(), dim=-1).gather(1, targets_T[:, None])[:, 0]


@dataclass(frozen=True, slots=True)
class Disagreement:
    """How far our logprobs are from those of transformers, in nats."""

    worst: float
    mean: float
    bulk: float  # the 90th percentile

    @classmethod
    def between(cls, ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> Self:
        apart = (torch.cat(list(ours)) - torch.cat(list(theirs))).abs()
        return cls(float(apart.max()), float(apart.mean()), float(apart.quantile(BULK)))

    def check(self, dtype: torch.dtype) -> None:
        """Raise `EngineFault` if the difference is larger than rounding to `dtype` explains."""
        most = self.worst if dtype == torch.float32 else self.bulk
        if not (most <= BULK_MAX[dtype] and self.mean <= MEAN_MAX[dtype]):
            raise EngineFault(
                f"its logprobs differ by up to {self.worst:.3g} from those of transformers' own forward pass, so it "
                "computes something that bombus does not"
            )
