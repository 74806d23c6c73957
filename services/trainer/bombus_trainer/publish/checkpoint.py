"""Checkpoints of step attempts: written to a draft, made durable, renamed into place, and verified when read (R11).

A checkpoint is a directory `step-<step>-epoch-<trainer epoch>-attempt-<attempt>` with a `manifest.json`, whose sha256
is the checkpoint's digest. The manifest contains the sha256 of everything else: of `state.safetensors`, which the torch
backend writes, or of each file that the ranks of another backend have written.
"""

import os
import shutil
from collections.abc import Callable, Mapping
from hashlib import sha256
from pathlib import Path

import msgspec
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from bombus.durable import make_durable
from bombus.errors import EngineFault
from bombus.faults import Point, reached
from bombus.hive.decoding import decoded
from bombus.weights.deltas import file_sha256
from bombus_trainer.publish.directories import draft_directory, make_durable_directory
from bombus_trainer.publish.tensorfile import Shape, write_tensors
from bombus_trainer.recovery.progress import advanced

MANIFEST = "manifest.json"
STATE = "state.safetensors"


class CheckpointLost(EngineFault):
    """Raised when a checkpoint is missing or damaged: an older one may be usable."""


class CheckpointDamaged(CheckpointLost):
    """Raised when a checkpoint exists but differs from what was written: retrying does not help."""


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """The attempt that wrote a checkpoint, and its metrics. See `machine.this_machine` for `machine`.

    A metric that is not finite, such as the deviation of extreme rewards, is null in a file.
    """

    engine: str
    run: int
    step: int
    trainer_epoch: int
    attempt: int
    config_digest: str
    metrics: Mapping[str, float | None]
    machine: str = ""


class Seal(msgspec.Struct, frozen=True):
    """The size and digest of a checkpoint's file."""

    bytes: int
    sha256: str


