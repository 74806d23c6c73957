"""Writes a model into a checkpoint, and loads a model from one."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from bombus.errors import Code, EngineFault, Refused
from bombus.operations import CheckpointKind
from bombus.weights.adapters import ADAPTER_CONFIG, ADAPTER_FILE
from bombus.weights.checkpoints import Seal
from bombus.weights.deltas import FULL_FILE
from bombus_trainer.backends.torch.optim import AdamW
from bombus_trainer.operations.checkpoints import (
    GRADIENT,
    OPTIMIZER,
    CheckpointName,
    ModelCheckpoint,
    ModelFacts,
)
from bombus_trainer.operations.client_model import TrainedClientModel
from bombus_trainer.publish.checkpoint import load_tensors
from bombus_trainer.publish.export import METADATA, write_files
from bombus_trainer.publish.tensorfile import write_tensors, write_whole


def weights_file(trained: TrainedClientModel, merged: bool = False) -> str:
    """Return the name of the file with a model's weights."""
    return FULL_FILE if trained.spec is None or merged else ADAPTER_FILE


@dataclass(frozen=True)
class Contents:
    """The contents of a checkpoint besides the weights. An inference engine can read the folder of any `kind`.

    `files` are the base's files other than its tensors. They are written with a model that trains all weights, and with
    an adapter that is `merged` into the base. `base_model` is the name or path from which `from_pretrained` loads the
    base.
    """

    kind: CheckpointKind
    files: Mapping[str, bytes]
    base_model: str
    optimizer: AdamW | None = None
    gradient: bool = False
    merged: bool = False


def write_model(draft: Path, trained: TrainedClientModel, contents: Contents) -> dict[str, Seal]:
    """Write a model into an empty folder, durably except for small files. Returns the seals of the durable files."""
    files, optimizer = contents.files, contents.optimizer
    seals: dict[str, Seal] = {}
    if trained.spec is not None and not contents.merged:
        seals[ADAPTER_FILE] = _write_adapter(draft, trained, contents)
    elif contents.kind is CheckpointKind.TRAINING:
        write_files(draft, files, torch.float32)
        seals[FULL_FILE] = _write(draft / FULL_FILE, trained.weights())
    else:
        policy = trained.base.policy
        write_files(draft, files, policy.export_dtype)
        with trained.base.switched_on(trained.adapters):
            seals[FULL_FILE] = write_tensors(
                draft / FULL_FILE, policy.dense_shapes(), policy.dense_weights(), durable=True, metadata=METADATA
            )
    if optimizer is not None:
        seals[OPTIMIZER] = _write(draft / OPTIMIZER, optimizer.state())
    if contents.gradient:
        seals[GRADIENT] = _write(draft / GRADIENT, trained.gradient())
    return seals


def _write_adapter(draft: Path, trained: TrainedClientModel, contents: Contents) -> Seal:
    """Write an adapter's two files. An external adapter's configuration names its base. Any other adapter's
    configuration is repeated in the file of tensors, so that the adapter's address covers it."""
    config = trained.adapter_config().to_json()
    metadata = {ADAPTER_CONFIG: config}
    if contents.kind is CheckpointKind.EXTERNAL:
        named = {**json.loads(config), "base_model_name_or_path": contents.base_model}
        config, metadata = json.dumps(named, indent=2, sort_keys=True), {}
    (draft / ADAPTER_CONFIG).write_text(config)
    return _write(draft / ADAPTER_FILE, trained.weights(), metadata)


def _write(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] = {}) -> Seal:
    return write_whole(path, tensors, durable=True, metadata={**METADATA, **metadata})


def check_origin(name: CheckpointName, checkpoint: ModelCheckpoint, base: str, with_optimizer: bool) -> None:
    """Raise `Refused` unless a model on `base` can continue from a checkpoint, with or without its optimizer."""
    found = checkpoint.facts.base
    if found != base:
        raise Refused(
            Code.BAD_CONFIG, f"the checkpoint {name} belongs to a model on {found}, but here the base is {base}"
        )
    if with_optimizer and OPTIMIZER not in checkpoint.files:
        raise Refused(
            Code.BAD_CONFIG,
            f"the checkpoint {name} has no optimizer: load it without one, or load a {CheckpointKind.TRAINING} one",
        )


def load_model(
    trained: TrainedClientModel, name: CheckpointName, checkpoint: ModelCheckpoint, with_optimizer: bool
) -> None:
    """Load a checkpoint into a model, with a new optimizer at step 0 unless `with_optimizer`.

    The gradient is restored if the checkpoint contains one. Raises `Refused` or `EngineFault`, before anything changes,
    if the checkpoint cannot be loaded.
    """
    facts = checkpoint.facts
    if facts.adapter != trained.spec and not _same_shape(facts, trained):
        raise Refused(
            Code.BAD_CONFIG,
            f"the checkpoint {name} holds {_words(facts)}, but this model is different: create a model from it",
        )
    weights = load_tensors(checkpoint, facts.weights)
    state = load_tensors(checkpoint, OPTIMIZER) if with_optimizer else {}
    gradient = load_tensors(checkpoint, GRADIENT) if GRADIENT in checkpoint.files else None
    try:
        trained.optimizer.check(state)
    except EngineFault as fault:
        raise Refused(Code.BAD_CONFIG, f"{fault}, so it is another model's: load it without its optimizer") from fault
    try:
        trained.restore(weights)
    except EngineFault as fault:
        raise Refused(Code.BAD_CONFIG, str(fault)) from fault
    trained.optimizer.restore(state)
    trained.clear()
    trained.step = facts.step if with_optimizer else 0
    if gradient is not None:
        trained.restore_gradient(gradient, facts.unstepped)


def _same_shape(facts: ModelFacts, trained: TrainedClientModel) -> bool:
    """Return whether the checkpoint and the model are adapters of the same rank and alpha. Seeds and the naming of
    layers may differ."""
    if facts.adapter is None or trained.spec is None:
        return False
    return (facts.adapter.rank, facts.adapter.alpha) == (trained.spec.rank, trained.spec.alpha)


def _words(facts: ModelFacts) -> str:
    if facts.adapter is None:
        return "a model that trains all weights"
    return f"an adapter of rank {facts.adapter.rank} with alpha {facts.adapter.alpha:g}"
