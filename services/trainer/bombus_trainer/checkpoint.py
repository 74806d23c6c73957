"""Checkpoints of step attempts: written beside their place, made durable, renamed there, and verified when read (R11).

A checkpoint is a folder `step-<step>-epoch-<trainer epoch>-attempt-<attempt>` with `state.safetensors` and
`manifest.json`. Its digest is the manifest's sha256, and the manifest names that of the tensors.
"""

import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from hashlib import sha256
from pathlib import Path

import msgspec
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from bombus.errors import EngineFault
from bombus_trainer.tensorfile import Shape, file_sha256, fsync_folder, write_tensors

MANIFEST = "manifest.json"
STATE = "state.safetensors"
KEPT = 2


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What the attempt is about to publish, and what training goes on from."""

    engine: str
    run: int
    step: int
    trainer_epoch: int
    attempt: int
    config_digest: str
    metrics: dict[str, float]


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
    root.mkdir(parents=True, exist_ok=True)
    place = root / f"step-{facts.step:08d}-epoch-{facts.trainer_epoch}-attempt-{facts.attempt}"
    draft = Path(tempfile.mkdtemp(prefix=".draft-", dir=root))
    try:
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
        if place.exists():  # of a log that is no more: on one log no attempt comes twice
            shutil.rmtree(place)
        draft.rename(place)
        fsync_folder(root)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return Saved(str(place), sha256(manifest).hexdigest())


def load(path: Path, digest: str) -> Checkpoint:
    """Read back the checkpoint of that digest. Raises `EngineFault` when it is missing, damaged or another one."""
    try:
        manifest_bytes = (path / MANIFEST).read_bytes()
    except OSError as error:
        raise EngineFault(f"the checkpoint {path} cannot be read: {error.strerror}") from error
    if sha256(manifest_bytes).hexdigest() != digest:
        raise EngineFault(f"the checkpoint {path} is damaged: its manifest is not the one that the log names")
    try:
        manifest = msgspec.json.decode(manifest_bytes, type=_Manifest)
        if file_sha256(path / STATE) != manifest.state_sha256:
            raise EngineFault(f"the checkpoint {path} is damaged: {STATE} does not match its manifest")
        return Checkpoint(manifest.facts, load_file(path / STATE))
    except (OSError, msgspec.MsgspecError, SafetensorError) as error:
        raise EngineFault(f"the checkpoint {path} cannot be read: {error}") from error


def keep_only(root: Path, named: Iterable[str]) -> None:
    """Remove what crashed attempts left and all checkpoints but these (the newest ones that the log names)."""
    kept = {Path(path).name for path in named}
    if not root.is_dir():
        return
    for place in root.iterdir():
        if place.name not in kept and place.name.startswith(("step-", ".draft-")):
            shutil.rmtree(place, ignore_errors=True)
