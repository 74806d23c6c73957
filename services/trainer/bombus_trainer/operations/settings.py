"""The limits of an operation executor, and the folders that it writes to."""

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from bombus.config.parts import MODELS_MAX_MAX


class ExecutorSettings(BaseModel):
    """The limits and folders of an operation executor.

    `checkpoints` is the folder of the callers' checkpoints, and `recovery` the folder of this trainer's recovery
    checkpoints. `scratch` is for optimizers that are not in memory; only this process uses it, and empties it on
    startup. Optimizers in memory take at most `optimizer_bytes_max`, or the size of the optimizer in use if that is
    larger. Drafts written by trainers of a later run than `run`, or of a later epoch of this run than `trainer_epoch`,
    are not removed.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    checkpoints: Path
    recovery: Path
    scratch: Path
    run: int = Field(default=0, ge=0)
    trainer_epoch: int = Field(default=0, ge=0)
    models_max: int = Field(default=MODELS_MAX_MAX, ge=1, le=MODELS_MAX_MAX)
    rank_max: int = Field(default=512, ge=1, le=4096)
    tokens_max: int = Field(default=1 << 22, ge=1, le=1 << 26, description="tokens of one operation")
    targets_max: int = Field(default=1 << 23, ge=1, le=1 << 26, description="targets of one operation, over all tokens")
    optimizer_bytes_max: int = Field(default=8 << 30, ge=0, le=1 << 42)
