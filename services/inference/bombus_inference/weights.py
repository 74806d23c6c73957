"""Weights from the shared folder: checked against the log's digest, and read beside the running engine."""

import hashlib
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from bombus.errors import EngineFault
from bombus.events import Weights
from bombus.models import load_model
from bombus_inference import attention
from bombus_inference.engine import Engine
from bombus_inference.settings import EngineSettings

FORMAT = "safetensors"
FILE = "model.safetensors"


def check_weights(weights: Weights) -> Path:
    """The folder, once its tensors' file is the one that the log means. Raises `EngineFault`."""
    if weights.format != FORMAT:
        raise EngineFault(f"weights of format {weights.format!r} are not known to this engine, only {FORMAT!r}")
    folder = Path(weights.where)
    try:
        with (folder / FILE).open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise EngineFault(f"no weights at {weights.where}: {error}; replicas must see the trainer's folder") from error
    if weights.sha256 and found != weights.sha256:
        raise EngineFault(f"{folder / FILE} has sha256 {found}, the log says {weights.sha256}: not loaded")
    return folder


def read_state(folder: Path, settings: EngineSettings) -> dict[str, Tensor]:
    """The tensors by name, of the engine's type and on its device. Copied: the trainer may remove the file."""
    try:
        mapped = load_file(folder / FILE)
    except (OSError, SafetensorError) as error:
        raise EngineFault(f"{folder / FILE} cannot be read: {error}") from error
    dtype = getattr(torch, settings.dtype)
    return {name: tensor.to(settings.device, dtype, copy=True) for name, tensor in mapped.items()}


def make_engine(folder: Path, settings: EngineSettings, *, run: int, version: int) -> Engine:
    """A fresh engine for the model in `folder`. Raises `EngineFault`."""
    attention.register()
    model = load_model(folder, settings.dtype, attention.NAME)
    model.to(settings.device)
    model.requires_grad_(False)
    return Engine(model, settings, run=run, version=version)
