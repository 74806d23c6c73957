"""Policy versions as files: whole models in Hugging Face layout, what has changed since the version before, or LoRA
adapters alone (R15)."""

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
from bombus.weights.deltas import BASE, DELTA_FILE, DELTA_FORMAT, FULL_FILE, FULL_FORMAT, GAPS, Patch
from bombus_trainer.publish.directories import draft_directory
from bombus_trainer.publish.host_copy import Changes, HostCopy
from bombus_trainer.publish.tensorfile import Shape, Written, write_tensors

DELTA_SHARE_MAX = 0.5  # a delta of more than this share of the full file is not worth what it costs to apply
METADATA = {"format": "pt"}
NOWHERE = Path(os.devnull)


T = TypeVar("T")
Tensors = Iterable[tuple[str, Tensor]]


class ModelPart(StrEnum):
    """What of a model is read: all of it, adapters merged; what LoRA's adapters are on; or these alone."""

    MODEL = "model"
    BASE = "base"
    ADAPTER = "adapter"


@dataclass(frozen=True, eq=False)
class Outline:
    """What a version's file holds besides values: the precision, and each tensor's shape, in their order."""

    dtype: torch.dtype
    shapes: Mapping[str, Shape]
    metadata: Mapping[str, str] = field(default_factory=lambda: METADATA)

    @property
    def bytes(self) -> int:
        return sum(shape.bytes for shape in self.shapes.values())

    def write(self, path: Path, tensors: Tensors) -> Written:
        return write_tensors(path, self.shapes, tensors, durable=False, metadata=self.metadata)


def adapter_outline(config: AdapterConfig, tensors: Tensors) -> Outline:
    """Of the file of an adapter with these tensors."""
    return Outline(torch.float32, _shapes(dict(tensors)), {**METADATA, ADAPTER_CONFIG: config.to_json()})


class WeightsSource(Protocol):
    """What has weights to be written: any trainer backend."""

    @property
    def files(self) -> Mapping[str, bytes]: ...

    def outline(self, part: ModelPart = ModelPart.MODEL) -> Outline: ...

    def read_weights(self, use: Callable[[Tensors], T], part: ModelPart = ModelPart.MODEL) -> T: ...


def export(
    source: WeightsSource,
    root: Path,
    version: int,
    trainer_epoch: int,
    tokenizer: str = "",
    held: HostCopy | None = None,
) -> Weights:
    """Write version `version` below `root`; `where` is its folder, `bytes` and `sha256` are of its tensors' file.

    Not made durable: after a power cut the digest tells, and the checkpoint gives the same weights again. The
    trainer epoch in the name keeps two trainers that both believe they are current apart.
    """
    outline = source.outline()
    with _place(root, _version(version), trainer_epoch) as (draft, place):
        _write_files(draft, source.files, outline.dtype)
        written = source.read_weights(lambda tensors: outline.write(draft / FULL_FILE, _through(held, tensors)))
    if held is not None:
        held.settle(version, written.sha256)
    return _full(place, written, tokenizer)


def export_base(source: WeightsSource, root: Path, trainer_epoch: int) -> Weights:
    """What the adapters of all versions are on, as a full copy."""
    outline = source.outline(ModelPart.BASE)
    with _place(root, "base", trainer_epoch) as (draft, place):
        _write_files(draft, source.files, outline.dtype)
        written = source.read_weights(lambda tensors: outline.write(draft / FULL_FILE, tensors), ModelPart.BASE)
    return _full(place, written, tokenizer="")


def export_adapter(
    source: WeightsSource, root: Path, version: int, trainer_epoch: int, tokenizer: str, base: Weights
) -> Weights:
    """As `export`, but only the adapters on `base`. The digest is that of their file, which also says their scale."""
    outline = source.outline(ModelPart.ADAPTER)
    with _place(root, _version(version), trainer_epoch) as (draft, place):
        (draft / ADAPTER_CONFIG).write_text(outline.metadata[ADAPTER_CONFIG])
        written = source.read_weights(lambda tensors: outline.write(draft / ADAPTER_FILE, tensors), ModelPart.ADAPTER)
    return Weights(
        where=str(place),
        format=ADAPTER_FORMAT,
        bytes=written.bytes,
        sha256=written.sha256,
        tokenizer=tokenizer,
        adapter_of=base,
    )


