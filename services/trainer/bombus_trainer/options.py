"""What a trainer process is told when it starts: whose steps it makes, and what its machine can bear."""

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from bombus.config.parts import none_or_at_least
from bombus.hive.subjects import check_name
from bombus.weights.deltas import CHAIN_MAX

OBJECTS_FULL_EVERY = 16


class TrainerOptions(BaseModel):
    """`folder` holds checkpoints and weights; unless these go by objects, replicas must see it under the same path.

    Below `debug_root` jobs may name files of their own (`trainer.save_debug_rollout_data`).
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    engine: str = "main"
    folder: Path
    debug_root: Path | None = None
    device: str = Field(default="cpu", pattern=r"^(cpu|cuda(:\d+)?)$", description="cpu, cuda or cuda:N")
    threads: int = Field(default=0, ge=0, le=1024, description="torch's on the CPU; 0: one for each core")
    bin_tokens_max: int = Field(
        default=0, ge=0, le=1 << 24, description="a micro-batch that fits this machine; 0: on a GPU the job's"
    )
    allow_download: bool = False
    weights_by: Literal["folder", "objects"] = Field(default="folder", description="how weights reach the replicas")
    weights_full_every: int = Field(
        default=0, ge=0, le=CHAIN_MAX, description="versions; deltas in between; 1: no deltas; 0: as suits the way"
    )
    weights_lora: Literal["merged", "adapter"] = Field(default="adapter", description="what travels of a LoRA job")
    operation_timeout_s: float = Field(
        default=1800.0, gt=0.0, le=86_400.0, description="of what several ranks do together"
    )
    retry_s: float = Field(default=1.0, gt=0.0, le=600.0, description="after the first failure of a step")
    presence_s: float = Field(
        default=15.0, gt=0.0, le=3600.0, description="how often a superseded trainer asks for the other, and waits"
    )
    retry_s_max: float = Field(default=30.0, gt=0.0, le=3600.0)

    @property
    def full_every(self) -> int:
        """By a folder hashing a version costs more than reading it, so deltas save nothing unless that is far away."""
        return self.weights_full_every or (1 if self.weights_by == "folder" else OBJECTS_FULL_EVERY)

    @field_validator("bin_tokens_max")
    @classmethod
    def _bins_hold_something(cls, tokens: int) -> int:
        return none_or_at_least(tokens, 16)

    @field_validator("engine")
    @classmethod
    def _engine_is_a_name(cls, engine: str) -> str:
        return check_name(engine, "engine")

    @field_validator("folder")
    @classmethod
    def _folder_is_absolute(cls, folder: Path) -> Path:
        """The log names files in it: they must be found from any working directory."""
        return folder.absolute()
