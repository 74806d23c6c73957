"""Write the scores of forward and forward_backward: as protobuf for Tinker's client, as JSON for xorl's."""

import math
import struct
from collections.abc import Mapping
from itertools import groupby

from bombus.operations import Array, DType, Scores
from bombus_gateway.operations_wire.data.json_numbers import as_json
from bombus_gateway.operations_wire.messages import ARRAY_RECORD, FORWARD_BACKWARD_OUTPUT, Message, WireDType

OUTPUT_TYPE = "ArrayRecord"
ELEMENTWISE = "elementwise_loss"
_WIRE_TYPES = {DType.FLOAT32: WireDType.FLOAT32, DType.INT32: WireDType.INT32, DType.INT64: WireDType.INT64}
# xorl's names for means over the counted tokens, mapped to the sums that the means are computed from.
_MEANS = {"kl_sample_train_k3": "kl_sampled_k3:sum", "entropy_sample": "entropy_sampled:sum"}
# The reductions that both clients know, given after the colon in a metric's name.
REDUCTIONS = ("mean", "sum", "min", "max", "slack", "unique")
_WEIGHTED = (":mean", ":slack")  # clients weight these by the numbers of data


def write_scores(scores: Scores) -> bytes:
    """Return the answer to a forward_backward, with the arrays of all data concatenated.

    A new record begins whenever an array's type, or its shape beyond the first dimension, changes. Only arrays that all
    data have are sent, because the client counts the data separately in each array. `elementwise_loss` is left out: it
    would double the size of the answer, and this client does not read it.
    """
    answer = FORWARD_BACKWARD_OUTPUT(loss_fn_output_type=OUTPUT_TYPE)
    names = sorted(set.intersection(*map(set, scores.outputs)) - {ELEMENTWISE}) if scores.outputs else []
    shared = [{name: _with_rows(output[name]) for name in names} for output in scores.outputs]
    for _, alike in groupby(shared, key=_form):
        answer.loss_fn_outputs.append(_record(list(alike)))
    for key, value in metrics_of(scores).items():
        answer.metrics[key] = value
    return bytes(answer.SerializeToString())


def _with_rows(output: Array) -> Array:
    """Return an array with at least one dimension, since records are ragged in their arrays' first dimension."""
    return output if output.shape else Array(output.dtype, (1,), output.data)


def _form(outputs: Mapping[str, Array]) -> list[tuple[str, DType, tuple[int, ...]]]:
    return [(name, output.dtype, output.shape[1:]) for name, output in outputs.items()]


def _record(data: list[dict[str, Array]]) -> Message:
    record = ARRAY_RECORD(type_tag=OUTPUT_TYPE, num_datums=len(data))
    for name, first in data[0].items():
        parts = [outputs[name].data for outputs in data]
        ends = [0]
        for part in parts:
            ends.append(ends[-1] + len(part))
        field = record.fields[name]
        field.data = b"".join(parts)
        field.offsets = struct.pack(f"<{len(ends)}q", *ends)
        field.dtype = _WIRE_TYPES[first.dtype]
        field.trailing_shape.extend(first.shape[1:])
    return record


def write_json_scores(scores: Scores, loss: str) -> dict[str, object]:
    """Return the answer to a forward_backward with this loss, with one object for each datum.

    Each object's `loss` is the sum of its `elementwise_loss`, given as an array, since that is the form that
    xorl-client reads.
    """
    return {
        "loss_fn_output_type": loss,
        "loss_fn_outputs": [_output(output) for output in scores.outputs],
        "metrics": metrics_of(scores) | _means(scores),
        "info": {},
    }


def _means(scores: Scores) -> dict[str, float]:
    if not scores.outputs or not scores.tokens:
        return {}
    sums = {name: scores.metrics[of] for name, of in _MEANS.items() if of in scores.metrics}
    return {f"{name}:mean": total / scores.tokens for name, total in {"loss": scores.loss, **sums}.items()}


def _output(output: Mapping[str, Array]) -> dict[str, object]:
    written: dict[str, object] = {name: as_json(values) for name, values in output.items()}
    terms = output.get("elementwise_loss")
    if "loss" not in output and terms is not None:
        written["loss"] = as_json(Array.of(DType.FLOAT32, [math.fsum(terms.values())], ()))
    return written


def metrics_of(scores: Scores) -> dict[str, float]:
    """Return the metrics, each named `name:reduction`: Tinker's client crashes on a name without exactly one colon.

    A metric without a reduction is treated as a mean. `loss:sum` is always included, and so is `valid_tokens:sum`, the
    number of tokens that counted toward the loss. If there are no data, means and slacks are left out, because the
    clients divide by the number of data and would crash.
    """
    named = {_named(name): value for name, value in scores.metrics.items()}
    if not scores.outputs:
        named = {name: value for name, value in named.items() if not name.endswith(_WEIGHTED)}
    return named | {"loss:sum": scores.loss, "valid_tokens:sum": float(scores.tokens)}


def _named(name: str) -> str:
    first, _, reduction = name.rpartition(":")
    if first and reduction in REDUCTIONS:
        return f"{first.replace(':', '_')}:{reduction}"
    return f"{name.replace(':', '_')}:mean"
