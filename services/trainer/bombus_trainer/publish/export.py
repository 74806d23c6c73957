"""Writes policy versions as files (R15).

A version is a whole model in Hugging Face layout, a delta against the previous version, or a LoRA adapter alone.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec
import torch
from torch import Tensor

from bombus.faults import Point, reached
from bombus.hive.events import Weights, WeightsReady
from bombus.weights.adapters import ADAPTER_CONFIG, ADAPTER_FILE, ADAPTER_FORMAT, AdapterConfig
from bombus.weights.checkpoints import Seal
from bombus.weights.deltas import BASE, DELTA_FILE, DELTA_FORMAT, FULL_FILE, FULL_FORMAT, GAPS, Patch
from bombus_trainer.publish.directories import draft_directory, new_directory
from bombus_trainer.publish.host_copy import Changes, HostCopy
from bombus_trainer.publish.tensorfile import Shape, shapes_of, write_tensors, write_whole

DELTA_SHARE_MAX = 0.5  # applying a delta larger than this share of the full file costs more than it saves
METADATA = {"format": "pt"}
NOWHERE = Path(os.devnull)


T = TypeVar("T")
Tensors = Iterable[tuple[str, Tensor]]


class ModelPart(StrEnum):
    """Which tensors to read: the model with adapters merged, the model without adapters, or only the adapters."""

    MODEL = "model"
    BASE = "base"
    ADAPTER = "adapter"


@dataclass(frozen=True, eq=False)
class Outline:
    """Describes a version's file without its values: the precision, and the tensors' shapes in order."""

    dtype: torch.dtype
    shapes: Mapping[str, Shape]
    metadata: Mapping[str, str] = field(default_factory=lambda: METADATA)

    @property
    def bytes(self) -> int:
        return sum(shape.bytes for shape in self.shapes.values())

    def write(self, path: Path, tensors: Tensors) -> Seal:
        return write_tensors(path, self.shapes, tensors, durable=False, metadata=self.metadata)


def adapter_outline(config: AdapterConfig, tensors: Tensors) -> Outline:
    """Return the outline of an adapter's file with these tensors."""
    return Outline(torch.float32, shapes_of(dict(tensors)), {**METADATA, ADAPTER_CONFIG: config.to_json()})


class WeightsSource(Protocol):
    """Anything whose weights can be written, such as a trainer backend."""

    @property
    def files(self) -> Mapping[str, bytes]: ...

    def outline(self, part: ModelPart = ModelPart.MODEL) -> Outline: ...

    def read_weights(self, use: Callable[[Tensors], T], part: ModelPart = ModelPart.MODEL) -> T: ...


@dataclass(frozen=True)
class VersionTarget:
    """The version to write, in its own directory in `root`.

    The trainer epoch in the directory's name separates two trainers that both believe they are current. `tokenizer` is
    the name under which the hive's object store has the tokenizer's files.
    """

    root: Path
    version: int
    trainer_epoch: int
    tokenizer: str = ""

    @property
    def name(self) -> str:
        return f"version-{self.version:08d}"


def export(source: WeightsSource, target: VersionTarget, held: HostCopy | None = None) -> Weights:
    """Write a version as a full copy, and copy it to `held` as well, if given.

    In the result, `where` is the version's directory, and `bytes` and `sha256` describe the file of tensors. The file
    is not made durable: after a power failure the digest shows any damage, and the same weights can be written from the
    checkpoint.
    """
    outline = source.outline()
    with _new_directory(target.root, target.name, target.trainer_epoch) as (draft, directory):
        write_files(draft, source.files, outline.dtype)
        written = source.read_weights(lambda tensors: outline.write(draft / FULL_FILE, _through(held, tensors)))
    if held is not None:
        held.settle(target.version, written.sha256)
    return _full(directory, written, target.tokenizer)


def export_base(source: WeightsSource, root: Path, trainer_epoch: int) -> Weights:
    """Write the model that the adapters of all versions apply to, as a full copy."""
    outline = source.outline(ModelPart.BASE)
    with _new_directory(root, "base", trainer_epoch) as (draft, directory):
        write_files(draft, source.files, outline.dtype)
        written = source.read_weights(lambda tensors: outline.write(draft / FULL_FILE, tensors), ModelPart.BASE)
    return _full(directory, written, tokenizer="")


def export_adapter(source: WeightsSource, target: VersionTarget, base: Weights) -> Weights:
    """Write only a version's adapters on `base`. The digest is of the adapters' file, which includes their scale."""
    outline = source.outline(ModelPart.ADAPTER)
    with _new_directory(target.root, target.name, target.trainer_epoch) as (draft, directory):
        (draft / ADAPTER_CONFIG).write_text(outline.metadata[ADAPTER_CONFIG])
        written = source.read_weights(lambda tensors: outline.write(draft / ADAPTER_FILE, tensors), ModelPart.ADAPTER)
    return Weights(
        where=str(directory),
        format=ADAPTER_FORMAT,
        bytes=written.bytes,
        sha256=written.sha256,
        tokenizer=target.tokenizer,
        adapter_of=base,
    )


