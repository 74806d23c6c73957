"""The format of checkpoints: a directory whose `manifest.json` contains its writer's facts and seals the other files.

The SHA-256 of the manifest is the checkpoint's digest, so the digest covers every file. Trainers write checkpoints of
steps (R11) and of training clients' models (R17), which differ in their facts and in the names of their files.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from bombus.errors import EngineFault
from bombus.hive.decoding import decoded

MANIFEST = "manifest.json"
STATE = "state.safetensors"  # the whole state of a step, in one file
FORMAT = 3
OTHER_VERSION = "use the version of bombus that wrote it, or another checkpoint"
FactsT = TypeVar("FactsT")


class CheckpointLost(EngineFault):
    """Raised if a checkpoint is missing or damaged. An older one may be usable."""


class CheckpointDamaged(CheckpointLost):
    """Raised if a checkpoint exists but is not what a trainer of this version wrote. Retrying does not help."""


class Seal(msgspec.Struct, frozen=True):
    """The size and the digest of a file."""

    bytes: int
    sha256: str


class _Manifest(msgspec.Struct, frozen=True, kw_only=True):
    format: int
    facts: msgspec.Raw = msgspec.Raw()
    files: dict[str, Seal] = {}


_manifest = msgspec.json.Decoder(_Manifest)


@dataclass(frozen=True)
class Checkpoint(Generic[FactsT]):
    """A checkpoint as described by its manifest. `files` contains the seals of its files, by relative path."""

    path: Path
    digest: str
    facts: FactsT
    files: Mapping[str, Seal]

    @property
    def size_bytes(self) -> int:
        return sum(seal.bytes for seal in self.files.values())


def encode_manifest(facts: object, files: Mapping[str, Seal]) -> bytes:
    """Encode the manifest of a checkpoint. A number in its facts that is not finite becomes null."""
    encoded = msgspec.Raw(msgspec.json.encode(facts))
    return msgspec.json.encode(_Manifest(format=FORMAT, facts=encoded, files=dict(sorted(files.items()))))


def read_checkpoint(path: Path, facts: type[FactsT], digest: str = "") -> Checkpoint[FactsT]:
    """Read a checkpoint's manifest, which must have that `digest` unless it is "". The checkpoint's files are not read.

    Raises `CheckpointLost`, or `CheckpointDamaged` if another version of bombus wrote the checkpoint.
    """
    try:
        body = (path / MANIFEST).read_bytes()
    except OSError as error:
        if isinstance(error, FileNotFoundError) and path.is_dir():
            raise CheckpointDamaged(
                f"the checkpoint {path} has no {MANIFEST}: restore that file; if an earlier version of bombus wrote "
                f"the checkpoint, {OTHER_VERSION}"
            ) from error
        raise CheckpointLost(f"the checkpoint {path} cannot be read: {error.strerror}") from error
    found = sha256(body).hexdigest()
    if digest not in ("", found):
        raise CheckpointDamaged(f"the checkpoint {path} is damaged: its manifest is not the one named in the log")
    try:
        manifest = decoded(_manifest.decode, body)
        if manifest.format != FORMAT:
            raise CheckpointDamaged(
                f"the checkpoint {path} has format {manifest.format}, but this version of bombus reads format "
                f"{FORMAT}: {OTHER_VERSION}"
            )
        read = decoded(partial(msgspec.json.decode, type=facts), manifest.facts)
    except msgspec.MsgspecError as error:
        raise CheckpointDamaged(f"the checkpoint {path} cannot be read: {error}") from error
    return Checkpoint(path, found, read, manifest.files)
