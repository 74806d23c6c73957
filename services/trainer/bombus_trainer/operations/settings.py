"""The bounds of an executor of operations, and where it writes."""

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from bombus.config.parts import MODELS_MAX_MAX


class ExecutorSettings(BaseModel):
    """`checkpoints` is the folder of what callers save, `recovery` of what this trainer saves to go on after a crash.

    `scratch` is a folder of this process alone, emptied when it starts, for optimizers that are not in memory. Those in
    memory take at most `optimizer_bytes_max`, or as much as the one in use where that is more. Drafts of trainers of a
    later run than `run`, or of a later epoch of it than `trainer_epoch`, are left alone.
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
