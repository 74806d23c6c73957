"""What a gateway is told when it starts. Everything has a limit, a unit and a check."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, field_validator

from bombus.hive.subjects import check_name
from bombus.host.hive_keys import HiveKeys

PositiveInt = Annotated[int, Field(gt=0)]
PositiveFloat = Annotated[float, Field(gt=0)]


class GatewaySettings(BaseModel):
    """`engines` are the doors: the first is served at the root too, each under `/e/<engine>/`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    hive: str = "main"
    bus_url: str = "nats://127.0.0.1:4222"
    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 10086
    reuse_port: bool = False  # several gateways on one host share the port
    public_url: str = ""  # scheme://host:port as clients see it; empty: what the client's own request says
    engines: tuple[str, ...] = ("main",)
    keys: HiveKeys = HiveKeys()

    key_lifetime_s: PositiveFloat = 48 * 3600.0
    body_bytes_max: PositiveInt = 8 << 20
    messages_max: PositiveInt = 4096
    choices_max: PositiveInt = 64
    open_calls_max: PositiveInt = 4096
    calls_fill_max: Annotated[float, Field(gt=0, le=1)] = 0.9  # share of the `calls` stream (R12)
    fill_period_s: PositiveFloat = 2.0
    call_s_max: PositiveFloat = 1800.0
    drain_s: Annotated[float, Field(ge=0, le=600)] = 5.0  # how long a stopping gateway lets open calls finish
    record_s_max: PositiveFloat = 20.0  # for the bus to acknowledge a call's record
    command_s_max: PositiveFloat = 20.0  # for the coordinator to answer a command
    lookup_s_max: PositiveFloat = 10.0
    claim_wait_s: Annotated[float, Field(ge=0, le=25)] = 6.0  # a contract client gives up after 30 s
    replica_wait_s: PositiveFloat = 5.0
    connect_s_max: PositiveFloat = 3.0
    history_bytes_max: PositiveInt = 512 << 20  # of cached conversations: what goes is read from the log again
    strict_model_names: bool = False

    @field_validator("hive")
    @classmethod
    def _hive_is_a_name(cls, hive: str) -> str:
        return check_name(hive, "hive")

    @field_validator("engines")
    @classmethod
    def _engines_are_names(cls, engines: tuple[str, ...]) -> tuple[str, ...]:
        if not engines or len(set(engines)) != len(engines):
            raise ValueError("name at least one engine, and each once")
        for engine in engines:
            check_name(engine, "engine")
        return engines

    @property
    def first_engine(self) -> str:
        return self.engines[0]
