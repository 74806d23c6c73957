"""Checks whether there is memory for another model, given its number of parameters."""

import os
from collections.abc import Collection

import msgspec
import torch

from bombus.errors import Code, Refused
from bombus.figures import byte_size, counted
from bombus.machine.hardware import memory_bytes
from bombus_trainer.operations.client_model import TrainedClientModel

NUMBER_BYTES = 4  # trained parameters, their gradients and both Adam moments are float32


class ModelNeed(msgspec.Struct, frozen=True):
    """The bytes that a new model with `numbers` parameters needs, and the bytes that the other models may still
    allocate.

    A model's gradient is allocated with its first data, and its optimizer state at its first step.
    """

    numbers: int
    own: int
    others: int


def need_of(numbers: int, models: Collection[TrainedClientModel], optimizer_bytes_max: int) -> ModelNeed:
    """Return the memory needed to add a new model to these. Optimizers that exceed `optimizer_bytes_max` are kept in
    files."""
    weights = NUMBER_BYTES * numbers
    wanted = [2 * weights, *(trained.optimizer.full_bytes for trained in models)]
    held = sum(trained.optimizer.held_bytes for trained in models)
    optimizers = max(min(sum(wanted), max(optimizer_bytes_max, *wanted)) - held, 0)
    gradients = sum(
        parameter.nbytes for trained in models for parameter in trained.parameters.values() if parameter.grad is None
    )
    own = 2 * weights + min(2 * weights, optimizers)
    return ModelNeed(numbers, own, 2 * weights + gradients + optimizers - own)


def free_bytes(device: torch.device) -> int:
    """Return the free bytes of a device; for a CPU, this rank's share of the machine's or container's free memory."""
    if device.type != "cuda":
        return memory_bytes()[1] // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # cached by torch
    return int(torch.cuda.mem_get_info(device)[0]) + unused


def check_room(need: ModelNeed, free: int, device: torch.device, models: int) -> None:
    """Raise `Refused` OVERLOADED if a new model does not fit into the free memory."""
    if need.own + need.others <= free:
        return
    what = f"its {need.numbers:,} parameters take {byte_size(need.own)} with their gradient and optimizer"
    beside = f", and the {counted(models, 'model')} here may still take {byte_size(need.others)}" if models else ""
    where = "of memory" if device.type == "cpu" else f"on {device}"
    raise Refused(
        Code.OVERLOADED,
        f"there is no room for this model: {what}{beside}, with only {byte_size(free)} {where} free. End a model, ask "
        "for a lower rank or for fewer layers, or give the trainer more memory",
    )
