"""What the swarm routes of one engine share: its state, and how a command is carried out."""

import uuid
from math import inf
from typing import Any

import msgspec
from fastapi import Request
from fastapi.responses import JSONResponse

from bombus.bus import TRACEPARENT
from bombus.errors import BusUnavailable, Code, Refused
from bombus.hive.inbox import AnyAnswer, Message
from bombus.hive.records import digest
from bombus.hive.state import EngineState
from bombus.telemetry import traceparent_of
from bombus_gateway import limits
from bombus_gateway.context import Gateway


class JsonResponse(JSONResponse):
    def render(self, content: Any) -> bytes:
        return msgspec.json.encode(content)


class EngineContext:
    """One engine, as the swarm routes see and command it."""

    def __init__(self, gateway: Gateway, engine: str) -> None:
        self.gateway = gateway
        self.engine = engine

    async def ready(self) -> None:
        """Raise `BusUnavailable` until this gateway has folded the log (R18)."""
        if not self.gateway.ready:
            raise BusUnavailable("this gateway is still reading the log")

    @property
    def state(self) -> EngineState:
        return self.gateway.follower.hive.engines.get(self.engine) or EngineState(name=self.engine)

    async def execute(
        self, request: Request, command: Message, wait_s: float = 0.0, answer_s: float = inf
    ) -> AnyAnswer:
        """Carry out a command. After it, this gateway's own reads show its effect.

        `wait_s` is how long the command itself may wait; its answer must come within `answer_s` and the bus' timeout
        after that.
        """
        traceparent = traceparent_of(request.headers.get(TRACEPARENT, ""))
        try:
            limit_s = wait_s + min(answer_s, self.gateway.settings.bus_timeout_s)
            return await self.gateway.carry_out(command, limit_s, traceparent)
        except (OverflowError, UnicodeError, RecursionError) as error:
            # The encoder raises these: JSON allows numbers, text and depths that the log's format does not.
            raise Refused(Code.MALFORMED, f"The body holds something that cannot be stored: {error}") from error

    def command_id(self, request: Request, kind: str, client: str, body: bytes) -> str:
        """Return the command's id. It follows from an Idempotency-Key: an equal command gets an equal answer (R3)."""
        key = request.headers.get("idempotency-key")
        if not key:
            return uuid.uuid4().hex
        if len(key) > limits.IDEMPOTENCY_KEY_CHARACTERS:
            raise Refused(
                Code.MALFORMED, f"An Idempotency-Key has at most {limits.IDEMPOTENCY_KEY_CHARACTERS} characters."
            )
        head = msgspec.msgpack.encode((self.engine, kind, client, key))
        return f"k-{digest(head + body).hex()}"

    def base_url(self, request: Request) -> str:
        """Return the URL of the OpenAI door at the root, where each key leads to its own engine.

        It has no `/e/<engine>`: AgentJet's client puts its own address, which has that, before the path. Nor has it a
        path key (access.py), because agents have their episode's key.
        """
        origin = self.gateway.settings.public_url.rstrip("/") or f"{request.url.scheme}://{request.url.netloc}"
        return f"{origin}/v1"
