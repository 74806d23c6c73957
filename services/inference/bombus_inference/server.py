"""`/generate`, `/adapters`, `/health` and `/metrics` as a plain ASGI app, since a router would cost more than a call.

`GatewaysOnly` checks the key before requests reach the app. Only `/health` needs no key, and it only says whether
weights are served.

`POST /adapters` takes `{"address": ..., "folder": ...}`: the SHA-256 of an adapter's `adapter_model.safetensors` in
hex, and a folder that this replica can read. The request may be repeated. `GET /adapters` lists the loaded adapters,
and `DELETE /adapters/ADDRESS` unloads one.
"""

import asyncio
import hmac
import logging
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

import msgspec
from prometheus_client import Metric

from bombus import telemetry
from bombus.errors import STATUS, Code, Refused
from bombus.hive.decoding import decoded
from bombus.hive.generation import CONTENT_TYPE, Fault, Generate, decode_request, encode_frame
from bombus.machine.host_names import AsgiApp, AsgiMessage, AsgiReceive, AsgiSend
from bombus.machine.metrics import CONTENT_TYPE as METRICS_TYPE
from bombus.machine.metrics import exposition, family
from bombus_inference.backends.protocol import Deliver, Delivery, InferenceBackend
from bombus_inference.settings import ServerSettings

log = logging.getLogger(__name__)

MakeBackend = Callable[[Deliver], InferenceBackend]

BODY_BYTES_MAX = 16 << 20
ADAPTERS = "/adapters"
PATH_CHARS_MAX = 4096
FRAMES_TYPE = (b"content-type", CONTENT_TYPE.encode())
HELP = {
    "run": "The number of the run whose weights are served.",
    "policy_version": "The version of the weights that are served, -1 without weights.",
    "requests_open": "Requests that are open.",
    "requests_served_total": "Requests that were answered with tokens.",
    "requests_refused_total": "Requests that were answered with a fault.",
    "running": "Sequences that are being generated.",
    "waiting": "Sequences that wait for room.",
    "kv_cache_usage_ratio": "The share of the memory for keys and values that is in use.",
    "prefix_hit_ratio": "The share of the tokens looked up in vLLM's prefix cache that were there.",
    "prefix_queried_tokens_total": "Tokens looked up in vLLM's prefix cache.",
    "prefill_tokens_total": "Tokens of prompts that were computed.",
    "decode_tokens_total": "Tokens that were generated.",
    "cached_tokens_total": "Tokens of prompts that were in the prefix cache.",
    "preemptions_total": "Sequences that made room for others, to be computed again.",
    "steps_total": "Passes through the model.",
    "swaps_total": "Changes of weights.",
    "engine_starts_total": "Starts of vLLM's server.",
    "blocks": "Blocks of the memory for keys and values.",
    "blocks_held": "Blocks that are in use.",
    "adapters": "LoRA adapters that are loaded.",
    "adapter_bytes": "The size of these adapters.",
    "adapter_evictions_total": "Adapters that made room for others.",
}


def families_of(engine: str, values: Mapping[str, float]) -> list[Metric]:
    """Return the values of `HELP` that are known, as metrics."""
    found = {name: [((engine,), values[name])] for name in HELP if name in values}
    return [family(f"bombus_inference_{name}", HELP[name], ("engine",), known) for name, known in found.items()]


class ClientDisconnected(Exception):
    """The client closed the connection."""


class _BodyTooLarge(Exception):
    pass


