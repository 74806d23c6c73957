"""Policy versions on a shared folder: whole models in Hugging Face layout, each in a folder of its own (R15)."""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from bombus.events import Weights
from bombus.faults import Point, reached
from bombus_trainer.model import PolicyModel
from bombus_trainer.places import draft_in
from bombus_trainer.tensorfile import Written, write_tensors

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
        for name, content in files.items():
            (draft / name).write_bytes(content)
        if "config.json" in files:
            config = json.loads(files["config.json"])
            config["dtype"] = str(model.export_dtype).removeprefix("torch.")
            config.pop("torch_dtype", None)
            (draft / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True))
        written = _write(draft / FILE, model)
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
    return _write(Path(os.devnull), model).sha256


def _write(path: Path, model: PolicyModel) -> Written:
    return write_tensors(path, model.dense_shapes(), model.dense_weights(), durable=False, metadata={"format": "pt"})
