"""Weights from a folder: read beside the running engine, or as a fresh one."""

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from bombus.deltas import FULL_FILE
from bombus.errors import EngineFault
from bombus.models import load_model
from bombus_inference import attention
from bombus_inference.engine import Engine
from bombus_inference.settings import EngineSettings


def read_state(folder: Path, settings: EngineSettings) -> dict[str, Tensor]:
    """The tensors by name, of the engine's type and on its device. Copied: the trainer may remove the file."""
    try:
        mapped = load_file(folder / FULL_FILE)
    except (OSError, SafetensorError) as error:
        raise EngineFault(f"{folder / FULL_FILE} cannot be read: {error}") from error
    dtype = getattr(torch, settings.dtype)
    return {name: tensor.to(settings.device, dtype, copy=True) for name, tensor in mapped.items()}


def make_engine(folder: Path, settings: EngineSettings, *, run: int, version: int) -> Engine:
    """A fresh engine for the model in `folder`. Raises `EngineFault`."""
    attention.register()
    model = load_model(folder, settings.dtype, attention.NAME)
    model.to(settings.device)
    model.requires_grad_(False)
    return Engine(model, settings, run=run, version=version)
