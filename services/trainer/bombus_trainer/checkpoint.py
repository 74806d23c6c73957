"""Checkpoints of step attempts: written beside their place, made durable, renamed there, and verified when read (R11).

A checkpoint is a folder `step-<step>-epoch-<trainer epoch>-attempt-<attempt>` with `state.safetensors` and
`manifest.json`. Its digest is the manifest's sha256, and the manifest names that of the tensors.
"""

import os
import shutil
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path

import msgspec
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from bombus.errors import EngineFault
from bombus.faults import Point, reached
from bombus_trainer.places import draft_in, durable_folder, fsync_folder
from bombus_trainer.tensorfile import Shape, file_sha256, write_tensors

MANIFEST = "manifest.json"
STATE = "state.safetensors"


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What the attempt is about to publish, and what training goes on from.

    `machine` is what else decides the last bits of a sum: see `machine.this_machine`.
    """

    engine: str
    run: int
    step: int
    trainer_epoch: int
    attempt: int
    config_digest: str
    metrics: dict[str, float]
    machine: str = ""


class _Manifest(msgspec.Struct, frozen=True, kw_only=True):
    format: int
    facts: Facts
    state_bytes: int
    state_sha256: str


class Saved(msgspec.Struct, frozen=True):
    path: str
    digest: str


class Checkpoint(msgspec.Struct, frozen=True):
    facts: Facts
    tensors: dict[str, Tensor]


def save(root: Path, facts: Facts, tensors: Mapping[str, Tensor]) -> Saved:
    """Write a checkpoint under `root` and return only when it would survive a power cut."""
    durable_folder(root)
    place = root / f"step-{facts.step:08d}-epoch-{facts.trainer_epoch}-attempt-{facts.attempt}"
    draft = draft_in(root, facts.trainer_epoch)
    try:
        reached(Point.TRAINER_CHECKPOINT_BEGUN)
        shapes = {name: Shape(tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
        written = write_tensors(draft / STATE, shapes, tensors.items(), durable=True)
        manifest = msgspec.json.encode(
            _Manifest(format=1, facts=facts, state_bytes=written.bytes, state_sha256=written.sha256)
        )
        with (draft / MANIFEST).open("wb") as file:
            file.write(manifest)
            file.flush()
            os.fsync(file.fileno())
        fsync_folder(draft)
        reached(Point.TRAINER_CHECKPOINT_WRITTEN)
        if place.exists():  # of a log that is no more: on one log no attempt comes twice
            shutil.rmtree(place)
        draft.rename(place)
        fsync_folder(root)
        reached(Point.TRAINER_CHECKPOINT_RENAMED)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return Saved(str(place), sha256(manifest).hexdigest())


def load(path: Path, digest: str) -> Checkpoint:
    """Read back the checkpoint of that digest. Raises `EngineFault` when it is missing, damaged or another one."""
    manifest = _read_manifest(path, digest)
    try:
        if file_sha256(path / STATE) != manifest.state_sha256:
            raise EngineFault(f"the checkpoint {path} is damaged: {STATE} does not match its manifest")
        return Checkpoint(manifest.facts, load_file(path / STATE))
    except (OSError, SafetensorError) as error:
        raise EngineFault(f"the checkpoint {path} cannot be read: {error}") from error


def read_facts(path: Path, digest: str) -> Facts:
    """What the checkpoint of that digest says of its step, without its tensors. Raises `EngineFault` as `load` does."""
    return _read_manifest(path, digest).facts


def _read_manifest(path: Path, digest: str) -> _Manifest:
    try:
        body = (path / MANIFEST).read_bytes()
    except OSError as error:
        raise EngineFault(f"the checkpoint {path} cannot be read: {error.strerror}") from error
    if sha256(body).hexdigest() != digest:
        raise EngineFault(f"the checkpoint {path} is damaged: its manifest is not the one that the log names")
    try:
        return msgspec.json.decode(body, type=_Manifest)
    except msgspec.MsgspecError as error:
        raise EngineFault(f"the checkpoint {path} cannot be read: {error}") from error
