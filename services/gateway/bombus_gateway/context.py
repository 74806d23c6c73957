"""The state that all APIs of a gateway share."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from starlette.requests import Request

from bombus import telemetry
from bombus.bus import Bus
from bombus.bus.follow import Follower
from bombus.errors import BusUnavailable, Code, Refused
from bombus.hive.events import kind_of
from bombus.hive.inbox import AnyAnswer, Message
from bombus.hive.shares import sender_name
from bombus.machine.hive_keys import KeyRing
from bombus.machine.host_names import RawHeaders
from bombus_gateway.access import Access, Guard, KeyHolder
from bombus_gateway.bodies import BodyGate
from bombus_gateway.call.workers import Workers
from bombus_gateway.heartbeats import Heartbeats
from bombus_gateway.keys import Keys
from bombus_gateway.settings import GatewaySettings

log = logging.getLogger(__name__)

POSITION_S = 5.0  # how long to wait until this gateway's fold includes a command's event


@dataclass
class Gateway:
    """The parts that a gateway's APIs share. They are created once, in `service.running`.

    `ready` becomes true when everything that was on the log at startup is folded (R18).
    """

    settings: GatewaySettings
    bus: Bus
    follower: Follower
    keys: Keys
    heartbeats: Heartbeats = field(init=False)
    workers: Workers = field(init=False)
    bodies: BodyGate = field(init=False)
    key_ring: KeyRing = field(init=False)
    clients: Guard = field(init=False)
    control: Guard = field(init=False)
    traces: dict[str, str] = field(default_factory=dict)
    ready: bool = False

    def __post_init__(self) -> None:
        self.heartbeats = Heartbeats(self.bus, lambda: self.ready)
        self.workers = Workers()
        self.key_ring = KeyRing(self.settings.keys)
        ring, public_url = self.key_ring, self.settings.public_url
        self.clients, self.control = (Guard(access, ring, public_url) for access in (Access.CLIENT, Access.CONTROL))
        self.bodies = BodyGate(self.workers, self.settings.body_mb_max << 20)

    async def check_ready(self, _: object = None) -> None:
        """Raise `BusUnavailable` until everything that was on the log at startup is folded (R18). Plain routes can use
        this as their `Check`."""
        if not self.ready:
            raise BusUnavailable("this gateway is still reading the log")

    def key_of(self, request: Request) -> KeyHolder:
        """Return the holder of the key in a request that a guard has accepted."""
        return self.clients.holder(request.scope["headers"])

    def holder_of(self, request: Request) -> str:
        """Return the name of the request's key, or "" if the key has no name or the request has no key. In both cases
        the caller may use everything."""
        return self.key_of(request).name

    def sender_of(self, headers: RawHeaders, address: str = "") -> str:
        """Return how the log names the sender of an accepted request."""
        return sender_name(self.clients.holder(headers).share, self.settings.keys.for_clients, address)

    def operator_of(self, request: Request) -> str:
        """Return how the log names who has sent a request that changes what an engine does."""
        return self.sender_of(request.scope["headers"], request.client.host if request.client else "")

    async def carry_out(self, command: Message, limit_s: float | None = None, traceparent: str = "") -> AnyAnswer:
        """Send a command. Wait until it has been carried out and its effect is visible to this gateway's own reads.

        The answer must arrive within `limit_s`, by default `bus_timeout_s`. Raises `Refused` if the command is refused,
        and `BusUnavailable` if no answer arrives in time.
        """
        limit_s = self.settings.bus_timeout_s if limit_s is None else limit_s
        about: telemetry.Attributes = {"bombus.message": kind_of(command), "bombus.engine": command.engine}
        with telemetry.span("gateway.command", traceparent, about, "SERVER") as span:
            answer = await self.bus.inbox.request(command, limit_s, traceparent=span.traceparent)
        try:
            await self.follower.wait_position(answer.position, POSITION_S)
        except TimeoutError:
            log.warning("a command was carried out, but its event has not arrived yet", extra={"command": command.id})
        return answer

    @property
    def mounts(self) -> list[tuple[str, str]]:
        """The path prefixes, each with the engine that is served there. The first engine is also served at the root."""
        engines = self.settings.engines
        return [("", engines[0]), *((f"/e/{engine}", engine) for engine in engines)]

    def engines_at(self, engine: str, any_engine: bool) -> tuple[str, ...]:
        """Return the engines that an API serves: only its own engine, or all engines if it is at the root."""
        return tuple(self.settings.engines) if any_engine else (engine,)

    def model_names(self, engines: Sequence[str]) -> list[str]:
        """Return the model names of these engines: for each, its job's model and the engine's own name."""
        names: list[str] = []
        for engine in engines:
            state = self.follower.hive.engine(engine)
            job = state.active or state.configured
            names += [*([job.model] if job else []), engine]
        return list(dict.fromkeys(names))

    def check_model_name(self, engines: Sequence[str], name: str) -> None:
        """Raise `Refused` UNKNOWN_MODEL for an unknown name if the settings are strict.

        By default any name is accepted, because many harnesses have a hard-coded name.
        """
        if self.settings.strict_model_names and name not in self.model_names(engines):
            raise Refused(
                Code.UNKNOWN_MODEL,
                f"The model '{name}' does not exist. This API serves {', '.join(self.model_names(engines))}.",
            )
