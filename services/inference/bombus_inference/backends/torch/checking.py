"""The engine's self-check at load: compares the results of a probe, computed in chunks, pages and rows, with those of
transformers' own forward pass."""

import logging
from collections.abc import Iterator

import torch
from torch import Tensor
from transformers import PreTrainedModel

from bombus.architectures.canary import canary_logprobs, sum_of_bits
from bombus.architectures.logits import LogitsForm
from bombus.architectures.probing import (
    PROBE_TOKENS,
    Disagreement,
    chosen,
    compared,
    probe_sequences,
    probe_tokens,
    reference_logprobs,
    refusing,
)
from bombus.architectures.shapes import layer_shapes
from bombus.errors import in_one_line
from bombus.hive.events import CanaryCheck
from bombus.weights.canary import CONSTANTS_ROUNDED, IN_FLOAT64, SERVED, Expected, Numerics, compare
from bombus.weights.models import persistent_buffers
from bombus_inference.backends.torch.adapters.own import AdaptedLinear
from bombus_inference.backends.torch.adapters.serving import tensors_of
from bombus_inference.backends.torch.attention import PLAN, plan_pass
from bombus_inference.backends.torch.pool import KvPool, SequenceChunk
from bombus_inference.backends.torch.rows import Rows

log = logging.getLogger(__name__)

SINGLE_TOKENS = 6  # at the end of each sequence; from the third on, they are computed in rows if rows are used
ROWS_BYTES = 256 << 20
HALF = {torch.bfloat16, torch.float16}


def check_faithful(model: PreTrainedModel, block_tokens: int, limit: int) -> None:
    """Raise `EngineFault`, naming the architecture, if this engine does not compute the model correctly."""
    with refusing(model.config, "served"):
        disagreement(model, block_tokens, limit).check(model.dtype)


def disagreement(model: PreTrainedModel, block_tokens: int, limit: int) -> Disagreement:
    """Compare what the engine computes with transformers' forward pass, for sequences of up to `limit` tokens."""
    with torch.no_grad():
        tokens = probe_tokens(model.config, limit, max(PROBE_TOKENS, 2 * block_tokens + SINGLE_TOKENS))
        lines = probe_sequences(int(model.config.get_text_config().vocab_size), tokens)
        theirs = [reference_logprobs(model, line) for line in lines]
        return Disagreement.between(_paged_logprobs(model, block_tokens, lines), theirs)


def check_model(model: PreTrainedModel, precision: str, expected: Expected) -> CanaryCheck | None:
    """Compare a model's canary with the trainer's. Return None if the canary cannot be computed or compared.

    Raises `CanaryFailed` if the two canaries do not agree.
    """
    adapted = any(isinstance(module, AdaptedLinear) for module in model.modules())
    holds = precision in ("float32", expected.canary.dtype)  # the values as they were published
    try:
        found = canary_logprobs(model)
        bits = sum_of_bits(tensors_of(model).items()) if holds and expected.canary.bits else ""
    except Exception as error:  # a family's own code may raise anything, and memory may not suffice
        log.warning("version %d is served unchecked: %s", expected.version, in_one_line(error))
        return None
    if _rounds_buffers(model) and (not bits or bits != expected.canary.bits):
        holds, bits = False, ""
    numerics = _numerics(model) if holds else SERVED[precision]
    return compare(expected, found, numerics.with_adapter_rounded() if adapted else numerics, bits)


def _numerics(model: PreTrainedModel) -> Numerics:
    """Return the numerics of a model that is computed in float64.

    Some families keep constants in the model's own precision, in buffers that are not in the model's files.
    """
    stored = persistent_buffers(model)
    constants = {value.dtype for name, value in model.named_buffers() if name not in stored}
    return CONSTANTS_ROUNDED if constants & HALF else IN_FLOAT64


def _rounds_buffers(model: PreTrainedModel) -> bool:
    """Return whether buffers that are published in float32, such as a router's biases, are in half precision here."""
    return any(value.dtype in HALF for value in persistent_buffers(model).values())


@torch.inference_mode()
def _paged_logprobs(model: PreTrainedModel, block_tokens: int, lines: list[Tensor]) -> list[Tensor]:
    """Return the logprobs of the last tokens of each sequence in `lines`, computed in passes over a cache that the
    sequences share."""
    like = next(model.parameters())
    each = len(lines[0]) // block_tokens + 1
    pool = KvPool(layer_shapes(model, PLAN), each * len(lines), block_tokens, like)
    rows = Rows(pool, ROWS_BYTES) if like.device.type == "cpu" and like.dtype == torch.float32 else None
    heads = int(model.config.get_text_config().num_attention_heads)
    form, head = LogitsForm.of(model.config), model.get_output_embeddings()
    hidden: list[list[Tensor]] = [[] for _ in lines]
    for chunks in _passes(lines, each):
        plan = plan_pass(pool, rows, chunks, heads)
        hidden_1TH = model.get_decoder()(
            input_ids=plan.tokens_1T, position_ids=plan.positions_1T, use_cache=False, kv_plan=plan
        ).last_hidden_state
        counts = [len(chunks[number].tokens) for number in plan.order]
        for number, part_TH in zip(plan.order, hidden_1TH[0].split(counts)):
            hidden[chunks[number].blocks[0] // each].append(part_TH)
    results = []
    for line_T, parts in zip(lines, hidden):
        count = compared(line_T)
        logits_TV = form(head(torch.cat(parts)[-count:]))
        results.append(chosen(logits_TV, line_T[-count:].to(logits_TV.device)).cpu())
    return results


def _passes(lines: list[Tensor], blocks: int) -> Iterator[list[SequenceChunk]]:
    """Yield passes over all tokens except the last of each sequence in `lines`: first two chunks, then single
    tokens."""
    cuts = [_cuts(len(line) - 1, number) for number, line in enumerate(lines)]
    for turn in range(max(map(len, cuts)) - 1):
        chunks = []
        for number, (line, edges) in enumerate(zip(lines, cuts)):
            if turn + 1 < len(edges):
                start, end = edges[turn : turn + 2]
                held = range(number * blocks, (number + 1) * blocks)
                chunks.append(SequenceChunk(line[start:end].tolist(), start, held, owner=number))
        yield chunks


def _cuts(tokens: int, number: int) -> list[int]:
    """Return the positions at which sequence `number` is cut into passes. The positions differ between sequences, so
    that passes are ragged."""
    single = max(tokens - SINGLE_TOKENS - number, 1)
    return sorted({0, (single + number) // 2, *range(single, tokens + 1)})
