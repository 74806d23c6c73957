"""forward and forward_backward in JSON, with the field names of xorl-client or of Tinker, read as operations."""

from array import array
from collections.abc import Mapping

import msgspec

from bombus.errors import Code, Refused
from bombus.operations import Array, Datum, DType, ForwardBackward
from bombus_gateway import limits
from bombus_gateway.decoding.json_body import decode_body
from bombus_gateway.operations_wire.data.json_numbers import numbers_in
from bombus_gateway.operations_wire.data.losses import CROSS_ENTROPIES, loss_spec
from bombus_gateway.operations_wire.data.tensors import (
    ADVANTAGES,
    MASK,
    TARGET_TOKENS,
    WEIGHTS,
    NumberBudget,
    Numbers,
    as_input,
    as_tokens,
    whole,
)
from bombus_gateway.operations_wire.dialects import TrainingDialect
from bombus_gateway.operations_wire.submission import NOT_GIVEN, Submission, addressed, attempted, is_given

LABELS = "labels"
IGNORED = -100  # the label of a token that is not trained on
_INPUT_IDS, _CHUNKS = "input_ids", "chunks"
# xorl settings that are dropped: those in `_ALWAYS_DONE` because every answer does what they ask for anyway, and those
# in `_OPTIONAL` if they are false.
_ALWAYS_DONE = ("return_per_token",)
_OPTIONAL = ("compute_kl_stats",)


class _Chunk(msgspec.Struct):
    tokens: msgspec.Raw = NOT_GIVEN
    type: str = "encoded_text"


class _JsonDatum(msgspec.Struct):
    model_input: dict[str, msgspec.Raw]
    loss_fn_inputs: dict[str, msgspec.Raw] = {}
    routed_experts: msgspec.Raw = NOT_GIVEN


class _Input(msgspec.Struct):
    data: list[_JsonDatum]
    loss_fn: str = "cross_entropy"
    loss_fn_params: dict[str, float | str | bool | None] | None = None
    loss_fn_config: dict[str, float | str | bool | None] | None = None
    routed_experts: msgspec.Raw = NOT_GIVEN


class _Body(msgspec.Struct):
    forward_backward_input: _Input | None = None
    forward_input: _Input | None = None


_bodies = msgspec.json.Decoder(_Body)
_chunks = msgspec.json.Decoder(list[_Chunk])


def read_json_data(body: bytes, forward_only: bool) -> Submission:
    """Read a request. Raises `Refused` if the body is not JSON, or if its model or number cannot be read."""
    model, seq = addressed(TrainingDialect.XORL, body)
    operation = attempted(lambda: _operation(body, forward_only))
    return Submission(model=model, seq=seq, operation=operation, counts=not forward_only)


def _operation(body: bytes, forward_only: bool) -> ForwardBackward:
    given = decode_body(_bodies, body)
    asked = given.forward_input or given.forward_backward_input
    if asked is None:
        which = "forward_input" if forward_only else "forward_backward_input"
        raise Refused(Code.MALFORMED, f"The body has no {which}, which holds the data and the loss.")
    if len(asked.data) > limits.DATA:
        why = f"{len(asked.data)} data in one request are over the limit of {limits.DATA}."
        raise Refused(Code.TOO_LARGE, why)
    _refuse_routes(asked.routed_experts)
    loss = loss_spec(asked.loss_fn, _settings(asked))
    budget = NumberBudget()
    data = tuple(_datum(each, loss.name, budget, f"data[{index}]") for index, each in enumerate(asked.data))
    return ForwardBackward(loss=loss, data=data, forward_only=forward_only)


def _settings(asked: _Input) -> dict[str, float | str]:
    """Return a loss's settings from `loss_fn_config` and `loss_fn_params`. Nulls are dropped, and true becomes 1."""
    given = {**(asked.loss_fn_config or {}), **(asked.loss_fn_params or {})}
    kept = {key: value for key, value in given.items() if value is not None and key not in _ALWAYS_DONE}
    kept = {key: value for key, value in kept.items() if value or key not in _OPTIONAL}
    return {key: value if isinstance(value, str) else float(value) for key, value in kept.items()}


