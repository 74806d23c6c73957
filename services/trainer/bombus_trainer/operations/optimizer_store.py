"""Keeps optimizers in memory up to a limit, and the least recently used ones in files."""

import logging
import shutil
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file

from bombus.errors import EngineFault
from bombus.weights.checkpoints import Seal
from bombus.weights.deltas import file_sha256
from bombus_trainer.backends.torch.optim import AdamW
from bombus_trainer.publish.directories import make_durable_directory
from bombus_trainer.publish.tensorfile import write_whole

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Offloaded:
    path: Path
    seal: Seal


class OptimizerStore:
    """The optimizers of all models. Those in memory take at most `bytes_max`, or the size of the optimizer in use if
    that is larger.

    `folder` is emptied first, since files that an earlier process left in it belong to models that are gone.
    """

    def __init__(self, folder: Path, bytes_max: int) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        make_durable_directory(folder)
        self._folder = folder
        self._bytes_max = bytes_max
        self._optimizers: OrderedDict[str, AdamW] = OrderedDict()  # least recently used first
        self._offloaded: dict[str, _Offloaded] = {}

    @property
    def offloaded(self) -> list[str]:
        """The models whose optimizers are not in memory."""
        return sorted(self._offloaded)

    def add(self, model: str, optimizer: AdamW) -> None:
        """Add a model's optimizer, replacing any earlier one."""
        self.remove(model)
        self._optimizers[model] = optimizer

    def remove(self, model: str) -> None:
        """Forget a model's optimizer, if it exists, whether it is in memory or in a file."""
        self._optimizers.pop(model, None)
        if offloaded := self._offloaded.pop(model, None):
            offloaded.path.unlink(missing_ok=True)

    def renew(self, model: str) -> None:
        """Discard the file of a model's optimizer, after its state was replaced in memory."""
        if offloaded := self._offloaded.pop(model, None):
            offloaded.path.unlink(missing_ok=True)
        self._optimizers.move_to_end(model)
        self._make_room(self._optimizers[model].held_bytes)

    def bring(self, model: str) -> AdamW:
        """Return a model's optimizer, which stays in memory until the next call. Others are moved to files to make
        room.

        Raises `EngineFault` if its file is damaged.
        """
        optimizer = self._optimizers[model]
        self._optimizers.move_to_end(model)
        self._make_room(optimizer.full_bytes)
        if offloaded := self._offloaded.get(model):
            try:
                if file_sha256(offloaded.path) != offloaded.seal.sha256:
                    raise EngineFault(
                        f"the optimizer of {model} is lost: {offloaded.path} is damaged; load a checkpoint"
                    )
                optimizer.restore(load_file(offloaded.path))
            except (OSError, SafetensorError) as error:
                raise EngineFault(f"the optimizer of {model} cannot be read from {offloaded.path}: {error}") from error
            del self._offloaded[model]
            offloaded.path.unlink()
        return optimizer

    def _make_room(self, needed: int) -> None:
        *others, _ = self._optimizers
        held = sum(self._optimizers[model].held_bytes for model in others)
        for model in others:
            if needed + held <= self._bytes_max:
                return
            held -= self._put_away(model)

    def _put_away(self, model: str) -> int:
        """Move an optimizer to a file. Returns how many bytes were freed, which is 0 if the file could not be
        written."""
        optimizer = self._optimizers[model]
        tensors = optimizer.state()
        if not tensors:
            return 0
        path = self._folder / f"{sha256(model.encode()).hexdigest()[:32]}.safetensors"
        try:
            seal = write_whole(path, tensors, durable=False)
        except OSError as error:  # keep it in memory: exceeding the limit is better than losing it
            log.warning("the optimizer of %s cannot be written to %s, and stays in memory: %s", model, path, error)
            with suppress(OSError):  # if nothing can be written, this may fail as well
                path.unlink(missing_ok=True)
            return 0
        freed = optimizer.held_bytes
        optimizer.drop()
        self._offloaded[model] = _Offloaded(path, seal)
        return freed
