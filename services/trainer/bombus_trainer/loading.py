"""Loads a job's model into the backend that the job names, and packs its tokenizer into an object."""

import logging
from collections.abc import Mapping
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path

import msgspec

from bombus.architectures.probing import check_context
from bombus.config.job import RunConfig
from bombus.errors import EngineFault
from bombus.figures import byte_size
from bombus.text.checking import check_text, with_chat_template
from bombus.weights.models import SEEDS, load_config, load_tokenizer_files, resolve_model, resolve_tokenizer
from bombus.weights.tokenizer_fit import check_fit
from bombus_trainer.backend import TrainerBackend
from bombus_trainer.backends.torch.executor import Executor
from bombus_trainer.backends.torch.model import PolicyModel
from bombus_trainer.operations.executor import OperationExecutor
from bombus_trainer.operations.settings import ExecutorSettings
from bombus_trainer.options import TrainerOptions
from bombus_trainer.ranks import Ranks
from bombus_trainer.settings import TrainerSettings

log = logging.getLogger(__name__)

LENGTH_BY_DEFAULT = RunConfig().rollout.max_model_len


def load_backend(job: RunConfig, options: TrainerOptions, ranks: Ranks | None = None) -> TrainerBackend:
    """Load the job's model at step 0 into the job's backend, on all `ranks` (if None, on this process alone).

    Raises `EngineFault` if there is no such model, or if this process cannot train it.
    """
    settings = TrainerSettings.of_job(job, options.device, options.bin_tokens)
    ranks = ranks or Ranks.alone()
    asked = job.trainer.max_tokens_per_bin
    if ranks.leads and settings.bin_tokens < asked:
        log.info(
            "micro-batches hold at most %d tokens here, fewer than the job's limit of %d: raise --bin-tokens for more",
            *(settings.bin_tokens, asked),
        )
    if job.trainer.backend == "verl" and find_spec("verl") is None:
        raise EngineFault(
            "trainer.backend is verl, but verl is not installed in this trainer's environment: run `bombus install "
            "verl`, and start the trainer with --backend verl"
        )
    _check_processes(job, ranks)
    if job.trainer.backend == "torch":
        return load_executor(settings, options.allow_download, ranks)
    from bombus_trainer.backends.verl.executor import VerlExecutor

    folder = _folder_to_load(job, options.allow_download)
    return VerlExecutor(folder, settings, ranks, text_files(job, folder, options.allow_download))


def _check_processes(job: RunConfig, ranks: Ranks) -> None:
    if job.trainer.processes not in (0, ranks.size):
        raise EngineFault(
            f"trainer.processes is {job.trainer.processes}, but this trainer was started with {ranks.size}: "
            f"set it to 0, or start the trainer with {job.trainer.processes} processes"
        )


def load_executor(settings: TrainerSettings, allow_download: bool = False, ranks: Ranks | None = None) -> Executor:
    """Load the job's model at step 0. Raises `EngineFault` if there is no such model, or the backend is not torch."""
    job = settings.job
    if job.trainer.backend != "torch":
        raise EngineFault(f"trainer.backend is {job.trainer.backend}, but this can only be done with the torch backend")
    folder = _folder_to_load(job, allow_download)
    return Executor(folder, settings, text_files(job, folder, allow_download), ranks)


def load_base(
    job: RunConfig, options: TrainerOptions, executor: ExecutorSettings, ranks: Ranks | None = None
) -> OperationExecutor:
    """Load the job's model as the base of training operations, on all `ranks` (if None, on this process alone).

    The torch backend executes the operations, whichever backend the job names. Raises `EngineFault` if there is no such
    model.
    """
    ranks = ranks or Ranks.alone()
    _check_processes(job, ranks)
    settings = TrainerSettings.of_job(job, options.device, options.bin_tokens)
    if ranks.size > 1:
        executor = executor.model_copy(update={"scratch": executor.scratch / f"rank-{ranks.rank}"})
    return OperationExecutor(_folder_to_load(job, options.allow_download), settings, executor, ranks=ranks)


def base_files(job: RunConfig, options: TrainerOptions) -> dict[str, bytes]:
    """Return the tokenizer's files for the job's model. Raises `EngineFault` if no gateway could use them."""
    return text_files(job, _folder(job, options.allow_download), options.allow_download)


def check_model(folder: Path, tokens: int) -> None:
    """Raise `EngineFault` unless the torch backend can train the model in `folder` on sequences of `tokens` tokens."""
    lengths = {"max_prompt_length": 1, "max_response_length": 1, "max_response_length_in_one_turn": 1}
    job = RunConfig.model_validate({"rollout": {**lengths, "max_model_len": tokens}, "trainer": {"overlong_buffer": 1}})
    PolicyModel.load(folder, TrainerSettings.of_job(job))


def _folder_to_load(job: RunConfig, allow_download: bool) -> Path:
    """Return the folder of the job's model, after logging that loading begins: nothing else is logged until it ends."""
    folder = _folder(job, allow_download)
    size = byte_size(sum(file.stat().st_size for file in folder.glob("*.safetensors")))
    log.info("loading %s, %s of weights: this takes seconds to minutes, depending on their size", job.model.path, size)
    return folder


def _folder(job: RunConfig, allow_download: bool) -> Path:
    dtype = "bfloat16" if job.model.dtype == "auto" else job.model.dtype
    folder = resolve_model(job.model.path, dtype=dtype, seed=job.model.seed % SEEDS, allow_download=allow_download)
    if job.rollout.max_model_len != LENGTH_BY_DEFAULT:  # the default is limited to the model's context
        check_context(load_config(folder), job.rollout.max_model_len)
    return folder


def text_files(job: RunConfig, folder: Path, allow_download: bool = False) -> dict[str, bytes]:
    """Return the tokenizer's files for the model in `folder`, with the job's chat template.

    Raises `EngineFault` if they do not fit the model, or if no gateway could use them.
    """
    name = job.model.tokenizer
    other = resolve_tokenizer(name, allow_download=allow_download) if name else None
    files = load_tokenizer_files(folder, other)
    check_fit(files, job.model.path, name or job.model.path)
    files = with_chat_template(files, job.model.chat_template)
    check_text(files, job.model)
    return files


def pack_tokenizer(files: Mapping[str, bytes]) -> tuple[str, bytes]:
    """Return the name (including its digest) and the bytes of the object from which gateways read the tokenizer."""
    blob = msgspec.msgpack.encode(dict(sorted(files.items())))
    return f"tokenizer-{sha256(blob).hexdigest()}", blob