def _datum(given: _JsonDatum, loss: str, budget: NumberBudget, place: str) -> Datum:
    _refuse_routes(given.routed_experts)
    if len(given.loss_fn_inputs) > limits.LOSS_INPUTS:
        why = f"{place} has {len(given.loss_fn_inputs)} arrays, over the limit of {limits.LOSS_INPUTS}."
        raise Refused(Code.TOO_LARGE, why)
    tokens = _tokens(given.model_input, budget, f"{place}.model_input")
    inputs = {}
    for name, raw in given.loss_fn_inputs.items():
        inside = f"{place}.loss_fn_inputs[{name!r}]"
        numbers, shape = numbers_in(raw, budget, inside)
        inputs[name] = as_input(TARGET_TOKENS if name == LABELS else name, numbers, shape, inside)
    if LABELS in inputs:
        tokens, inputs = _shifted(tokens, inputs, place)
    if not tokens:
        raise Refused(Code.MALFORMED, f"{place} has no token to predict another from; leave it out.")
    return Datum(as_tokens(tokens, f"{place}.model_input"), _without_ignored(inputs, loss))


def _tokens(given: Mapping[str, msgspec.Raw], budget: NumberBudget, place: str) -> Numbers:
    if other := [name for name in given if name not in (_INPUT_IDS, _CHUNKS)]:
        why = f"{place} has {other[0]!r}, which is not supported here: send {_INPUT_IDS}, or {_CHUNKS} of tokens."
        raise Refused(Code.UNSUPPORTED, why)
    if _INPUT_IDS in given:
        return _ids(given[_INPUT_IDS], budget, place)
    found = array("q")
    for chunk in decode_body(_chunks, bytes(given.get(_CHUNKS, b"[]")), place):
        if not is_given(chunk.tokens):
            why = f"{place} has a chunk of type {chunk.type[:40]!r}, but the models here read only text."
            raise Refused(Code.UNSUPPORTED, why)
        found.extend(_ids(chunk.tokens, budget, place))
    return found


def _ids(raw: msgspec.Raw, budget: NumberBudget, place: str) -> Numbers:
    return whole(numbers_in(raw, budget, place)[0], place)


def _shifted(tokens: Numbers, inputs: dict[str, Array], place: str) -> tuple[Numbers, dict[str, Array]]:
    """Return tokens and inputs shifted by one, so that each token is aligned with the label that it predicts.

    In Hugging Face's form, labels and other inputs of the same length are aligned with the tokens themselves.
    """
    length = len(tokens)
    if TARGET_TOKENS in inputs:
        raise Refused(Code.MALFORMED, f"{place} has labels and target_tokens; send one of them.")
    if inputs[LABELS].shape != (length,):
        why = f"{place} has labels of shape {list(inputs[LABELS].shape)[:8]} for {length} tokens: send one for each."
        raise Refused(Code.MALFORMED, why)
    moved = {name: _tail(values) if values.shape == (length,) else values for name, values in inputs.items()}
    moved[TARGET_TOKENS] = moved.pop(LABELS)
    return tokens[:-1], moved


def _tail(values: Array) -> Array:
    """Return a one-dimensional array without its first number."""
    size = len(values.data) // values.shape[0] if values.shape[0] else 0
    return Array(values.dtype, (max(values.shape[0] - 1, 0),), values.data[size:])


def _without_ignored(inputs: dict[str, Array], loss: str) -> dict[str, Array]:
    """Return inputs in which targets of -100 are replaced by token 0, with a weight or an advantage of 0.

    xorl's server ignores tokens with an advantage of 0. If the caller gives a mask, it is set to 0 for these tokens
    too.
    """
    targets = inputs.get(TARGET_TOKENS)
    if targets is None:
        return inputs
    tokens = targets.values()
    if IGNORED not in tokens:
        return inputs
    done = {TARGET_TOKENS: Array.of(DType.INT64, [0 if token == IGNORED else token for token in tokens], targets.shape)}
    counting = {name: inputs[name].values() for name in (ADVANTAGES, MASK) if _fits(inputs.get(name), targets)}
    if loss in CROSS_ENTROPIES:
        given = inputs.get(WEIGHTS)
        counting = {WEIGHTS: given.values() if given is not None and _fits(given, targets) else [1.0] * len(tokens)}
    for name, values in counting.items():
        kept = [0.0 if token == IGNORED else value for token, value in zip(tokens, values)]
        done[name] = Array.of(DType.FLOAT32, kept, targets.shape)
    return inputs | done


def _fits(values: Array | None, targets: Array) -> bool:
    return values is not None and values.shape == targets.shape


def _refuse_routes(given: msgspec.Raw) -> None:
    if is_given(given):
        why = "routed_experts cannot be replayed: no model of this server accepts expert routes from outside."
        raise Refused(Code.UNSUPPORTED, why)
