"""What the routes of one engine's swarm door share: its state, and how a command is carried out."""

import logging
import uuid
from math import inf
from typing import Any

import msgspec
from fastapi import Request, Response

from bombus.bus import TRACEPARENT
from bombus.errors import BusUnavailable, Code, Refused
from bombus.hive.inbox import AnyAnswer, Message
from bombus.hive.records import digest
from bombus.hive.state import EngineState
from bombus_gateway.context import Gateway

log = logging.getLogger(__name__)

POSITION_S = 5.0
KEY_CHARACTERS_MAX = 256
TRACEPARENT_CHARACTERS_MAX = 100


class Json(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return msgspec.json.encode(content)


class Desk:
    """One engine as a gateway sees it."""

    def __init__(self, gateway: Gateway, engine: str) -> None:
        self.gateway = gateway
        self.engine = engine

    async def ready(self) -> None:
        """Raises `BusUnavailable` until this gateway has folded the log (R18)."""
        if not self.gateway.ready:
            raise BusUnavailable("this gateway is still reading the log")

    @property
    def state(self) -> EngineState:
        return self.gateway.follower.hive.engines.get(self.engine) or EngineState(name=self.engine)

    async def ask(self, request: Request, message: Message, timeout_s: float = inf) -> AnyAnswer:
        """Carry out a command; afterwards this gateway's own reads show it."""
        traceparent = request.headers.get(TRACEPARENT, "")
        if len(traceparent) > TRACEPARENT_CHARACTERS_MAX or not traceparent.isascii():
            traceparent = ""
        try:
            limit_s = min(timeout_s, self.gateway.settings.command_s_max)
            answer = await self.gateway.bus.inbox.request(message, limit_s, traceparent=traceparent)
        except (OverflowError, UnicodeError, RecursionError) as error:
            # From the encoder: JSON allows numbers, text and depths that the log's format does not.
            raise Refused(Code.MALFORMED, f"The body holds something that cannot be stored: {error}") from error
        try:
            await self.gateway.follower.wait_position(answer.position, POSITION_S)
        except TimeoutError:
            log.warning("a command was carried out, but its event has not come back yet", extra={"command": message.id})
        return answer

    def command_id(self, request: Request, kind: str, client: str, body: bytes) -> str:
        """The sender's id when it gave an Idempotency-Key: then the same command gets the same answer (R3)."""
        key = request.headers.get("idempotency-key")
        if not key:
            return uuid.uuid4().hex
        if len(key) > KEY_CHARACTERS_MAX:
            raise Refused(Code.MALFORMED, f"An Idempotency-Key has at most {KEY_CHARACTERS_MAX} characters.")
        head = msgspec.msgpack.encode((self.engine, kind, client, key))
        return f"k-{digest(head + body).hex()}"

    def base_url(self, request: Request) -> str:
        """Where the engine's OpenAI door is. Clients keep the path and put their own server's address before it.

        Without a path key (access.py): agents have their episode's. A client whose address has one puts it there again.
        """
        origin = self.gateway.settings.public_url.rstrip("/") or f"{request.url.scheme}://{request.url.netloc}"
        return f"{origin}{request.url.path.rpartition('/')[0]}/v1"
