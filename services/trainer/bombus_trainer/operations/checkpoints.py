"""Checkpoints of client models: directories `MODEL/KIND/NAME` in one folder."""

import re
import shutil
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Self

import msgspec

from bombus.durable import make_durable
from bombus.errors import Code, Refused
from bombus.operations import AdapterSpec, CheckpointKind
from bombus.weights.checkpoints import Checkpoint, CheckpointLost, read_checkpoint
from bombus_trainer.operations.client_model import GradientEpoch
from bombus_trainer.publish.checkpoint import FillDraft, write_checkpoint
from bombus_trainer.publish.directories import (
    REPLACED,
    draft_directory,
    make_durable_directory,
    remove_earlier,
    remove_others,
    settle,
)

OPTIMIZER, GRADIENT = "optimizer.safetensors", "gradient.safetensors"
DRAFTS = ".drafts"
_NAME = re.compile(r"^[A-Za-z0-9_][A-Za-z0-9_.:=+@-]{0,127}\Z")


@dataclass(frozen=True)
class CheckpointName:
    """The name of a checkpoint, `MODEL/KIND/NAME`. Raises `Refused` if a part could lead out of its folder."""

    model: str
    kind: CheckpointKind
    name: str

    def __post_init__(self) -> None:
        for what, text in (("model", self.model), ("checkpoint", self.name)):
            if not _NAME.match(text):
                raise Refused(
                    Code.MALFORMED,
                    f"{text[:140]!r} cannot be the name of a {what}: use 1 to 128 letters, digits and _.:=+@-, the "
                    "first of them a letter, a digit or _",
                )

    @classmethod
    def read(cls, text: str) -> Self:
        """Read `MODEL/KIND/NAME`. Raises `Refused`."""
        parts = text.split("/")
        if len(parts) != 3 or parts[1] not in list(CheckpointKind):
            raise Refused(
                Code.MALFORMED,
                f"{text[:300]!r} is not a checkpoint: the form is MODEL/KIND/NAME, where KIND is one of "
                f"{', '.join(CheckpointKind)}",
            )
        return cls(parts[0], CheckpointKind(parts[1]), parts[2])

    def __str__(self) -> str:
        return f"{self.model}/{self.kind}/{self.name}"


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The facts about a model's checkpoint. `weights` is the name of the file with its weights.

    `operation` is the caller's name for the operation that wrote the checkpoint. `unstepped` describes the gradient
    since the last step. The gradient itself is saved only if there is a file for it.
    """

    base: str
    step: int
    weights: str
    adapter: AdapterSpec | None = None
    unstepped: GradientEpoch = GradientEpoch()
    operation: str = ""


ModelCheckpoint = Checkpoint[ModelFacts]


def content_of(checkpoint: ModelCheckpoint, with_optimizer: bool) -> str:
    """Return a hash of all the parts that a model loads from a checkpoint."""
    taken = (checkpoint.facts.weights, *((OPTIMIZER,) if with_optimizer else ()), GRADIENT)
    lines = [f"{file} {checkpoint.files[file].sha256}" for file in taken if file in checkpoint.files]
    if with_optimizer:
        lines.append(f"step {checkpoint.facts.step}")
    return sha256("\n".join(lines).encode()).hexdigest()


class CheckpointFolder:
    """All checkpoints in one folder."""

    def __init__(self, root: Path, run: int = 0, trainer_epoch: int = 0) -> None:
        """Open the folder for a trainer of this run and epoch. Cleans up after this and earlier trainers."""
        self._root = root
        self._epoch = trainer_epoch
        self._drafts = root / DRAFTS / f"run-{run}"
        make_durable_directory(self._drafts)
        remove_earlier(self._drafts.parent, run, trainer_epoch)
        remove_others(self._drafts, (), trainer_epoch)
        for aside in root.glob(f"*/*/{REPLACED}*"):
            settle(aside.with_name(aside.name.removeprefix(REPLACED)))

    def read(self, name: CheckpointName, digest: str = "") -> ModelCheckpoint:
        """Read the manifest of a checkpoint, which must have that `digest` unless `digest` is "".

        Raises `Refused` if there is no checkpoint of this name, or `CheckpointLost` if it is damaged.
        """
        if not self._has(name):
            raise Refused(Code.BAD_CONFIG, f"there is no checkpoint {name}: save one under this name first")
        return read_checkpoint(self._path(name), ModelFacts, digest)

    def save(self, name: CheckpointName, facts: ModelFacts, overwrite: bool, fill: FillDraft) -> ModelCheckpoint:
        """Write a checkpoint. Returns once it would survive a power failure.

        If the name is taken and `overwrite` is false, nothing is written: the existing checkpoint is returned if the
        same operation wrote it; otherwise raises `Refused`.
        """
        if overwrite or not self._has(name):
            return write_checkpoint(self._path(name), facts, fill, self._drafts, self._epoch)
        with suppress(CheckpointLost):  # a damaged checkpoint was written by another operation or an older trainer
            found = self.read(name)
            if facts.operation and found.facts.operation == facts.operation:
                return found
        raise Refused(
            Code.BAD_CONFIG, f"there is a checkpoint {name} already: use another name, or save with `overwrite`"
        )

    def remove(self, name: CheckpointName) -> None:
        """Remove a checkpoint, if it exists. It is renamed first, so that no part of it remains under its name."""
        if not self._has(name):
            return
        path, going = self._path(name), draft_directory(self._drafts, self._epoch)
        path.rename(going)
        make_durable(path.parent)
        shutil.rmtree(going, ignore_errors=True)

    def names(self, model: str, kind: CheckpointKind) -> list[str]:
        """Return the names of a model's checkpoints of one kind, sorted."""
        place = self._root / CheckpointName(model, kind, "_").model / kind
        return sorted(path.name for path in place.glob("*") if _NAME.match(path.name))

    def _has(self, name: CheckpointName) -> bool:
        path = self._path(name)
        settle(path)
        return path.exists()

    def _path(self, name: CheckpointName) -> Path:
        return self._root / name.model / name.kind / name.name
