"""Policy versions on a shared folder: whole models in Hugging Face layout, each in a folder of its own (R15)."""

import json
import shutil
import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path

from bombus.events import Weights
from bombus_trainer.model import PolicyModel
from bombus_trainer.tensorfile import write_tensors

FORMAT = "safetensors"
FILE = "model.safetensors"
KEPT = 2


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
    draft = Path(tempfile.mkdtemp(prefix=".draft-", dir=root))
    try:
        draft.chmod(0o755)
        for name, content in files.items():
            (draft / name).write_bytes(content)
        if "config.json" in files:
            config = json.loads(files["config.json"])
            config["dtype"] = str(model.export_dtype).removeprefix("torch.")
            config.pop("torch_dtype", None)
            (draft / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True))
        shapes = model.dense_shapes()
        written = write_tensors(draft / FILE, shapes, model.dense_weights(), durable=False, metadata={"format": "pt"})
        if place.exists():  # the same version from the same trainer: an answer to it was lost
            shutil.rmtree(place)
        draft.rename(place)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return Weights(where=str(place), format=FORMAT, bytes=written.bytes, sha256=written.sha256, tokenizer=tokenizer)


def keep_only(root: Path, kept: Collection[str]) -> None:
    """Remove all versions but those in `kept` (folders as in `Weights.where`)."""
    names = {Path(where).name for where in kept}
    if not root.is_dir():
        return
    for place in root.iterdir():
        if place.name not in names and place.name.startswith(("version-", ".draft-")):
            shutil.rmtree(place, ignore_errors=True)