def export_delta(source: WeightsSource, target: VersionTarget, held: HostCopy, base: WeightsReady) -> Weights:
    """Write only the changes since `base`, the version in `held`. Afterwards `held` has the new version.

    The digest is still that of the full file. If too much has changed, a full copy is written instead.
    """
    outline = source.outline()
    with _new_directory(target.root, target.name, target.trainer_epoch) as (draft, directory):
        changes = Changes(int(DELTA_SHARE_MAX * outline.bytes))
        full = source.read_weights(lambda tensors: outline.write(NOWHERE, held.follow(tensors, changes)))
        held.settle(target.version, full.sha256)
        if changes.too_many:
            write_files(draft, source.files, outline.dtype)
            outline.write(draft / FULL_FILE, held.tensors())
            weights = _full(directory, full, target.tokenizer)
        else:
            delta = write_delta(draft / DELTA_FILE, changes.patches, outline.shapes, base.weights)
            weights = Weights(
                where=str(directory),
                format=DELTA_FORMAT,
                bytes=full.bytes,
                sha256=full.sha256,
                tokenizer=target.tokenizer,
                base=base.version,
                delta_bytes=delta.bytes,
                delta_sha256=delta.sha256,
            )
    return weights


def complete(source: WeightsSource, directory: Path, held: HostCopy, trainer_epoch: int) -> None:
    """Add the full file of the version in `held`, and the model's other files, to the directory with its delta."""
    draft = draft_directory(directory.parent, trainer_epoch)
    try:
        outline = source.outline()
        write_files(draft, source.files, outline.dtype)
        outline.write(draft / FULL_FILE, held.tensors())
        # The tensors are moved last: if they are there, so are all the other files.
        for file in sorted(draft.iterdir(), key=lambda file: file.name == FULL_FILE):
            file.replace(directory / file.name)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def digest_of(source: WeightsSource, held: HostCopy | None = None, part: ModelPart = ModelPart.MODEL) -> str:
    """Return the `sha256` that the file for these weights would have, without writing the file. If `held` is given, the
    weights are copied to it."""
    outline = source.outline(part)
    return source.read_weights(lambda tensors: outline.write(NOWHERE, _through(held, tensors)), part).sha256


def digest_like(source: WeightsSource, weights: Weights | None) -> str:
    """Return the `sha256` that these weights would have on the log if published in the same form as `weights`."""
    adapted = weights is not None and weights.adapter_of is not None
    return digest_of(source, part=ModelPart.ADAPTER if adapted else ModelPart.MODEL)


def _through(held: HostCopy | None, tensors: Tensors) -> Tensors:
    return tensors if held is None else held.follow(tensors)


def write_delta(path: Path, patches: Mapping[str, Patch], shapes: Mapping[str, Shape], base: Weights) -> Seal:
    """Write patches of tensors with these `shapes` as a delta against `base`."""
    tensors = {name: torch.from_numpy(patch.values).view(shapes[name].dtype) for name, patch in patches.items()}
    tensors |= {GAPS + name: torch.from_numpy(patch.gaps) for name, patch in patches.items() if patch.gaps is not None}
    # Wide elements first, so that each tensor begins at a multiple of its element size.
    ordered = dict(sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize))
    metadata = {"format": "bombus-delta", BASE: msgspec.json.encode(base).decode()}
    return write_whole(path, ordered, durable=False, metadata=metadata)


@contextmanager
def _new_directory(root: Path, name: str, trainer_epoch: int) -> Iterator[tuple[Path, Path]]:
    """Yield a draft to fill, and the directory that it will become."""
    directory = root / f"{name}-epoch-{trainer_epoch}"  # exists already if this trainer's answer was lost
    with new_directory(directory, root, trainer_epoch, durable=False) as draft:
        reached(Point.TRAINER_WEIGHTS_BEGUN)
        yield draft, directory
        reached(Point.TRAINER_WEIGHTS_WRITTEN)
    reached(Point.TRAINER_WEIGHTS_RENAMED)


def write_files(folder: Path, files: Mapping[str, bytes], dtype: torch.dtype) -> None:
    """Write a model's files other than tensors. The configuration is changed to name the precision of the tensors."""
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    if "config.json" in files:
        config = json.loads(files["config.json"])
        config["dtype"] = str(dtype).removeprefix("torch.")
        config.pop("torch_dtype", None)
        config.pop("quantization_config", None)  # these tensors are not quantized, even if the original folder's were
        (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True))


def _full(directory: Path, written: Seal, tokenizer: str) -> Weights:
    return Weights(
        where=str(directory), format=FULL_FORMAT, bytes=written.bytes, sha256=written.sha256, tokenizer=tokenizer
    )
