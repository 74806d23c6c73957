"""What an engine's swarm routes share: the engine's state, and a way to carry out commands."""

import uuid
from collections.abc import Iterable
from contextlib import suppress
from math import inf

import msgspec
from fastapi import Request

from bombus.bus import TRACEPARENT
from bombus.errors import Code, Refused
from bombus.hive.inbox import AnyAnswer, Message
from bombus.hive.records import digest
from bombus.hive.state import EngineState
from bombus.telemetry import traceparent_of
from bombus_gateway import limits
from bombus_gateway.bodies import SWARM, BodyLimits
from bombus_gateway.context import Gateway
from bombus_gateway.swarm.bodies import B, parse

EPISODE_CATCH_UP_S = 1.0  # how long to wait for the event of an episode just claimed through another gateway


class EngineContext:
    """The state of one engine, and a way to send it commands, for the swarm routes."""

    def __init__(self, gateway: Gateway, engine: str) -> None:
        self.gateway = gateway
        self.engine = engine

    async def read(self, request: Request, model: type[B], bounds: BodyLimits = SWARM) -> tuple[bytes, B]:
        """Return a request's body, both as bytes and as `model`. Raises `Refused`, naming the fields that are wrong."""
        return await self.gateway.bodies.read(request, bounds, lambda raw: (raw, parse(model, raw)))

    @property
    def state(self) -> EngineState:
        return self.gateway.follower.hive.engines.get(self.engine) or EngineState(name=self.engine)

    async def execute(
        self, request: Request, command: Message, wait_s: float = 0.0, answer_s: float = inf
    ) -> AnyAnswer:
        """Carry out a command. When this returns, the command's effect is visible to this gateway's own reads.

        `wait_s` is how long the command itself may wait. Its answer must arrive within `answer_s` after that, or within
        the bus's timeout if that is shorter.
        """
        traceparent = traceparent_of(request.headers.get(TRACEPARENT, ""))
        try:
            limit_s = wait_s + min(answer_s, self.gateway.settings.bus_timeout_s)
            return await self.gateway.carry_out(command, limit_s, traceparent)
        except (OverflowError, UnicodeError, RecursionError) as error:
            # Raised by the encoder: JSON allows numbers, text and depths that the log's format does not.
            raise Refused(Code.MALFORMED, f"The body contains a value that cannot be stored: {error}") from error

    def command_id(self, request: Request, kind: str, client: str, body: bytes) -> str:
        """Return the command's id. It is derived from the Idempotency-Key, if any, so equal commands get equal answers
        (R3)."""
        key = request.headers.get("idempotency-key")
        if not key:
            return uuid.uuid4().hex
        if len(key) > limits.IDEMPOTENCY_KEY_CHARACTERS:
            raise Refused(
                Code.MALFORMED, f"An Idempotency-Key may have at most {limits.IDEMPOTENCY_KEY_CHARACTERS} characters."
            )
        head = msgspec.msgpack.encode((self.engine, kind, client, key))
        return f"k-{digest(head + body).hex()}"

    def base_url(self, request: Request) -> str:
        """Return the URL of the OpenAI API at the root, where the key determines the engine.

        The URL does not contain `/e/<engine>`, because AgentJet's client puts its own address, which contains it,
        before the path. Nor does the URL contain a path key (access.py), because agents use their episode's key.
        """
        origin = self.gateway.settings.public_url.rstrip("/") or f"{request.url.scheme}://{request.url.netloc}"
        return f"{origin}/v1"

    def key_expires_ns(self, claimed_ns: int) -> int:
        """Return when the keys of a claim expire, in nanoseconds since the epoch."""
        return claimed_ns + int(self.gateway.settings.key_lifetime_s * 1e9)

    def access(self, request: Request, engine: str, run: int, episode: str, expires_ns: int) -> dict[str, str]:
        """Return a claimed episode's id, including its secret, and the base URL and key that its agent needs."""
        return {
            "episode_uuid": self.gateway.keys.claimed_id(episode),
            "openai_base_url": self.base_url(request),
            "openai_api_key": self.gateway.keys.sign(engine, run, episode, expires_ns),
        }

    async def held(self, client: str, claimed_ids: Iterable[str]) -> dict[str, str]:
        """Return those of these ids that belong to the client's open episodes, each with the episode's name on the
        log."""
        names: dict[str, str] = {}
        for claimed_id in claimed_ids:
            with suppress(Refused):
                names[claimed_id] = self.gateway.keys.episode_of(claimed_id)
        if names:
            await self._until_known(list(names.values())[-1])
        state = self.state
        return {
            claimed_id: episode
            for claimed_id, episode in names.items()
            if state.rolling and episode in state.open and state.open[episode].client == client
        }

    async def _until_known(self, episode: str) -> None:
        """Wait up to `EPISODE_CATCH_UP_S` for an episode of this run that this gateway does not know yet."""
        state = self.state
        if episode in state.open or state.is_over(episode):
            return
        try:
            await self.gateway.follower.wait_for(lambda _: episode in self.state.open, EPISODE_CATCH_UP_S)
        except TimeoutError:
            pass  # then the episode is not open
