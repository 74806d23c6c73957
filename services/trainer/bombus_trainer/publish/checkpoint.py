"""Writes checkpoints by filling a draft, making it durable and renaming it into place. Also verifies and loads their
tensors.

`bombus.weights.checkpoints` defines the format.
"""

from collections.abc import Callable, Iterable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from bombus.durable import make_durable
from bombus.faults import Point, reached
from bombus.weights.checkpoints import (
    MANIFEST,
    Checkpoint,
    CheckpointDamaged,
    CheckpointLost,
    FactsT,
    Seal,
    encode_manifest,
)
from bombus.weights.deltas import file_sha256
from bombus_trainer.publish.directories import new_directory
from bombus_trainer.recovery.progress import advanced

# Fills an empty directory, and returns the seals of the files that it has made durable.
FillDraft = Callable[[Path], Mapping[str, Seal]]


def write_checkpoint(
    directory: Path, facts: FactsT, fill: FillDraft, drafts: Path, trainer_epoch: int
) -> Checkpoint[FactsT]:
    """Write a checkpoint, replacing any earlier one. Returns once it would survive a power failure.

    `drafts` is the folder for the draft, and must be on the same file system.
    """
    with new_directory(directory, drafts, trainer_epoch, durable=True) as draft:
        reached(Point.TRAINER_CHECKPOINT_BEGUN)
        sealed = fill(draft)
        files = {**sealed, **seal_files(draft, lambda name: name not in sealed)}
        manifest = encode_manifest(facts, files)
        (draft / MANIFEST).write_bytes(manifest)
        make_durable(draft / MANIFEST)
        make_durable(draft)
        reached(Point.TRAINER_CHECKPOINT_WRITTEN)
    reached(Point.TRAINER_CHECKPOINT_RENAMED)
    return Checkpoint(directory, sha256(manifest).hexdigest(), facts, files)


def seal_files(folder: Path, is_ours: Callable[[str], bool]) -> dict[str, Seal]:
    """Make durable those files in `folder` for which `is_ours` returns true. Return their seals by relative path."""
    seals: dict[str, Seal] = {}
    for file in sorted(each for each in folder.rglob("*") if each.is_file()):
        name = file.relative_to(folder).as_posix()
        if is_ours(name):
            size = file.stat().st_size
            advanced(written_bytes=size)
            make_durable(file)
            seals[name] = Seal(size, file_sha256(file))
            advanced()
    for directory in (each for each in folder.rglob("*") if each.is_dir()):
        make_durable(directory)
    return seals


def verify(checkpoint: Checkpoint[Any], names: Iterable[str]) -> None:
    """Compare a checkpoint's files with their seals. Raises `CheckpointLost` if a file is missing or damaged."""
    path, files = checkpoint.path, checkpoint.files
    for name in names:
        try:
            if name not in files or file_sha256(path / name) != files[name].sha256:
                raise CheckpointDamaged(f"the checkpoint {path} is damaged: {name} does not match its manifest")
        except OSError as error:
            raise CheckpointLost(f"the checkpoint {path} cannot be read: {error}") from error


def load_tensors(checkpoint: Checkpoint[Any], name: str) -> dict[str, Tensor]:
    """Load one of a checkpoint's tensor files on the CPU. Raises `CheckpointLost` if the file is missing or damaged."""
    verify(checkpoint, [name])
    try:
        tensors: dict[str, Tensor] = load_file(checkpoint.path / name)
    except (OSError, SafetensorError) as error:
        raise CheckpointLost(f"the checkpoint {checkpoint.path} cannot be read: {error}") from error
    return tensors
