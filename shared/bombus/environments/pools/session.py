"""A session at an environment server, one of ours or any other OpenEnv server. A dead session stays dead."""

import asyncio
import contextlib
import json
import logging
from typing import Any, Self
from urllib.parse import urlencode, urlsplit, urlunsplit

import httpx
import msgspec
from pydantic import BaseModel, ConfigDict, Field
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus, InvalidURI

from bombus.environments.kinds import EnvironmentLost, EnvironmentsBusy, ResetFailed
from bombus.environments.openenv.messages import (
    FATAL,
    MESSAGE_BYTES_MAX,
    SESSION_HEADER,
    NotAMessage,
    NotSendable,
    StepResult,
    WireError,
    WireMessage,
    decode,
    encode,
)
from bombus.errors import FOREIGN_TEXT_MAX, BombusError, Code, Refused, in_one_line
from bombus.hive.episodes import reward_number
from bombus.hive.failures import FailureKind
from bombus.machine.certificates import certificates

log = logging.getLogger("bombus")

CLOSE_HANDSHAKE_S = 2.0
DETAILS_MAX = 8  # the most errors shown about one invalid action


class SessionSettings(BaseModel):
    """The time limits of a session, in seconds."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    connect_s: float = Field(default=10, gt=0, le=600, description="seconds to connect, in addition to `wait_s`")
    wait_s: float = Field(default=0, ge=0, le=600, description="seconds to wait for a slot, if the server has a queue")
    step_s: float = Field(default=60, gt=0, le=86_400, description="seconds to wait for the answer to a reset or step")
    take_s: float = Field(default=600, gt=0, le=86_400, description="seconds to wait for an idle environment of a pool")
    silence_s: float = Field(
        default=20, gt=0, le=3600, description="a server that is silent for this long is considered gone"
    )
    idle_s: float = Field(default=1500, gt=0, le=86_400, description="a session unused for this long is abandoned")
    key: str = Field(default="", repr=False, description="the server's key, if it has one")


class StepRefused(BombusError):
    """The server declined one message: its action was invalid, or the environment raised an error. The session
    continues."""

    def __init__(self, code: str, why: str) -> None:
        super().__init__(why)
        self.code = code


class EnvSession:
    """A session, which holds a slot on the server from `open` to `close`.

    It dies if anything leaves its state in doubt: a late answer, a broken connection, or a caller cancelled in the
    middle of a call. The connection is then cut, and every further call raises `EnvironmentLost`. A dead session never
    reconnects, because it would get an environment that was not reset.
    """

    def __init__(self, connection: ClientConnection, url: str, settings: SessionSettings) -> None:
        self.url = url
        self.settings = settings
        self.name: str = connection.response.headers.get(SESSION_HEADER, "")
        self._connection = connection
        self._lock = asyncio.Lock()
        self._action: dict[str, Any] | None = None  # an action's schema, once it has been requested
        self._dead = ""
        self._used_s = asyncio.get_running_loop().time()
        self._rpcs = 0

    @classmethod
    async def open(cls, url: str, settings: SessionSettings | None = None) -> Self:
        """Connect and get a slot. Raises `EnvironmentsBusy`, `EnvironmentLost`, or `Refused` for a malformed URL."""
        settings = settings or SessionSettings()
        target = socket_url(url, settings.wait_s)
        limit_s = settings.connect_s + settings.wait_s
        try:
            connection = await connect(
                target,
                open_timeout=limit_s,
                close_timeout=CLOSE_HANDSHAKE_S,
                ping_interval=settings.silence_s / 2,
                ping_timeout=settings.silence_s / 2,
                max_size=MESSAGE_BYTES_MAX,
                compression=None,
                proxy=None,
                additional_headers=_key_header(settings.key),
            )
        except InvalidStatus as error:
            raise _refusal(url, error.response.status_code, error.response.body or b"") from error
        except InvalidURI as error:
            raise Refused(Code.MALFORMED, f"{url!r} is not the address of a server: {error}") from error
        except (OSError, TimeoutError, InvalidHandshake, EOFError) as error:
            within = f" within {limit_s:g} s" if isinstance(error, TimeoutError) else ""
            why = f"no environment server answers at {url}{within}: {in_one_line(error)}"
            raise EnvironmentLost(why) from error
        session = cls(connection, url, settings)
        if not session.is_ours:
            await session._check_slot()
        return session

    @property
    def is_ours(self) -> bool:
        """Return whether the server is one of ours. Our servers accept a connection only if they have a slot for the
        session."""
        return bool(self.name)

    @property
    def is_dead(self) -> bool:
        return bool(self._why_dead())

    async def reset(self, data: dict[str, Any]) -> StepResult:
        """Reset the environment. Raises `ResetFailed` if that fails, or `EnvironmentLost` if the environment is
        gone."""
        try:
            return await self._observe("reset", data)
        except StepRefused as error:
            raise ResetFailed(f"the environment could not be reset: {error}") from error

    async def step(self, action: dict[str, Any]) -> StepResult:
        """Take a step. Raises `StepRefused` if only this action failed, or `EnvironmentLost` if the environment is
        gone."""
        return await self._observe("step", action)

    async def state(self) -> dict[str, Any]:
        return (await self._ask(WireMessage(type="state"))).data

    async def rpc(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        """Call a JSON-RPC method and return its result. Raises `StepRefused` if the server answers with an error."""
        self._rpcs += 1
        request = {"jsonrpc": "2.0", "id": self._rpcs, "method": method, "params": params}
        found = (await self._ask(WireMessage(type="mcp", data=request))).data
        if (failed := found.get("error")) is not None:
            detail = failed if isinstance(failed, dict) else {"message": failed}
            raise StepRefused(str(detail.get("code", "")), str(detail.get("message"))[:FOREIGN_TEXT_MAX])
        result = found.get("result")
        return result if isinstance(result, dict) else {"result": result}

    async def close(self) -> None:
        """Give the slot back. Closing again does nothing. Wait only briefly for a server that does not answer."""
        was_alive = not self._dead
        self._dead = self._dead or "it was closed"
        if was_alive:
            with contextlib.suppress(ConnectionClosed, TimeoutError):
                async with asyncio.timeout(CLOSE_HANDSHAKE_S):
                    await self._connection.send(encode(WireMessage(type="close")))
        if not self._has_ended:
            await self._connection.close()

    def cut(self) -> None:
        """End the connection immediately, without notifying the server."""
        self._die("it was cut")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # ---- messages -------------------------------------------------------------------------------------------------

    async def _check_slot(self) -> None:
        """Request the state: a full server accepts the connection, and reports only afterwards that it is full."""
        try:
            await self.state()
        except StepRefused:
            pass  # the environment has no state before its reset, but it exists
        except BaseException:  # cut without waiting: there may be another cancellation, and no answer is needed
            self.cut()
            raise

    async def action_schema(self) -> dict[str, Any]:
        """Return an action's JSON schema from the server's `/schema`, or a schema that allows anything."""
        if self._action is None:
            headers = _key_header(self.settings.key)
            http = httpx.AsyncClient(trust_env=False, verify=certificates(False))
            try:
                async with asyncio.timeout(self.settings.connect_s), http:
                    answer = await http.get(_page_url(self.url, "schema"), headers=headers)
                    found = msgspec.json.decode(answer.content, type=dict[str, Any])["action"]
                self._action = _for_models(found)
            except (httpx.HTTPError, TimeoutError, msgspec.MsgspecError, KeyError, TypeError, AttributeError) as error:
                log.info("%s does not describe its actions: %s", self.url, in_one_line(error))
                self._action = {"type": "object", "additionalProperties": True}
        return self._action

    async def _observe(self, kind: str, data: dict[str, Any]) -> StepResult:
        seen = (await self._ask(WireMessage(type=kind, data=data))).data
        try:
            if (reward := seen.get("reward")) is not None:  # OpenEnv allows a bool
                seen = {**seen, "reward": reward_number(reward)}
            return msgspec.convert(seen, StepResult, strict=False)
        except ValueError as error:
            self._die(f"the answer to a {kind} is not an observation: {error}")
            raise EnvironmentLost(self._sentence()) from error

    async def _ask(self, message: WireMessage) -> WireMessage:
        """Send a message and return its answer. Raises `EnvironmentLost`, `EnvironmentsBusy` or `StepRefused`."""
        try:
            text = encode(message)
        except NotSendable as error:
            raise StepRefused(WireError.VALIDATION_ERROR, f"the {message.type} cannot be sent: {error}") from error
        async with self._lock:
            was_dead = bool(self._dead)
            if self._why_dead():
                raise EnvironmentLost(self._sentence()) if was_dead else await self._last_word()
            too_long = f"the answer to a {message.type} took longer than {self.settings.step_s:g} s"
            limit = asyncio.get_running_loop().call_later(self.settings.step_s, self._die, too_long)
            try:
                answer = decode(await self._exchange(text))
            except ConnectionClosed as error:
                self._die(_closed_why(error))
                raise EnvironmentLost(self._sentence()) from error
            except NotAMessage as error:
                self._die(str(error))
                raise EnvironmentLost(self._sentence()) from error
            except BaseException:  # cancelled midway: this message's answer would be taken for the answer to the next
                self._die("a call was cancelled midway")
                raise
            finally:
                limit.cancel()
            self._used_s = asyncio.get_running_loop().time()
            if answer.type == "error":
                raise self._error_of(answer)
            return answer

    async def _last_word(self) -> BombusError:
        """Return the error that the server sent before it closed the connection, or else an `EnvironmentLost`."""
        with contextlib.suppress(ConnectionClosed, NotAMessage):
            said = decode(await self._connection.recv())
            if said.type == "error" and said.data.get("code") in FATAL:
                self._dead = ""
                return self._error_of(said)
        return EnvironmentLost(self._sentence())

    async def _exchange(self, text: str) -> str | bytes:
        # A full server may have closed the connection already; the reason that it sent can still be read.
        with contextlib.suppress(ConnectionClosed):
            await self._connection.send(text)
        received: str | bytes = await self._connection.recv()
        return received

    def _error_of(self, answer: WireMessage) -> BombusError:
        code, why = str(answer.data.get("code", "")), str(answer.data.get("message", ""))[:FOREIGN_TEXT_MAX]
        if code in FATAL:
            self._die(why)
            if code == WireError.CAPACITY_REACHED:
                return EnvironmentsBusy(why)
            named = answer.data.get("failure")
            return EnvironmentLost(self._sentence(), next((kind for kind in FailureKind if kind == named), None))
        return StepRefused(code, "; ".join((why, *_details(answer.data.get("errors")))))

    # ---- closing ----------------------------------------------------------------------------------------------------

    def _why_dead(self) -> str:
        if not self._dead and asyncio.get_running_loop().time() - self._used_s > self.settings.idle_s:
            self._die(f"it was not used for {self.settings.idle_s:g} s, so the server may have given its slot away")
        if not self._dead and self._connection.close_code is not None:
            reason = self._connection.close_reason
            self._die(f"the server closed the connection{f': {reason}' if reason else ''}")
        return self._dead

    def _die(self, why: str) -> None:
        self._dead = self._dead or why
        if not self._has_ended:
            self._connection.transport.abort()

    @property
    def _has_ended(self) -> bool:
        """Return whether the connection has ended. Python 3.11 raises an error if a transport is aborted after its end
        was flushed."""
        has_ended: bool = self._connection.connection_lost_waiter.done()
        return has_ended

    def _sentence(self) -> str:
        return f"the session at {self.url} is lost: {self._dead}; open another one"


def socket_url(url: str, wait_s: float) -> str:
    """Return the WebSocket address of a server. Raises `Refused`."""
    parts = urlsplit(url if "//" in url else f"//{url}")
    scheme = {"http": "ws", "https": "wss", "": "ws"}.get(parts.scheme, parts.scheme)
    if scheme not in ("ws", "wss") or not parts.hostname:
        raise Refused(Code.MALFORMED, f"{url!r} is not an environment server's address: give one like http://host:8000")
    path = parts.path.rstrip("/").removesuffix("/ws")
    query = urlencode({"wait_s": f"{wait_s:g}"}) if wait_s else ""
    return urlunsplit((scheme, parts.netloc, f"{path}/ws", query, ""))


def _for_models(action: dict[str, Any]) -> dict[str, Any]:
    """Return an action's schema as shown to a model: without `metadata`, which is OpenEnv's own field.

    Raises `KeyError` if the schema lists neither properties nor kinds of action.
    """
    if any(isinstance(action.get(kinds), list) for kinds in ("oneOf", "anyOf")):
        return {"type": "object", **action}
    return {**action, "properties": {name: each for name, each in action["properties"].items() if name != "metadata"}}


def _key_header(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}


def _details(errors: object) -> list[str]:
    """Return the errors in a message's fields, which OpenEnv's servers list next to the error message."""
    found = [each for each in errors if isinstance(each, dict)] if isinstance(errors, list) else []
    named = [(".".join(map(str, each.get("loc") or ())), each.get("msg")) for each in found[:DETAILS_MAX]]
    return [(f"{field}: {why}" if field else str(why))[:FOREIGN_TEXT_MAX] for field, why in named]


def _page_url(url: str, page: str) -> str:
    """Return the address of another page on the session's server."""
    return f"http{socket_url(url, 0).removeprefix('ws').removesuffix('/ws')}/{page}"


def _refusal(url: str, status: int, body: bytes) -> BombusError:
    """Return the error for an HTTP status received instead of a session."""
    try:
        why = str(json.loads(body)["detail"])
    except (ValueError, KeyError, TypeError):
        why = body.decode(errors="replace")
    sentence = f"the environment server at {url} answers {status}: {why[:FOREIGN_TEXT_MAX].strip()}"
    return EnvironmentsBusy(sentence) if status == 503 else EnvironmentLost(sentence)


def _closed_why(error: ConnectionClosed) -> str:
    given, who = (error.sent, "this side") if error.rcvd is None else (error.rcvd, "the server")
    if given is None:
        return "the connection broke"
    return f"{who} closed the connection with code {given.code}{f', {given.reason}' if given.reason else ''}"
