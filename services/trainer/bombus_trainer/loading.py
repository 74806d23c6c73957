"""A job's model, ready to be trained, and its tokenizer as an object: the same for the service and for replay."""

from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path

import msgspec

from bombus.models import load_tokenizer_files, resolve_model, resolve_tokenizer
from bombus.run_config import RunConfig
from bombus.tokenizer_fit import check_fit
from bombus_trainer.executor import Executor
from bombus_trainer.settings import TrainerSettings

SEEDS = 2**31  # of weights that are made on the spot


def load_executor(job: RunConfig, settings: TrainerSettings, allow_download: bool = False) -> Executor:
    """The job's model as step 0. Raises `EngineFault` when there is none, or it cannot be trained."""
    dtype = "bfloat16" if job.model.dtype == "auto" else job.model.dtype
    folder = resolve_model(job.model.path, dtype=dtype, seed=job.model.seed % SEEDS, allow_download=allow_download)
    return Executor(folder, settings, text_files(job, folder, allow_download))


def text_files(job: RunConfig, folder: Path, allow_download: bool = False) -> dict[str, bytes]:
    """The tokenizer of the job's model, which is in `folder`. Raises `EngineFault` when it is not that model's."""
    named = job.model.tokenizer
    other = resolve_tokenizer(named, allow_download=allow_download) if named else None
    files = load_tokenizer_files(folder, other)
    check_fit(files, job.model.path, named or job.model.path)
    return files


def pack_tokenizer(files: Mapping[str, bytes]) -> tuple[str, bytes]:
    """The object that gateways read a tokenizer from: its name, which is that of its content, and its bytes."""
    blob = msgspec.msgpack.encode(dict(sorted(files.items())))
    return f"tokenizer-{sha256(blob).hexdigest()}", blob