class _Manifest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Format 1 is one file of tensors, format 2 the files of a backend's `ranks` processes, by their relative path.

    `reshards`: any number of ranks can read them.
    """

    format: int
    facts: Facts
    state_bytes: int = 0
    state_sha256: str = ""
    backend: str = "torch"
    ranks: int = 1
    reshards: bool = False
    files: dict[str, Seal] = {}


_manifest = msgspec.json.Decoder(_Manifest)


class Saved(msgspec.Struct, frozen=True):
    path: str
    digest: str


class Checkpoint(msgspec.Struct, frozen=True):
    facts: Facts
    tensors: dict[str, Tensor]


def save(root: Path, facts: Facts, tensors: Mapping[str, Tensor]) -> Saved:
    """Write a checkpoint under `root`. Returns once it would survive a power cut."""

    def fill(draft: Path) -> _Manifest:
        shapes = {name: Shape(tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
        written = write_tensors(draft / STATE, shapes, tensors.items(), durable=True)
        return _Manifest(format=1, facts=facts, state_bytes=written.bytes, state_sha256=written.sha256)

    return _save(root, facts, fill)


def save_files(
    root: Path, facts: Facts, backend: str, ranks: int, write: Callable[[Path], Mapping[str, Seal]]
) -> Saved:
    """Save a checkpoint as `save` does, from files that `write` writes durably, returning their seals.

    Any number of ranks of the backend can read them.
    """

    def fill(draft: Path) -> _Manifest:
        files = dict(write(draft))
        return _Manifest(format=2, facts=facts, backend=backend, ranks=ranks, reshards=True, files=files)

    return _save(root, facts, fill)


def _save(root: Path, facts: Facts, fill: Callable[[Path], _Manifest]) -> Saved:
    make_durable_directory(root)
    directory = root / f"step-{facts.step:08d}-epoch-{facts.trainer_epoch}-attempt-{facts.attempt}"
    draft = draft_directory(root, facts.trainer_epoch)
    try:
        reached(Point.TRAINER_CHECKPOINT_BEGUN)
        manifest = msgspec.json.encode(fill(draft))
        with (draft / MANIFEST).open("wb") as file:
            file.write(manifest)
            file.flush()
            os.fsync(file.fileno())
        make_durable(draft)
        reached(Point.TRAINER_CHECKPOINT_WRITTEN)
        if directory.exists():  # left from another log: on one log no attempt repeats
            shutil.rmtree(directory)
        draft.rename(directory)
        make_durable(root)
        reached(Point.TRAINER_CHECKPOINT_RENAMED)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return Saved(str(directory), sha256(manifest).hexdigest())


def load(path: Path, digest: str) -> Checkpoint:
    """Load the checkpoint with that digest.

    Raises `CheckpointLost` if it is missing, damaged or a different one, `EngineFault` if another backend wrote it.
    """
    manifest = _read_manifest(path, digest)
    _check_backend(path, manifest, "torch", 1)
    try:
        if file_sha256(path / STATE) != manifest.state_sha256:
            raise CheckpointDamaged(f"the checkpoint {path} is damaged: {STATE} does not match its manifest")
        return Checkpoint(manifest.facts, load_file(path / STATE))
    except (OSError, SafetensorError) as error:
        raise CheckpointLost(f"the checkpoint {path} cannot be read: {error}") from error


def verify_files(path: Path, digest: str, backend: str, ranks: int, is_ours: Callable[[str], bool]) -> bool:
    """Check a checkpoint's files for which `is_ours` is true against its manifest: each rank checks its own.

    Return whether any number of ranks can read the files. Raises `CheckpointLost` if one is missing or damaged,
    `EngineFault` if another backend wrote them, or another number of ranks and only as many can read them.
    """
    manifest = _read_manifest(path, digest)
    _check_backend(path, manifest, backend, ranks)
    for name, seal in manifest.files.items():
        try:
            if is_ours(name) and file_sha256(path / name) != seal.sha256:
                raise CheckpointDamaged(f"the checkpoint {path} is damaged: {name} does not match its manifest")
        except OSError as error:
            raise CheckpointLost(f"the checkpoint {path} cannot be read: {error}") from error
    return manifest.reshards


def seal_files(folder: Path, is_ours: Callable[[str], bool]) -> dict[str, Seal]:
    """Make durable the files below `folder` for which `is_ours` is true. Return their seals by relative path."""
    seals: dict[str, Seal] = {}
    for file in sorted(each for each in folder.rglob("*") if each.is_file()):
        name = file.relative_to(folder).as_posix()
        if is_ours(name):
            size = file.stat().st_size
            advanced(written_bytes=size)
            with file.open("rb") as opened:
                os.fsync(opened.fileno())
            seals[name] = Seal(size, file_sha256(file))
            advanced()
    for directory in (each for each in folder.rglob("*") if each.is_dir()):
        make_durable(directory)
    return seals


def _check_backend(path: Path, manifest: _Manifest, backend: str, ranks: int) -> None:
    if manifest.backend != backend:
        raise EngineFault(
            f"the checkpoint {path} was written by the {manifest.backend} backend: {backend} cannot load it"
        )
    if manifest.ranks != ranks and not manifest.reshards:
        raise EngineFault(
            f"the checkpoint {path} was written by {manifest.ranks} ranks, but this trainer has {ranks}: "
            f"start it with {manifest.ranks}"
        )


def read_facts(path: Path, digest: str) -> Facts:
    """Read the facts of the checkpoint with that digest, without its tensors. Raises `CheckpointLost`."""
    return _read_manifest(path, digest).facts


def _read_manifest(path: Path, digest: str) -> _Manifest:
    try:
        body = (path / MANIFEST).read_bytes()
    except OSError as error:
        raise CheckpointLost(f"the checkpoint {path} cannot be read: {error.strerror}") from error
    if sha256(body).hexdigest() != digest:
        raise CheckpointDamaged(f"the checkpoint {path} is damaged: its manifest is not the one that the log names")
    try:
        return decoded(_manifest.decode, body)
    except msgspec.MsgspecError as error:
        raise CheckpointLost(f"the checkpoint {path} cannot be read: {error}") from error
