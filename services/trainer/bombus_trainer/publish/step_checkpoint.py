"""Checkpoints of step attempts: directories `step-<step>-epoch-<trainer epoch>-attempt-<attempt>` (R11)."""

from collections.abc import Mapping
from pathlib import Path

import msgspec
from torch import Tensor

from bombus.errors import EngineFault
from bombus.weights.checkpoints import STATE, Checkpoint, read_checkpoint
from bombus_trainer.publish.checkpoint import FillDraft, load_tensors, write_checkpoint

TORCH = "torch"


class StepFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The attempt that wrote a checkpoint, and its metrics. See `machine.this_machine` for `machine`.

    A metric that is not finite, such as the deviation of extreme rewards, is null in the file.
    """

    engine: str
    run: int
    step: int
    trainer_epoch: int
    attempt: int
    config_digest: str
    metrics: Mapping[str, float | None]
    machine: str = ""
    backend: str = TORCH


def save_step(root: Path, facts: StepFacts, fill: FillDraft) -> Checkpoint[StepFacts]:
    """Write a checkpoint in `root`, under a name that no other attempt on the same log can have. Returns once it would
    survive a power failure."""
    directory = root / f"step-{facts.step:08d}-epoch-{facts.trainer_epoch}-attempt-{facts.attempt}"
    return write_checkpoint(directory, facts, fill, root, facts.trainer_epoch)


def read_step(path: Path, digest: str, backend: str = TORCH) -> Checkpoint[StepFacts]:
    """Read the manifest of the checkpoint with that digest.

    Raises `CheckpointLost` if the checkpoint cannot be read, or `EngineFault` if another backend wrote it.
    """
    found = read_checkpoint(path, StepFacts, digest)
    if found.facts.backend != backend:
        raise EngineFault(
            f"the checkpoint {path} was written by the {found.facts.backend} backend: {backend} cannot load it"
        )
    return found


def load_step(path: Path, digest: str) -> dict[str, Tensor]:
    """Load the state that the torch backend wrote. Raises `EngineFault` or `CheckpointLost` in the same cases as
    `read_step`."""
    return load_tensors(read_step(path, digest), STATE)
