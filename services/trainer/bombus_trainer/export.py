"""Policy versions on a shared folder: whole models in Hugging Face layout, each in a folder of its own (R15)."""

import json
import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from bombus.events import Weights
from bombus.faults import Point, reached
from bombus_trainer.model import PolicyModel
from bombus_trainer.places import draft_in
from bombus_trainer.tensorfile import Shape, Written, write_tensors

FORMAT = "safetensors"
FILE = "model.safetensors"


def export(
    root: Path,
    version: int,
    trainer_epoch: int,
    model: PolicyModel,
    files: Mapping[str, bytes],
    tokenizer: str = "",
) -> Weights:
    """Write the model as version `version` below `root`; see `write_version`."""
    content = Content(model.export_dtype, model.dense_shapes(), model.dense_weights())
    return write_version(root, version, trainer_epoch, content, files, tokenizer)


@dataclass(frozen=True, eq=False)
class Content:
    """The tensors of a version, each made only when its turn comes, in the order of `shapes`."""

    dtype: torch.dtype
    shapes: Mapping[str, Shape]
    tensors: Iterable[tuple[str, Tensor]]

    def write(self, path: Path) -> Written:
        return write_tensors(path, self.shapes, self.tensors, durable=False, metadata={"format": "pt"})


def write_version(
    root: Path, version: int, trainer_epoch: int, content: Content, files: Mapping[str, bytes], tokenizer: str = ""
) -> Weights:
    """Write version `version` below `root`; `where` is its folder, `bytes` and `sha256` are of its tensors' file.

    Not made durable: after a power cut the digest tells, and the checkpoint gives the same weights again. The
    trainer epoch in the name keeps two trainers that both believe they are current apart.
    """
    root.mkdir(parents=True, exist_ok=True)
    place = root / f"version-{version:08d}-epoch-{trainer_epoch}"
    draft = draft_in(root, trainer_epoch)
    try:
        reached(Point.TRAINER_WEIGHTS_BEGUN)
        draft.chmod(0o755)
        for name, body in files.items():
            (draft / name).write_bytes(body)
        if "config.json" in files:
            config = json.loads(files["config.json"])
            config["dtype"] = str(content.dtype).removeprefix("torch.")
            config.pop("torch_dtype", None)
            (draft / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True))
        written = content.write(draft / FILE)
        reached(Point.TRAINER_WEIGHTS_WRITTEN)
        if place.exists():  # the same version from the same trainer: an answer to it was lost
            shutil.rmtree(place)
        draft.rename(place)
        reached(Point.TRAINER_WEIGHTS_RENAMED)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return Weights(where=str(place), format=FORMAT, bytes=written.bytes, sha256=written.sha256, tokenizer=tokenizer)


def digest_of(model: PolicyModel) -> str:
    """The `sha256` that `export` would give these weights, without writing them."""
    return Content(model.export_dtype, model.dense_shapes(), model.dense_weights()).write(Path(os.devnull)).sha256
