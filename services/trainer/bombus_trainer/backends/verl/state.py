"""Saves and loads the state of a sharded model and its optimizer, in files that any number of ranks can read.

The files are torch's distributed checkpoints: each rank writes its own part, and reads what it needs from all parts.
"""

import re
from pathlib import Path

from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import Optimizer

from bombus.weights.checkpoints import CheckpointLost
from bombus_trainer.ranks import LEADER

# `__1_0.distcp` was written by rank 1. Other files, such as the index `.metadata`, are written by the leader.
_OF_RANK = re.compile(r"/__(\d+)")


def writer_of(name: str) -> int:
    """Return the rank that wrote a file, given the file's path in a checkpoint."""
    found = _OF_RANK.search(name)
    return int(found[1]) if found else LEADER


def save_state(folder: Path, module: nn.Module, optimizer: Optimizer) -> None:
    """Write this rank's part to `folder`, while every other rank writes its own."""
    model, of_optimizer = get_state_dict(module, optimizer)
    save({"model": model, "optimizer": of_optimizer}, checkpoint_id=folder)


def load_state(folder: Path, module: nn.Module, optimizer: Optimizer) -> None:
    """Read this rank's part of a state that any number of ranks wrote. Raises `CheckpointLost` if it cannot be read."""
    model, of_optimizer = get_state_dict(module, optimizer)
    state = {"model": model, "optimizer": of_optimizer}
    try:
        load(state, checkpoint_id=folder)
    except (CheckpointException, OSError, RuntimeError) as error:
        raise CheckpointLost(f"the checkpoint {folder} cannot be read: {error}") from error
    set_state_dict(module, optimizer, model_state_dict=model, optim_state_dict=of_optimizer)
