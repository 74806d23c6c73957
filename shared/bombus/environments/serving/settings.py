"""The settings of an environment server."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from bombus.config.flags import NoFlag
from bombus.environments.serving.slots import SECOND, SlotSettings

SLOTS_MAX = 1024
WAIT_S_MAX = 600.0


class ServingSettings(BaseModel):
    """The limits of an environment server. Times are in seconds."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    slots: Annotated[int, NoFlag()] = Field(default=1, ge=1, le=SLOTS_MAX, description="environments at once")
    ttl_s: float = Field(
        default=20, ge=0.2, le=3600, description="seconds of silence after which a client loses its slot"
    )
    idle_s: float = Field(
        default=1800, ge=0.2, le=86_400, description="a client that does nothing for this many seconds loses its slot"
    )
    step_s: float = Field(default=600, ge=0.1, le=86_400, description="seconds that a reset, step or score may take")
    close_s: float = Field(
        default=10, ge=0.1, le=600, description="seconds each to close an environment and to clean its backend"
    )
    queue_max: int = Field(default=256, ge=0, le=65_536, description="how many clients may wait for a slot")
    key: Annotated[str, NoFlag()] = Field(default="", repr=False, description="the bearer token that clients send")

    def for_slots(self) -> SlotSettings:
        return SlotSettings(
            slots=self.slots,
            clean_ns=round(2 * self.close_s * SECOND),
            ttl_ns=round(self.ttl_s * SECOND),
            idle_ns=round(self.idle_s * SECOND),
            queue_max=self.queue_max,
        )
