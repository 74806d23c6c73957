"""The settings of a gateway. Each is declared once: `cli` generates the command line from these fields."""

from typing import Annotated

from pydantic import Field, field_validator

from bombus.config.flags import Flag, NoFlag, name_of
from bombus.config.parts import EngineName, GatewayOptions, HiveName, MetricsOptions
from bombus.machine.hive_keys import HiveKeys

DAY_S = 86_400.0


class GatewaySettings(GatewayOptions, MetricsOptions):
    """Each of `engines` is served under `/e/<engine>/`, and the first one also at the root.

    A gateway that shares its port needs one of its own for metrics, since a request reaches any of those that share it.
    """

    hive: Annotated[HiveName, Flag(declared_elsewhere=True)] = "main"
    bus_url: Annotated[str, Flag(name="--nats", declared_elsewhere=True)] = "nats://127.0.0.1:4222"
    keys: Annotated[HiveKeys, NoFlag()] = HiveKeys()

    reuse_port: bool = Field(default=False, description="share the port with other gateways on this host")
    engines: Annotated[
        tuple[EngineName, ...], Flag(name="--engine", metavar="NAME", default="main", read=name_of("engine"))
    ] = Field(
        default=("main",),
        description="may be given several times: each has its own routes; the first one's are also at the root",
    )
    public_url: Annotated[str, Flag(metavar="URL", default="the address that a client's request names")] = Field(
        default="", description="behind a proxy: scheme://host:port as clients see it"
    )
    strict_model_names: bool = Field(
        default=False, description="refuse calls for a model that is neither the job's nor the engine's name"
    )

    key_lifetime_s: Annotated[float, Flag(name="--key-lifetime", metavar="SECONDS")] = Field(
        default=2 * DAY_S, gt=0, le=365 * DAY_S, description="how long an episode's key is valid"
    )
    claim_wait_s: Annotated[float, Flag(name="--claim-wait", metavar="SECONDS")] = Field(
        default=6.0, ge=0, le=25, description="how long /claim_episode waits for a free place; clients give up after 30"
    )
    call_timeout_s: Annotated[float, Flag(name="--call-timeout", metavar="SECONDS")] = Field(
        default=1800.0, gt=0, le=DAY_S, description="how long a model call may take"
    )
    bus_timeout_s: Annotated[float, Flag(name="--bus-timeout", metavar="SECONDS")] = Field(
        default=20.0,
        gt=0,
        le=600,
        description="how long the log may take to acknowledge a record, and the coordinator to answer a command",
    )
    drain_s: Annotated[float, Flag(name="--drain-timeout", metavar="SECONDS")] = Field(
        default=5.0, ge=0, le=600, description="how long open calls may continue when the gateway is stopped"
    )

    open_calls_max: Annotated[int, Flag(name="--open-calls")] = Field(
        default=4096, ge=1, le=1 << 20, description="how many model calls may be open at a time; others get a 503"
    )
    body_mb_max: Annotated[int, Flag(name="--body-mb", metavar="MB")] = Field(
        default=8, ge=1, le=1024, description="the largest body of a model call, in MiB"
    )
    bodies_mb_max: Annotated[int, Flag(name="--bodies-mb", metavar="MB")] = Field(
        default=1024,
        ge=1,
        le=1 << 20,
        description="memory for the bodies of all requests in progress, in MiB; once it is used up, each key still "
        "gets its share, and requests beyond that get a 503",
    )
    episode_mb_max: Annotated[int, Flag(name="--episode-mb", metavar="MB")] = Field(
        default=256, ge=1, le=1 << 20, description="space that the calls of one episode may take in the log, in MiB"
    )
    history_mb_max: Annotated[int, Flag(name="--history-mb", metavar="MB")] = Field(
        default=512,
        ge=0,
        le=1 << 20,
        description="memory for conversations, in MiB; those that do not fit are re-read from the log",
    )
    log_fill_max: Annotated[float, Flag(name="--call-log-fill", metavar="SHARE")] = Field(
        default=0.9, gt=0, le=1, description="how full the log of calls may be before calls get a 503"
    )

    @field_validator("engines")
    @classmethod
    def _engines_are_named_once(cls, engines: tuple[str, ...]) -> tuple[str, ...]:
        if not engines or len(set(engines)) != len(engines):
            raise ValueError("name at least one engine, and each once")
        return engines
