"""Encodes the result of an executed operation, and derives the facts that the log records about it."""

from collections.abc import Mapping
from math import isfinite

from bombus.hive.events import AdapterShape, ModelShape, SavedWeights
from bombus.hive.records import BODY_BYTES_MAX
from bombus.operations import (
    Category,
    CheckpointLoaded,
    CheckpointSaved,
    EndModel,
    Failed,
    ModelEnded,
    ModelReady,
    Operation,
    Result,
    SaveWeights,
    Scores,
    StepTaken,
    encode_result,
)
from bombus_trainer.backend import OperationBackend


def encoded(executor: OperationBackend, model: str, operation: Operation, result: Result) -> tuple[Result, bytes]:
    """Return a result with its encoding. A result that is too large to store is replaced by a failure."""
    body = encode_result(result)
    if len(body) <= BODY_BYTES_MAX:
        return result, body
    why = (
        f"the result of this operation has {len(body)} bytes, over the limit of {BODY_BYTES_MAX}: send less data in "
        "each operation, and let the gradients accumulate"
    )
    executor.fail_gradient(model, operation, why)
    failed = Failed(error=why, category=Category.USER)
    return failed, encode_result(failed)


def metrics_of(result: Result) -> dict[str, float]:
    """Return the metrics to show for a result, without any that are not finite."""
    found: Mapping[str, float] = {}
    if isinstance(result, Scores):
        found = {"loss": result.loss, "tokens": float(result.tokens), **result.metrics}
    elif isinstance(result, StepTaken):
        found = result.figures()
    return {name: value for name, value in found.items() if isfinite(value)}


def shape_of(result: Result) -> ModelShape | None:
    """Return the shape of the model that an operation has created, or None if it has created none."""
    if not isinstance(result, ModelReady):
        return None
    adapter = None
    if (spec := result.adapter) is not None:
        parts = tuple(str(part) for part in spec.parts)
        adapter = AdapterShape(rank=spec.rank, alpha=spec.alpha, parts=parts, targets=spec.targets, seed=spec.seed)
    return ModelShape(adapter=adapter, parameters=result.parameters)


def loaded_by(result: Result) -> str:
    """Return the hash of the checkpoint that an operation has loaded, or "" if it has loaded none."""
    return result.loaded if isinstance(result, CheckpointLoaded | ModelReady) else ""


def saved_by(operation: Operation, result: Result) -> SavedWeights | None:
    """Return the checkpoint that an operation has written for its caller, or None if it has written none."""
    written = result.saved if isinstance(result, ModelEnded) else result
    if not isinstance(written, CheckpointSaved):
        return None
    return SavedWeights(
        use=str(written.checkpoint),
        name=written.name,
        folder=written.folder,
        address=written.address,
        size_bytes=written.size_bytes,
        ttl_s=operation.ttl_s if isinstance(operation, SaveWeights | EndModel) else 0.0,
    )
