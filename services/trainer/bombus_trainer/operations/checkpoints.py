"""Checkpoints of client models: folders `MODEL/KIND/NAME`, complete or absent, each described by its `facts.json`."""

import os
import re
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Self

import msgspec
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from bombus.durable import make_durable
from bombus.errors import Code, EngineFault, Refused
from bombus.hive.decoding import decoded
from bombus.operations import AdapterSpec, CheckpointKind, CheckpointSaved
from bombus.weights.deltas import file_sha256
from bombus_trainer.operations.client_model import GradientEpoch
from bombus_trainer.publish.checkpoint import Seal, seal_files
from bombus_trainer.publish.directories import access_of, make_durable_directory

FACTS, OPTIMIZER, GRADIENT = "facts.json", "optimizer.safetensors", "gradient.safetensors"
REPLACED = ".replaced-"
_NAME = re.compile(r"^[A-Za-z0-9_][A-Za-z0-9_.:=+@-]{0,127}\Z")
_DRAFT = re.compile(r"^\.draft-run-(\d+)-epoch-(\d+)-")  # the run and the epoch of the trainer that fills it


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


class ModelCheckpointNotes(msgspec.Struct, frozen=True, omit_defaults=True):
    """The caller's notes, stored in a checkpoint.

    `ttl_s` is how long it is kept; 0 means forever. `operation` is the caller's name for the operation that wrote it.
    `executed` identifies the operations executed before that one, in bytes that only the caller interprets.
    """

    ttl_s: float = 0.0
    operation: str = ""
    executed: bytes = b""


