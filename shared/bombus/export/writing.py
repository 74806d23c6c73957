"""Write the files of a policy version: a whole model, or an adapter for peft."""

import json
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import numpy as np

from bombus.errors import EngineFault
from bombus.export.finding import VersionFiles
from bombus.weights.adapters import ADAPTER_CONFIG, ADAPTER_FILE, Rounding, read_adapter_config
from bombus.weights.deltas import FULL_FILE, Bits, DeltaFile, TensorFile, copy_companions, file_sha256, patched
from bombus.weights.models import TOKENIZER_FILES
from bombus.weights.shards import SHARD_BYTES_MAX, TensorHead, write_model

CONFIG = "config.json"
FLOATS = ("BF16", "F16", "F32", "F64")
FLOAT32 = "F32"

CopyProgress = Callable[[int, int], None]  # called with the bytes done so far and the total bytes
StoredTensors = Iterable[tuple[str, Bits]]


@dataclass(frozen=True)
class ExportedFiles:
    """The result of an export. `digests` maps the names of the weight files to their sha256.

    `rank` is the rank of an adapter, or 0 for a whole model. `share_lost` is the fraction of an adapter's norm that was
    lost to rounding when the adapter was merged.
    """

    digests: dict[str, str]
    rank: int = 0
    share_lost: float = 0.0


def write_adapter(files: VersionFiles, draft: Path, base_model: str) -> ExportedFiles:
    """Write a version's adapter in peft's format, for the model that `from_pretrained(base_model)` loads.

    Raises `EngineFault` if the adapter differs from the one recorded on the log.
    """
    assert files.adapter is not None
    config = read_adapter_config(files.adapter)
    shutil.copyfile(files.adapter / ADAPTER_FILE, draft / ADAPTER_FILE)
    found = file_sha256(draft / ADAPTER_FILE)
    _check(files.adapter / ADAPTER_FILE, found, files.weights.sha256)
    _write_texts(files, draft)
    described = {**json.loads(config.to_json()), "base_model_name_or_path": base_model}
    (draft / ADAPTER_CONFIG).write_text(json.dumps(described, indent=2, sort_keys=True) + "\n")
    return ExportedFiles({ADAPTER_FILE: found}, rank=config.r)


def write_whole(
    files: VersionFiles, draft: Path, progress: CopyProgress, float32: bool = False, bytes_max: int = SHARD_BYTES_MAX
) -> ExportedFiles:
    """Write a version as a whole model in files of at most `bytes_max`, merging its adapter if it has one.

    The model keeps its stored dtypes; if an adapter is merged, the model may be written in `float32` instead. Only one
    tensor is in memory at a time. Raises `EngineFault` if the files differ from those recorded on the log.
    """
    assert files.model is not None
    copy_companions(files.model, draft)
    _write_texts(files, draft)
    if float32:
        config = json.loads((draft / CONFIG).read_text())
        (draft / CONFIG).write_text(json.dumps({**config, "dtype": "float32"}, indent=2, sort_keys=True))
    path, dtype, rounding = files.model / FULL_FILE, FLOAT32 if float32 else "", Rounding()
    with ExitStack() as stack:
        source = stack.enter_context(TensorFile(path))
        deltas = [stack.enter_context(DeltaFile(delta)) for delta in files.deltas]
        seal = sha256(source.head)
        stored = _sealed(source, patched(source, deltas), seal.update, progress)
        tensors = stored if files.adapter is None else _merged(files, source, stored, dtype, rounding)
        digests = write_model(draft, _heads(source, dtype), tensors, bytes_max)
    _check(path, seal.hexdigest(), (files.weights.adapter_of or files.weights).sha256)
    return ExportedFiles(digests, share_lost=rounding.share_lost)


def _merged(
    files: VersionFiles, source: TensorFile, tensors: StoredTensors, dtype: str, rounding: Rounding
) -> Iterator[tuple[str, Bits]]:
    from bombus.weights.merging import Adapter, merged_tensors  # imported here because only this case needs torch

    assert files.adapter is not None
    _check(files.adapter / ADAPTER_FILE, file_sha256(files.adapter / ADAPTER_FILE), files.weights.sha256)
    yield from merged_tensors(source, tensors, Adapter(files.adapter), dtype, rounding)


def _write_texts(files: VersionFiles, draft: Path) -> None:
    """Write the tokenizer and the chat template with which the version's prompts were rendered."""
    # The configuration is left out: a whole model has its own, with the dtype of its weights, and an adapter has none.
    for name in files.texts.keys() & set(TOKENIZER_FILES) - {CONFIG}:
        (draft / name).parent.mkdir(exist_ok=True)
        (draft / name).write_bytes(files.texts[name])


def _heads(source: TensorFile, dtype: str) -> list[TensorHead]:
    """Return the heads of the file's tensors. If `dtype` is given, floating-point tensors get that dtype."""
    owns = {name: source.dtype(name) for name in source.names}
    return [
        TensorHead(name, dtype if dtype and own in FLOATS else own, source.shape(name)) for name, own in owns.items()
    ]


def _sealed(
    source: TensorFile, tensors: StoredTensors, seal: Callable[[memoryview], None], progress: CopyProgress
) -> Iterator[tuple[str, Bits]]:
    """Yield a file's tensors. For each tensor, call `seal` with its bytes before the tensor is yielded, and `progress`
    afterwards."""
    total = sum(head.bytes for head in _heads(source, ""))
    done = 0
    for name, bits in tensors:
        seal(bits.view(np.uint8).data)
        yield name, bits
        done += bits.nbytes
        progress(done, total)


def _check(path: Path, found: str, expected: str) -> None:
    if found != expected:
        raise EngineFault(f"{path} has sha256 {found}, but the log says {expected}: it is damaged, or was replaced")
