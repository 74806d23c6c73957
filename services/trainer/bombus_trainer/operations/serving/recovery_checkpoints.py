"""Recovery checkpoints: checkpoints of models that only trainers use, to continue after a trainer has ended (R17)."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from bombus.errors import EngineFault, Refused
from bombus.hive.events import ModelCheckpointed
from bombus.weights.checkpoints import CheckpointLost
from bombus_trainer.backend import OperationBackend
from bombus_trainer.publish.directories import remove_others

OPERATIONS_MAX = 1000  # limit per model between two recovery checkpoints
SHARE = 10.0  # writing a model's recovery checkpoints takes at most 1 / SHARE of the time between them


@dataclass
class CheckpointClock:
    """Determines when a model's next recovery checkpoint is due.

    `number` is the last operation that may have changed the model, and `checkpointed` the last one in its checkpoint.
    `bytes` is the total size of the operation bodies since that checkpoint, and `since_s` the time when the first of
    these operations was executed.
    """

    number: int
    checkpointed: int
    bytes: int = 0
    since_s: float = 0.0
    wrote_s: float = 0.0  # how long its last recovery checkpoint took to write
    at_once: bool = False

    def note(self, number: int, size: int, now_s: float, at_once: bool) -> None:
        """Record an operation that may have changed the model. `at_once` means that it may not be repeatable later."""
        if self.number <= self.checkpointed:
            self.since_s = now_s
        self.number, self.bytes = number, self.bytes + size
        self.at_once = self.at_once or at_once

    def wrote(self, took_s: float) -> None:
        """Record that a recovery checkpoint with all operations so far was written."""
        self.checkpointed, self.bytes, self.wrote_s, self.at_once = self.number, 0, took_s, False

    def due_s(self, every_s: float, bytes_max: int) -> float | None:
        """Return when the next recovery checkpoint is due, or None if the last one includes all operations."""
        if self.number <= self.checkpointed:
            return None
        if self.at_once or self.bytes >= bytes_max or self.number - self.checkpointed >= OPERATIONS_MAX:
            return 0.0
        return self.since_s + max(every_s, SHARE * self.wrote_s)


class RecoveryCheckpoints:
    """The recovery checkpoints of one run, for the trainer of one epoch. The run's executor writes them to `root`."""

    def __init__(self, root: Path, trainer_epoch: int) -> None:
        self._root = root
        self._epoch = trainer_epoch
        self._count = 0

    def write(self, executor: OperationBackend, model: str, number: int) -> tuple[str, str]:
        """Write a recovery checkpoint of a model after operation `number`. Returns its folder and digest once it is
        durable."""
        self._count += 1
        saved = executor.save_for_recovery(model, f"cover-{number}-epoch-{self._epoch}-{self._count}")
        return str(saved.path), saved.digest

    def load(self, executor: OperationBackend, model: str, checkpoint: ModelCheckpointed) -> None:
        """Rebuild a model from its recovery checkpoint. Raises `EngineFault` if the checkpoint is gone or was
        changed."""
        path = Path(checkpoint.folder)
        try:
            executor.recover(model, path.name, checkpoint.digest)
        except (CheckpointLost, OSError, Refused) as error:
            raise EngineFault(
                f"model {model} cannot continue from its recovery checkpoint at {path} ({error}): bring it back; "
                "loading is retried from time to time, and when a suspended run is resumed"
            ) from error

    def remove_others(self, named: Iterable[str]) -> None:
        """Remove all recovery checkpoints except the `named` folders and those written by later trainers."""
        kept = [Path(path) for path in named]
        for folder in self._root.glob("*/*"):
            remove_others(folder, [path.name for path in kept if path.parent == folder], self._epoch)
