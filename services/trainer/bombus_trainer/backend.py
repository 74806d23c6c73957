"""The interface between the trainer service and its backends: torch or verl's engine, on one or more ranks."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

from bombus.config.job import RunConfig
from bombus.errors import EngineFault
from bombus.hive.events import Canary
from bombus.operations import Operation, Result
from bombus.weights.checkpoints import Checkpoint
from bombus_trainer.data.batch import EpisodeGroup
from bombus_trainer.data.fates import StepAccount
from bombus_trainer.operations.settings import ExecutorSettings
from bombus_trainer.publish.export import ModelPart, Outline, Tensors, WeightsSource
from bombus_trainer.publish.step_checkpoint import StepFacts
from bombus_trainer.settings import TrainerSettings

if TYPE_CHECKING:
    from bombus_trainer.backends.torch.model import PolicyModel
    from bombus_trainer.operations.checkpoints import ModelCheckpoint

T = TypeVar("T")


class Interrupted(Exception):
    """Raised when a step is stopped between two micro-batches. Its gradients, and perhaps some updates, remain."""


class BackendLost(EngineFault):
    """Raised when only a new process can continue: a rank is gone, ranks failed differently, or the device failed."""


class TrainerBackend(Protocol):
    """One model in training. It is not thread-safe: make one call at a time.

    If a step raises, it may already have made some of its updates, so load a new backend or `restore` before the next
    step.
    """

    @property
    def settings(self) -> TrainerSettings: ...

    @property
    def files(self) -> Mapping[str, bytes]:
        """The tokenizer's files, by name."""
        ...

    @property
    def vocab_size(self) -> int: ...

    def train_step(
        self,
        groups: list[EpisodeGroup],
        step: int,
        interrupted: Callable[[], bool] = lambda: False,
        account: Callable[[StepAccount], None] = lambda account: None,
    ) -> dict[str, float]:
        """Train on a batch and return the step's metrics. A batch with nothing to train on changes nothing.

        `account` is called with a record of what became of the batch's tokens. `backends.steps.StepBackend` implements
        this method on top of what each backend computes.

        An update whose loss or gradient is not finite is skipped: parameters and optimizer stay as they are, and the
        metric `updates_left_out` counts the update. Raises `Interrupted` if `interrupted()` is true between two
        micro-batches.
        """
        ...

    def save(self, root: Path, facts: StepFacts) -> Checkpoint[StepFacts]:
        """Write a checkpoint to a folder under `root`. Returns once the checkpoint would survive a power failure."""
        ...

    def restore(self, path: Path, digest: str) -> None:
        """Load the state of a checkpoint.

        Raises `CheckpointLost` if it is missing or damaged, or `EngineFault` if it belongs to another model or backend.
        """
        ...

    def outline(self, part: ModelPart = ModelPart.MODEL) -> Outline: ...

    def canary(self, part: ModelPart = ModelPart.MODEL, source: WeightsSource | None = None) -> Canary | None:
        """Return the canary of the current weights as published with `part`, or None if it cannot be computed. If there
        are several ranks, `source` reads the weights on all of them."""
        ...

    def read_weights(self, use: Callable[[Tensors], T], part: ModelPart = ModelPart.MODEL) -> T:
        """Pass the current weights to `use` as whole tensors, each computed only when `use` reaches it.

        Training is not affected. Parts other than the model exist only with LoRA.
        """
        ...


class OperationBackend(Protocol):
    """Executes operations on training clients' models, which share one base; see
    `operations.executor.OperationExecutor`. Make one call at a time."""

    @property
    def models(self) -> dict[str, int]: ...

    @property
    def base(self) -> "PolicyModel": ...

    def execute(self, model: str, operation: Operation, name: str = "") -> Result: ...

    def save_for_recovery(self, model: str, name: str) -> "ModelCheckpoint": ...

    def recover(self, model: str, name: str, digest: str) -> None: ...

    def rescue(self, model: str, made_by: str, at_least: int) -> int | None: ...

    def fail_gradient(self, model: str, operation: Operation, why: str) -> None: ...

    def clear(self, model: str) -> None: ...

    def drop(self, model: str) -> None: ...

    def release(self) -> None: ...

    def remove_checkpoint(self, checkpoint: str) -> None: ...


BaseLoader = Callable[[RunConfig, ExecutorSettings], OperationBackend]
"""Loads a job's model as the base of training operations. Raises `EngineFault` if this trainer cannot do that."""

Loader = Callable[[RunConfig], TrainerBackend]
"""Loads a job's model at step 0. Raises `EngineFault` if this trainer cannot train it."""