class AdapterPlace(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where an adapter is: its address, and a folder in peft's layout."""

    address: str
    folder: str


_places = msgspec.json.Decoder(AdapterPlace)


class _Reply:
    """The deliveries of one request that have not been sent yet."""

    __slots__ = ("_chunks", "_disconnected", "_waiter", "done", "fault")

    def __init__(self) -> None:
        self.done = False
        self.fault: Fault | None = None
        self._chunks: list[bytes] = []
        self._disconnected = False
        self._waiter: asyncio.Future[None] | None = None

    def put(self, delivery: Delivery) -> None:
        self._chunks.append(delivery.body)
        self.done = delivery.done
        self.fault = delivery.fault
        self._wake()

    def disconnect(self) -> None:
        self._disconnected = True
        self._wake()

    async def take(self, until_done: bool) -> bytes:
        """Wait for the next delivery, or for the last one if `until_done`, and return all deliveries not yet taken.

        Raises `ClientDisconnected` if the client disconnects before that.
        """
        while not (self.done if until_done else self._chunks):
            if self._disconnected:
                raise ClientDisconnected
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        body = b"".join(self._chunks)
        self._chunks.clear()
        return body

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class App:
    """Serves one backend over HTTP. `make` creates the backend, given a callback for its deliveries."""

    def __init__(self, settings: ServerSettings, engine: str, replica: str, make: MakeBackend) -> None:
        self.settings = settings
        self.engine = engine
        self.replica = replica
        self.backend = make(self._deliver)
        self.refused = 0
        self.served = 0
        self._open: dict[int, _Reply] = {}
        self._next_ticket = 1

    @property
    def open_requests(self) -> int:
        return len(self._open)

    async def close(self) -> None:
        """End the backend. Requests that are still open are answered with a fault."""
        await self.backend.stop()

    async def __call__(self, scope: AsgiMessage, receive: AsgiReceive, send: AsgiSend) -> None:
        if scope["type"] != "http":
            return
        match scope["method"], scope["path"]:
            case "POST", "/generate":
                await self._generate(receive, send)
            case "GET", "/health":
                serves = self.backend.version >= 0
                health = b'{"status": "ok"}' if serves else b'{"status": "no weights"}'
                await _respond(send, 200 if serves else 503, b"application/json", health)
            case "GET", "/metrics":
                await _respond(send, 200, METRICS_TYPE.encode(), await self._metrics())
            case "POST", "/adapters":
                await self._answer_json(send, self._load_adapter(receive))
            case "GET", "/adapters":
                await self._answer_json(send, self._list_adapters())
            case "DELETE", path if path.startswith(f"{ADAPTERS}/"):
                await self._answer_json(send, self._unload_adapter(path.removeprefix(f"{ADAPTERS}/")))
            case _:
                known = (
                    b"POST /generate, GET /adapters, POST /adapters, DELETE /adapters/ADDRESS, GET /health, "
                    b"GET /metrics\n"
                )
                await _respond(send, 404, b"text/plain", known)

    def _deliver(self, deliveries: list[Delivery]) -> None:
        for delivery in deliveries:
            reply = self._open.get(delivery.ticket)
            if reply is not None:  # None if the client has disconnected
                reply.put(delivery)

    async def _generate(self, receive: AsgiReceive, send: AsgiSend) -> None:
        try:
            request = await self._read_request(receive)
        except ClientDisconnected:
            return
        if isinstance(request, Fault):
            self.refused += 1
            await _refuse(send, request)
            return
        ticket = self._next_ticket
        self._next_ticket += 1
        reply = self._open[ticket] = _Reply()
        watch = asyncio.ensure_future(_watch(receive, reply))
        self.backend.add(ticket, request)
        try:
            parent = telemetry.traceparent_of(request.traceparent)
            about = self._about(request) if telemetry.enabled() else None
            with telemetry.span("inference.generate", parent, about, "SERVER"):
                await self._send_frames(reply, request.stream, send)
        except ClientDisconnected:
            log.debug("a client disconnected", extra={"call": request.id})
        finally:
            watch.cancel()
            del self._open[ticket]
            if not reply.done:
                self.backend.abort(ticket)

    def _about(self, request: Generate) -> telemetry.Attributes:
        """Return what the span of a request tells."""
        return {
            **telemetry.gen_ai("text_completion", request.episode),
            "bombus.engine": self.engine,
            "gen_ai.response.id": request.id,
            "gen_ai.usage.input_tokens": len(request.prompt) // 4,
            "gen_ai.request.max_tokens": request.sampling.max_tokens,
            "gen_ai.request.temperature": request.sampling.temperature,
            "bombus.policy_version": self.backend.version,
            "bombus.replica": self.replica,
        }

    async def _read_request(self, receive: AsgiReceive) -> Generate | Fault:
        try:
            request = decode_request(await self._body(receive))
        except _BodyTooLarge:
            why = f"the request is over {BODY_BYTES_MAX} bytes"
            return Fault(why=why, code=Code.TOO_LARGE)
        except msgspec.MsgspecError as error:
            return Fault(why=f"the body is not a msgpack Generate: {error}", code=Code.MALFORMED)
        if request.engine != self.engine:
            why = f"this replica serves engine {self.engine!r}, not {request.engine!r}"
            return Fault(why=why, code=Code.NO_REPLICA, retry=True)
        if self.open_requests >= self.settings.requests_max:
            why = f"{self.open_requests} requests are open here already"
            return Fault(why=why, code=Code.OVERLOADED, retry=True)
        return request

    async def _body(self, receive: AsgiReceive) -> bytes:
        chunks: list[bytes] = []
        size = 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnected
            chunk = message.get("body", b"")
            size += len(chunk)
            if size > BODY_BYTES_MAX:
                raise _BodyTooLarge
            chunks.append(chunk)
            if not message.get("more_body", False):
                return b"".join(chunks)

    async def _send_frames(self, reply: _Reply, stream: bool, send: AsgiSend) -> None:
        """Send frames as they arrive. The headers go with the first frame, so that a refusal gets its own status."""
        body = await reply.take(until_done=not stream)
        if reply.fault is not None:
            self.refused += 1
            await _refuse(send, reply.fault)
            return
        self.served += 1
        if reply.done:
            await _respond(send, 200, FRAMES_TYPE[1], body)
            return
        await send({"type": "http.response.start", "status": 200, "headers": [FRAMES_TYPE]})
        while True:
            done = reply.done
            await send({"type": "http.response.body", "body": body, "more_body": not done})
            if done:
                return
            body = await reply.take(until_done=False)

    async def _answer_json(self, send: AsgiSend, answering: Awaitable[object]) -> None:
        """Answer with the result as JSON, or with the code and reason of a refusal."""
        try:
            answer = await answering
        except ClientDisconnected:
            return
        except Refused as refused:
            await _tell(send, refused)
            return
        await _respond(send, 200, b"application/json", msgspec.json.encode(answer))

    async def _load_adapter(self, receive: AsgiReceive) -> object:
        try:
            place = decoded(_places.decode, await self._body(receive))
        except _BodyTooLarge:
            raise Refused(Code.TOO_LARGE, f"the request is over {BODY_BYTES_MAX} bytes") from None
        except msgspec.MsgspecError as error:
            raise Refused(Code.MALFORMED, f'the body is not {{"address": ..., "folder": ...}}: {error}') from error
        folder = Path(place.folder)
        if not folder.is_absolute() or len(place.folder) > PATH_CHARS_MAX or "\0" in place.folder:
            raise Refused(Code.MALFORMED, f"folder is {place.folder[:200]!r}; it must be the full path of a folder")
        new = await self.backend.load_adapter(place.address, folder)
        return {"address": place.address, "new": new}

    async def _list_adapters(self) -> object:
        return {"adapters": await self.backend.adapters()}

    async def _unload_adapter(self, address: str) -> object:
        await self.backend.unload_adapter(address)
        return {"address": address}

    async def _metrics(self) -> bytes:
        """Return the metrics in Prometheus' text format."""
        values = {
            "run": self.backend.run,
            "policy_version": self.backend.version,
            "requests_open": self.open_requests,
            "requests_served_total": self.served,
            "requests_refused_total": self.refused,
            **await self.backend.metrics(),
        }
        return exposition(families_of(self.engine, values))


class GatewaysOnly:
    """ASGI middleware for a replica: admits only requests that carry the hive's replica key, and none from web pages.

    All requests must come through gateways, because only gateways record them and keep clients' adapters apart.
    """

    def __init__(self, app: AsgiApp, key: str) -> None:
        self._app = app
        self._authorization = f"Bearer {key}".encode()

    async def __call__(self, scope: AsgiMessage, receive: AsgiReceive, send: AsgiSend) -> None:
        refusal = self._refusal(scope) if scope["type"] == "http" else None
        if refusal is None:
            await self._app(scope, receive, send)
        else:
            await _tell(send, refusal)

    def _refusal(self, scope: AsgiMessage) -> Refused | None:
        given: bytes | None = None
        for name, value in scope["headers"]:
            if name == b"authorization":
                given = value
            elif name == b"origin":  # sent by browsers, never by gateways
                return Refused(Code.BAD_KEY, "A web page may not use a replica.")
        if scope["path"] == "/health" or hmac.compare_digest(given or b"", self._authorization):
            return None
        found = "no key was sent" if given is None else "another key was sent"
        return Refused(
            Code.BAD_KEY,
            f"This replica answers only the gateways of its hive: it needs the hive's key for replicas, but {found}. "
            "Sample through a gateway. An operator gets the key with `bombus inference --show-key` and sends it as "
            "`Authorization: Bearer <key>`.",
        )


async def _watch(receive: AsgiReceive, reply: _Reply) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    reply.disconnect()


async def _refuse(send: AsgiSend, fault: Fault) -> None:
    status = STATUS.get(Code(fault.code), 500)
    await _respond(send, status, FRAMES_TYPE[1], encode_frame(fault))


async def _tell(send: AsgiSend, refused: Refused) -> None:
    body = msgspec.json.encode({"code": refused.code, "why": refused.why})
    await _respond(send, refused.status, b"application/json", body)


async def _respond(send: AsgiSend, status: int, content_type: bytes, body: bytes) -> None:
    headers = [(b"content-type", content_type), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
