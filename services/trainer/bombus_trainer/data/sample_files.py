"""Writes samples to files: `.pt` files in the format of slime's debug rollout data, or `.parquet` files for tools that
read tables."""

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch

from bombus.errors import EngineFault
from bombus.private import private_folder
from bombus_trainer.data.samples import Sample

SUFFIXES = (".pt", ".parquet")


def write(path: Path, step: int, samples: Sequence[Sample]) -> None:
    """Write a file in the format of its suffix. The file appears only once it is complete.

    Raises `EngineFault` for any other suffix, or if the library that writes the format is missing.
    """
    if path.suffix not in SUFFIXES:
        raise EngineFault(f"{path} is refused: samples are written as {' or '.join(SUFFIXES)}")
    private_folder(path.parent)
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    os.close(descriptor)
    draft = Path(name)
    try:
        if path.suffix == ".pt":
            torch.save({"rollout_id": step, "samples": [sample.to_dict() for sample in samples]}, draft)
        else:
            _write_parquet(draft, samples)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def _write_parquet(path: Path, samples: Sequence[Sample]) -> None:
    """Write one row per sample. `metadata` is JSON, since its fields differ from client to client."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ModuleNotFoundError:
        raise EngineFault("writing .parquet needs pyarrow: pip install 'bombus[parquet]', or write a .pt") from None
    numbers = {
        "tokens": pyarrow.list_(pyarrow.int32()),
        "loss_mask": pyarrow.list_(pyarrow.int8()),
        "rollout_log_probs": pyarrow.list_(pyarrow.float32()),
        "weight_versions": pyarrow.list_(pyarrow.string()),
        "label": pyarrow.string(),
    }
    rows = [sample.to_dict() | {"metadata": msgspec.json.encode(sample.metadata).decode()} for sample in samples]
    names = list(Sample.__dataclass_fields__)
    columns = {name: pyarrow.array([row[name] for row in rows], type=numbers.get(name)) for name in names}
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