def export_delta(
    source: WeightsSource,
    root: Path,
    version: int,
    trainer_epoch: int,
    tokenizer: str,
    held: HostCopy,
    base: WeightsReady,
) -> Weights:
    """As `export`, but only what has changed since `base`, which is the version that is held.

    The digest is that of the full file all the same. When too much has changed a full copy is written after all.
    """
    outline = source.outline()
    with _place(root, _version(version), trainer_epoch) as (draft, place):
        changes = Changes(int(DELTA_SHARE_MAX * outline.bytes))
        full = source.read_weights(lambda tensors: outline.write(NOWHERE, held.follow(tensors, changes)))
        held.settle(version, full.sha256)
        if changes.too_many:
            _write_files(draft, source.files, outline.dtype)
            outline.write(draft / FULL_FILE, held.tensors())
            weights = _full(place, full, tokenizer)
        else:
            delta = write_delta(draft / DELTA_FILE, changes.patches, outline.shapes, base.weights)
            weights = Weights(
                where=str(place),
                format=DELTA_FORMAT,
                bytes=full.bytes,
                sha256=full.sha256,
                tokenizer=tokenizer,
                base=base.version,
                delta_bytes=delta.bytes,
                delta_sha256=delta.sha256,
            )
    return weights


def complete(source: WeightsSource, place: Path, held: HostCopy, trainer_epoch: int) -> None:
    """Put the full file of the version that is held, and what belongs to it, into its folder, beside its delta."""
    draft = draft_directory(place.parent, trainer_epoch)
    try:
        outline = source.outline()
        _write_files(draft, source.files, outline.dtype)
        outline.write(draft / FULL_FILE, held.tensors())
        # The tensors come last: once they are there, so is all that belongs to them.
        for file in sorted(draft.iterdir(), key=lambda file: file.name == FULL_FILE):
            file.replace(place / file.name)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def digest_of(source: WeightsSource, held: HostCopy | None = None, part: ModelPart = ModelPart.MODEL) -> str:
    """The `sha256` that these weights' file would have, without writing it. They are held if that is wanted."""
    outline = source.outline(part)
    return source.read_weights(lambda tensors: outline.write(NOWHERE, _through(held, tensors)), part).sha256


def digest_like(source: WeightsSource, weights: Weights | None) -> str:
    """The `sha256` that would be on the log for these weights, had they travelled as `weights` did."""
    return digest_of(
        source, part=ModelPart.ADAPTER if weights is not None and weights.adapter_of is not None else ModelPart.MODEL
    )


def _through(held: HostCopy | None, tensors: Tensors) -> Tensors:
    return tensors if held is None else held.follow(tensors)


def write_delta(path: Path, patches: Mapping[str, Patch], shapes: Mapping[str, Shape], base: Weights) -> Written:
    """Write patches of tensors of these `shapes` as a delta of `base`."""
    tensors = {name: torch.from_numpy(patch.values).view(shapes[name].dtype) for name, patch in patches.items()}
    tensors |= {GAPS + name: torch.from_numpy(patch.gaps) for name, patch in patches.items() if patch.gaps is not None}
    # Wide elements first: each tensor begins where its type may.
    ordered = dict(sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize))
    metadata = {"format": "bombus-delta", BASE: msgspec.json.encode(base).decode()}
    return write_tensors(path, _shapes(ordered), ordered.items(), durable=False, metadata=metadata)


@contextmanager
def _place(root: Path, name: str, trainer_epoch: int) -> Iterator[tuple[Path, Path]]:
    """A draft to be filled and the folder that it becomes."""
    root.mkdir(parents=True, exist_ok=True)
    place = root / f"{name}-epoch-{trainer_epoch}"
    draft = draft_directory(root, trainer_epoch)
    try:
        reached(Point.TRAINER_WEIGHTS_BEGUN)
        draft.chmod(0o755)
        yield draft, place
        reached(Point.TRAINER_WEIGHTS_WRITTEN)
        if place.exists():  # the same version from the same trainer: an answer to it was lost
            shutil.rmtree(place)
        draft.rename(place)
        reached(Point.TRAINER_WEIGHTS_RENAMED)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _version(version: int) -> str:
    return f"version-{version:08d}"


def _write_files(folder: Path, files: Mapping[str, bytes], dtype: torch.dtype) -> None:
    for name, content in files.items():
        (folder / name).write_bytes(content)
    if "config.json" in files:
        config = json.loads(files["config.json"])
        config["dtype"] = str(dtype).removeprefix("torch.")
        config.pop("torch_dtype", None)
        (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True))


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, Shape]:
    return {name: Shape(tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}


def _full(place: Path, written: Written, tokenizer: str) -> Weights:
    return Weights(
        where=str(place), format=FULL_FORMAT, bytes=written.bytes, sha256=written.sha256, tokenizer=tokenizer
    )
