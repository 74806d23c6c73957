"""Write a model into a checkpoint, and load a model from one."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from bombus.errors import Code, EngineFault, Refused
from bombus.operations import CheckpointKind
from bombus.weights.adapters import ADAPTER_CONFIG, ADAPTER_FILE
from bombus.weights.deltas import FULL_FILE
from bombus_trainer.backends.torch.optim import AdamW
from bombus_trainer.operations.checkpoints import (
    GRADIENT,
    OPTIMIZER,
    CheckpointFolder,
    CheckpointName,
    ModelCheckpointFacts,
)
from bombus_trainer.operations.client_model import TrainedClientModel
from bombus_trainer.publish.checkpoint import Seal
from bombus_trainer.publish.export import METADATA, write_files
from bombus_trainer.publish.tensorfile import Shape, write_tensors


def weights_file(trained: TrainedClientModel, merged: bool = False) -> str:
    """Return the name of the file with a model's weights."""
    return FULL_FILE if trained.spec is None or merged else ADAPTER_FILE


@dataclass(frozen=True)
class Contents:
    """The contents of a checkpoint besides the weights. An inference engine can read the folder of any `kind`.

    `files` are the base's files other than its tensors; they are written with all weights, and with an adapter
    `merged` into the base. `base_model` is the name or path from which `from_pretrained` loads the base.
    """

    kind: CheckpointKind
    files: Mapping[str, bytes]
    base_model: str
    optimizer: AdamW | None = None
    gradient: bool = False
    merged: bool = False


def write_model(draft: Path, trained: TrainedClientModel, contents: Contents) -> dict[str, Seal]:
    """Write a model into an empty folder, durably except for small files. Returns the seals of the durable ones."""
    files, optimizer = contents.files, contents.optimizer
    seals: dict[str, Seal] = {}
    if trained.spec is not None and not contents.merged:
        seals[ADAPTER_FILE] = _write_adapter(draft, trained, contents)
    elif contents.kind is CheckpointKind.TRAINING:
        write_files(draft, files, torch.float32)
        weights = trained.weights()
        seals[FULL_FILE] = _write(draft / FULL_FILE, weights.items(), _shapes(weights))
    else:
        policy = trained.base.policy
        write_files(draft, files, policy.export_dtype)
        with trained.base.switched_on(trained.adapters):
            seals[FULL_FILE] = _write(draft / FULL_FILE, policy.dense_weights(), policy.dense_shapes())
    if optimizer is not None:
        state = optimizer.state()
        seals[OPTIMIZER] = _write(draft / OPTIMIZER, state.items(), _shapes(state))
    if contents.gradient:
        gradient = trained.gradient()
        seals[GRADIENT] = _write(draft / GRADIENT, gradient.items(), _shapes(gradient))
    return seals


def _write_adapter(draft: Path, trained: TrainedClientModel, contents: Contents) -> Seal:
    """Write an adapter's two files. An external one names its base; in others the address covers the configuration."""
    config, weights = trained.adapter_config().to_json(), trained.weights()
    metadata = {ADAPTER_CONFIG: config}
    if contents.kind is CheckpointKind.EXTERNAL:
        named = {**json.loads(config), "base_model_name_or_path": contents.base_model}
        config, metadata = json.dumps(named, indent=2, sort_keys=True), {}
    (draft / ADAPTER_CONFIG).write_text(config)
    return _write(draft / ADAPTER_FILE, weights.items(), _shapes(weights), metadata)


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, Shape]:
    return {name: Shape(tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}


def _write(
    path: Path, tensors: Iterable[tuple[str, Tensor]], shapes: Mapping[str, Shape], metadata: Mapping[str, str] = {}
) -> Seal:
    written = write_tensors(path, shapes, tensors, durable=True, metadata={**METADATA, **metadata})
    return Seal(written.bytes, written.sha256)


def check_origin(name: CheckpointName, facts: ModelCheckpointFacts, base: str, with_optimizer: bool) -> None:
    """Raise `Refused` unless a model on `base` can continue from a checkpoint, with or without its optimizer."""
    if facts.base != base:
        raise Refused(
            Code.BAD_CONFIG, f"the checkpoint {name} belongs to a model on {facts.base}, but here the base is {base}"
        )
    if with_optimizer and OPTIMIZER not in facts.files:
        raise Refused(
            Code.BAD_CONFIG,
            f"the checkpoint {name} has no optimizer: load it without one, or load a {CheckpointKind.TRAINING} one",
        )


def load_model(
    trained: TrainedClientModel,
    folder: CheckpointFolder,
    name: CheckpointName,
    facts: ModelCheckpointFacts,
    with_optimizer: bool,
) -> None:
    """Load a checkpoint into a model, with a new optimizer at step 0 unless `with_optimizer`.

    The gradient is restored if the checkpoint contains one. Raises `Refused` or `EngineFault`, before anything changes,
    if the checkpoint cannot be loaded.
    """
    if facts.adapter != trained.spec and not _same_shape(facts, trained):
        raise Refused(
            Code.BAD_CONFIG,
            f"the checkpoint {name} holds {_words(facts)}, but this model is different: create a model from it",
        )
    weights = folder.tensors(name, facts, facts.weights)
    state = folder.tensors(name, facts, OPTIMIZER) if with_optimizer else {}
    gradient = folder.tensors(name, facts, GRADIENT) if GRADIENT in facts.files else None
    try:
        trained.optimizer.check(state)
    except EngineFault as fault:
        raise Refused(Code.BAD_CONFIG, f"{fault}, so it is not of this model: load it without its optimizer") from fault
    try:
        trained.restore(weights)
    except EngineFault as fault:
        raise Refused(Code.BAD_CONFIG, str(fault)) from fault
    trained.optimizer.restore(state)
    trained.clear()
    trained.step = facts.step if with_optimizer else 0
    if gradient is not None:
        trained.restore_gradient(gradient, facts.unstepped)


def _same_shape(facts: ModelCheckpointFacts, trained: TrainedClientModel) -> bool:
    """Return whether both are adapters of the same rank and alpha. Seeds and the naming of layers may differ."""
    if facts.adapter is None or trained.spec is None:
        return False
    return (facts.adapter.rank, facts.adapter.alpha) == (trained.spec.rank, trained.spec.alpha)


def _words(facts: ModelCheckpointFacts) -> str:
    if facts.adapter is None:
        return "a model of all weights"
    return f"an adapter of rank {facts.adapter.rank} with alpha {facts.adapter.alpha:g}"