class ModelCheckpointFacts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The facts of a checkpoint. `weights` names the file whose SHA-256 is its `address`.

    `unstepped` describes the gradient since the last step. The gradient itself is saved only if there is a file of it.
    """

    format: int = 1
    base: str
    model: str
    kind: CheckpointKind
    name: str
    step: int
    weights: str
    address: str
    files: dict[str, Seal]
    adapter: AdapterSpec | None = None
    unstepped: GradientEpoch = GradientEpoch()
    marks: ModelCheckpointNotes = ModelCheckpointNotes()

    @property
    def size_bytes(self) -> int:
        return sum(seal.bytes for seal in self.files.values())

    def content(self, with_optimizer: bool) -> str:
        """Return a hash of all the parts that a model loads from it; its address covers the weights alone."""
        taken = (self.weights, *((OPTIMIZER,) if with_optimizer else ()), GRADIENT)
        lines = [f"{file} {self.files[file].sha256}" for file in taken if file in self.files]
        if with_optimizer:
            lines.append(f"step {self.step}")
        return sha256("\n".join(lines).encode()).hexdigest()


_facts = msgspec.json.Decoder(ModelCheckpointFacts)

FillDraft = Callable[[Path], dict[str, Seal]]  # fills an empty folder, and returns the seals computed so far
Describe = Callable[[dict[str, Seal]], ModelCheckpointFacts]


class CheckpointFolder:
    """All checkpoints below one folder."""

    def __init__(self, root: Path, run: int = 0, trainer_epoch: int = 0) -> None:
        """Open the folder for a trainer of this run and epoch. Removes the drafts of this and earlier trainers."""
        self._root = root
        self._trainer = (run, trainer_epoch)
        make_durable_directory(root)
        for draft in root.glob("*/*/.draft-*"):
            of = _DRAFT.match(draft.name)
            if of is None or (int(of[1]), int(of[2])) <= self._trainer:
                shutil.rmtree(draft, ignore_errors=True)

    def facts(self, name: CheckpointName) -> ModelCheckpointFacts:
        """Read the facts of a checkpoint.

        Raises `Refused` if there is no checkpoint of this name, `EngineFault` if it is damaged.
        """
        folder = self._path(name)
        self._settle(folder)
        try:
            facts = decoded(_facts.decode, (folder / FACTS).read_bytes())
        except FileNotFoundError as error:
            raise Refused(Code.BAD_CONFIG, f"there is no checkpoint {name}: save one under this name first") from error
        except (OSError, msgspec.MsgspecError) as error:
            raise EngineFault(f"the checkpoint {name} cannot be read from {folder}: {error}") from error
        if facts.format != 1:
            raise EngineFault(f"the checkpoint {name} was written by a newer bombus (format {facts.format}): update")
        return facts

    def tensors(self, name: CheckpointName, facts: ModelCheckpointFacts, file: str) -> dict[str, Tensor]:
        """Load a checkpoint's file of tensors on the CPU. Raises `EngineFault` if it is damaged or unreadable."""
        path = self._path(name) / file
        try:
            if file_sha256(path) != facts.files[file].sha256:
                raise EngineFault(f"the checkpoint {name} is damaged: {path} is not what was written")
            tensors: dict[str, Tensor] = load_file(path)
        except (OSError, SafetensorError) as error:
            raise EngineFault(f"the checkpoint {name} cannot be read: {error}") from error
        return tensors

    def remove(self, name: CheckpointName) -> None:
        """Remove a checkpoint, if there is one. It is renamed first, so no part of it remains under its name."""
        folder = self._path(name)
        self._settle(folder)
        if not folder.exists():
            return
        going = self._draft(folder.parent)
        folder.rename(going)
        make_durable(folder.parent)
        shutil.rmtree(going, ignore_errors=True)

    def names(self, model: str, kind: CheckpointKind) -> list[str]:
        """Return the names of a model's checkpoints of one kind, sorted."""
        place = self._root / CheckpointName(model, kind, "_").model / kind
        return sorted(path.name for path in place.glob("*") if _NAME.match(path.name))

    def save(
        self, name: CheckpointName, overwrite: bool, operation: str, fill: FillDraft, describe: Describe
    ) -> CheckpointSaved:
        """Write a checkpoint. Returns once it would survive a power cut.

        `describe` makes its facts from the seals of its files. If the name is taken and not to `overwrite`, raises
        `Refused`, unless this `operation` has written that checkpoint, which is then kept.
        """
        folder = self._path(name)
        self._settle(folder)
        if folder.exists() and not overwrite:
            return self._again(name, operation)
        make_durable_directory(folder.parent)
        draft = self._draft(folder.parent)
        try:
            known = fill(draft)
            seals = known | seal_files(draft, lambda file: file not in known)
            facts = describe(dict(sorted(seals.items())))
            _write_durably(draft / FACTS, msgspec.json.encode(facts))
            draft.chmod(access_of(folder.parent))
            make_durable(draft)
            self._put(draft, folder)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
        return _saved(facts, folder)

    def _again(self, name: CheckpointName, operation: str) -> CheckpointSaved:
        facts = self.facts(name)
        if not operation or facts.marks.operation != operation:
            raise Refused(
                Code.BAD_CONFIG, f"there is a checkpoint {name} already: use another name, or save with overwrite"
            )
        return _saved(facts, self._path(name))

    def _put(self, draft: Path, folder: Path) -> None:
        """Move a complete draft into place. An existing checkpoint is moved aside first, and removed afterwards."""
        aside = folder.with_name(REPLACED + folder.name)
        if folder.exists():
            folder.rename(aside)
        draft.rename(folder)
        make_durable(folder.parent)
        shutil.rmtree(aside, ignore_errors=True)

    def _settle(self, folder: Path) -> None:
        """Finish a replacement that a crash interrupted. Restore the old checkpoint if the new one is not in place."""
        aside = folder.with_name(REPLACED + folder.name)
        if not aside.exists():
            return
        if folder.exists():
            shutil.rmtree(aside, ignore_errors=True)
        else:
            aside.rename(folder)
            make_durable(folder.parent)

    def _draft(self, parent: Path) -> Path:
        """Create a directory to fill and rename."""
        run, trainer_epoch = self._trainer
        return Path(tempfile.mkdtemp(prefix=f".draft-run-{run}-epoch-{trainer_epoch}-", dir=parent))

    def _path(self, name: CheckpointName) -> Path:
        return self._root / name.model / name.kind / name.name


def _saved(facts: ModelCheckpointFacts, folder: Path) -> CheckpointSaved:
    return CheckpointSaved(
        checkpoint=facts.kind, name=facts.name, folder=str(folder), address=facts.address, size_bytes=facts.size_bytes
    )


def _write_durably(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
