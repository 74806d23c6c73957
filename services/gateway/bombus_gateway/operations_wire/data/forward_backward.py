"""Tinker's forward_backward: read protobuf requests as operations."""

from bombus.errors import Code, Refused
from bombus.operations import Array, Datum, ForwardBackward
from bombus_gateway import limits
from bombus_gateway.operations_wire.data.losses import loss_spec
from bombus_gateway.operations_wire.data.sparse import MAY_BE_SPARSE, SparseTensor, Tensors, checked, written_out
from bombus_gateway.operations_wire.data.tensors import (
    NumberBudget,
    Numbers,
    as_input,
    as_tokens,
    numbers_of,
    whole,
    widened,
)
from bombus_gateway.operations_wire.messages import (
    FORWARD_BACKWARD_REQUEST,
    Message,
    WireDType,
    parsed,
)
from bombus_gateway.operations_wire.submission import Submission, attempted, checked_id

_CODES = {WireDType.FLOAT32: "f", WireDType.INT64: "q", WireDType.INT32: "i"}


def read_forward_backward(body: bytes) -> Submission:
    """Read a request. Raises `Refused` if the body is not such a request, or if its model or number is missing."""
    request = parsed(FORWARD_BACKWARD_REQUEST, body)
    model = checked_id(request.model_id, "model_id")
    if request.seq_id < 1:
        raise Refused(Code.MALFORMED, f"seq_id is {request.seq_id}, but request numbers begin at 1.")
    operation = attempted(lambda: _operation(request))
    return Submission(model=model, seq=request.seq_id, operation=operation, counts=not request.forward_only)


def _operation(request: Message) -> ForwardBackward:
    settings = {key: _setting(key, value) for key, value in sorted(request.loss_fn_config_v2.items())}
    loss = loss_spec(request.loss_fn, settings or dict(sorted(request.loss_fn_config.items())))
    if len(request.data) > limits.DATA:
        why = f"{len(request.data)} data in one request are over the limit of {limits.DATA}."
        raise Refused(Code.TOO_LARGE, why)
    budget = NumberBudget()
    tokens = [_tokens(datum, budget, f"data[{index}]") for index, datum in enumerate(request.data)]
    tensors = [_tensors(datum, budget, f"data[{index}]") for index, datum in enumerate(request.data)]
    data = tuple(map(Datum, tokens, written_out(tensors, budget, sum(map(len, tokens)))))
    return ForwardBackward(loss=loss, data=data, forward_only=request.forward_only)


def _setting(key: str, value: Message) -> float | str:
    which = value.WhichOneof("value")
    if which is None:
        raise Refused(Code.MALFORMED, f"The setting {key!r} of the loss has no value.")
    setting: float | str = getattr(value, which)
    return setting


def _tokens(datum: Message, budget: NumberBudget, place: str) -> bytes:
    parts = []
    for chunk in datum.model_input:
        kind = chunk.WhichOneof("chunk")
        if kind != "encoded_text":
            what = {"image": "an image", "dmel": "audio"}.get(kind, "something that this server does not know")
            raise Refused(
                Code.UNSUPPORTED, f"{place} has {what} in its model_input, but the models here read only text."
            )
        parts.append(chunk.encoded_text.tokens)
    tokens = numbers_of("i", b"".join(parts), f"{place}.model_input")
    if not tokens:
        raise Refused(Code.MALFORMED, f"{place} has no tokens in its model_input; leave it out.")
    budget.take(len(tokens))
    return as_tokens(tokens, f"{place}.model_input")


def _tensors(datum: Message, budget: NumberBudget, place: str) -> Tensors:
    if len(datum.loss_fn_inputs) > limits.LOSS_INPUTS:
        why = f"{place} has {len(datum.loss_fn_inputs)} arrays, over the limit of {limits.LOSS_INPUTS}."
        raise Refused(Code.TOO_LARGE, why)
    return {  # sorted, so that if several are wrong, every process reports the same one first
        name: _tensor(name, tensor, budget, f"{place}.loss_fn_inputs[{name!r}]")
        for name, tensor in sorted(datum.loss_fn_inputs.items())
    }


def _tensor(name: str, tensor: Message, budget: NumberBudget, place: str) -> Array | SparseTensor:
    shape = tuple(tensor.shape)
    if tensor.HasField("sparse_csr"):
        if name not in MAY_BE_SPARSE or len(shape) != 2:
            which = " and ".join(MAY_BE_SPARSE)
            why = f"{place} is sparse with the shape {list(shape)[:8]}; only {which} of shape [N, K] may be."
            raise Refused(Code.UNSUPPORTED, why)
        csr = tensor.sparse_csr
        values = _numbers(csr.values, tensor.dtype, place)
        starts, at = (whole(numbers_of("q", part, place), place) for part in (csr.crow_indices, csr.col_indices))
        return checked(SparseTensor(shape[0], shape[1], values, starts, at), place)
    numbers = _numbers(tensor.dense, tensor.dtype, place)
    budget.take(len(numbers))
    return as_input(name, numbers, shape or (len(numbers),), place)


def _numbers(data: bytes, dtype: int, place: str) -> Numbers:
    if dtype == WireDType.BFLOAT16:
        return widened(data, place)
    if dtype not in _CODES:
        kinds = "float32, int64, int32 and bfloat16"
        raise Refused(Code.UNSUPPORTED, f"{place} has numbers of type {dtype}; supported: {kinds}.")
    return numbers_of(_CODES[WireDType(dtype)], data, place)
