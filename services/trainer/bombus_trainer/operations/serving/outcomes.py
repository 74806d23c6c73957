"""Derive the facts that the log records about an executed operation from its result."""

from collections.abc import Mapping
from math import isfinite

from bombus.hive.events import AdapterShape, ModelShape, SavedWeights
from bombus.operations import (
    CheckpointLoaded,
    CheckpointSaved,
    EndModel,
    ModelEnded,
    ModelReady,
    Operation,
    Result,
    SaveWeights,
    Scores,
    StepTaken,
)


def metrics_of(result: Result) -> dict[str, float]:
    """Return the metrics of a result to show, except those that are not finite."""
    found: Mapping[str, float] = {}
    if isinstance(result, Scores):
        found = {"loss": result.loss, "tokens": float(result.tokens), **result.metrics}
    elif isinstance(result, StepTaken):
        found = result.figures()
    return {name: value for name, value in found.items() if isfinite(value)}


def shape_of(result: Result) -> ModelShape | None:
    """Return the shape of the model that an operation has created, None if it has created none."""
    if not isinstance(result, ModelReady):
        return None
    adapter = None
    if (spec := result.adapter) is not None:
        parts = tuple(str(part) for part in spec.parts)
        adapter = AdapterShape(rank=spec.rank, alpha=spec.alpha, parts=parts, targets=spec.targets, seed=spec.seed)
    return ModelShape(adapter=adapter, parameters=result.parameters)


def loaded_by(result: Result) -> str:
    """Return the hash of the checkpoint that an operation has loaded, "" if it has loaded none."""
    return result.loaded if isinstance(result, CheckpointLoaded | ModelReady) else ""


def saved_by(operation: Operation, result: Result) -> SavedWeights | None:
    """Return the checkpoint that an operation has written for its caller, None if it has written none."""
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
