"""What the trainer service needs of whatever trains: torch in this process, or verl's engine on one or more ranks."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol, TypeVar

from bombus.config.job import RunConfig
from bombus.errors import EngineFault
from bombus_trainer.data.batch import EpisodeGroup
from bombus_trainer.publish.checkpoint import Facts, Saved
from bombus_trainer.publish.export import ModelPart, Outline, Tensors
from bombus_trainer.settings import TrainerSettings

T = TypeVar("T")


class Interrupted(Exception):
    """The step was told to stop between two micro-batches. It has left gradients and perhaps updates behind."""


class BackendLost(EngineFault):
    """Some rank of the trainer failed where others did not, or is gone: only a new process can go on."""


class TrainerBackend(Protocol):
    """One model in training. Not thread-safe: one call at a time.

    A step that raises may have made some of its updates: load another one, or `restore`, before the next.
    """

    @property
    def settings(self) -> TrainerSettings: ...

    @property
    def files(self) -> Mapping[str, bytes]:
        """The tokenizer's files."""
        ...

    @property
    def vocab_size(self) -> int: ...

    def train_step(
        self, groups: list[EpisodeGroup], step: int, interrupted: Callable[[], bool] = lambda: False
    ) -> dict[str, float]:
        """Train on a batch and return the step's metrics; a batch without any signal changes nothing.

        Raises `EngineFault` on a loss or gradient that is not finite (nothing is updated by it), `Interrupted` when
        `interrupted()` says so between two micro-batches.
        """
        ...

    def save(self, root: Path, facts: Facts) -> Saved:
        """Write a checkpoint below `root`, and return only when it would survive a power cut."""
        ...

    def restore(self, path: Path, digest: str) -> None:
        """Go on from a checkpoint. Raises `EngineFault` when it is damaged, or of another model or backend."""
        ...

    def outline(self, part: ModelPart = ModelPart.MODEL) -> Outline: ...

    def read_weights(self, use: Callable[[Tensors], T], part: ModelPart = ModelPart.MODEL) -> T:
        """Hand the model as it is now to `use`: whole tensors, each made when its turn comes. Training is not
        disturbed. Parts other than the model are those of LoRA."""
        ...


Loader = Callable[[RunConfig], TrainerBackend]
"""Makes a job's model ready at step 0. Raises `EngineFault` for what this trainer cannot do."""
