"""The requests that a client sends to a hive, and the parsing of the replies. No I/O."""

import uuid
from collections.abc import Mapping
from typing import Any, TypeGuard

import msgspec

from bombus.sdk.errors import ServerFault, ServerUnreachable, SwarmError, error_for

GENERAL_TIMEOUT_S = 30.0
AWAY = (502, 503, 504)
JSON_HEADERS = {"Content-Type": "application/json"}


class ServerRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request to send. Its result is a `ServerReply` or a `NoReply`."""

    method: str
    path: str
    body: bytes = b""
    headers: dict[str, str] = {}
    timeout_s: float = GENERAL_TIMEOUT_S


class ServerReply(msgspec.Struct, frozen=True, kw_only=True):
    """A server's reply. `url` is the requested URL, including an engine's prefix."""

    status: int
    body: bytes
    url: str = ""
    retry_after_s: float = 0.0


class NoReply(msgspec.Struct, frozen=True):
    """The request got no reply. It may or may not have been carried out."""

    why: str


def posted(path: str, body: Mapping[str, Any], timeout_s: float) -> ServerRequest:
    """Return a POST request with a unique id, by which the server recognises repetitions."""
    headers = JSON_HEADERS | {"Idempotency-Key": uuid.uuid4().hex}
    encoded = msgspec.json.encode(body)
    return ServerRequest(method="POST", path=path, body=encoded, headers=headers, timeout_s=timeout_s)


def object_of(reply: ServerReply) -> dict[str, Any]:
    """Return a reply's JSON object. Raises `ServerFault` if the reply is not a JSON object."""
    try:
        return msgspec.json.decode(reply.body, type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise ServerFault(f"The server's reply is not a JSON object: {error}", "", reply.status) from error


def is_success(reply: ServerReply | NoReply) -> TypeGuard[ServerReply]:
    return isinstance(reply, ServerReply) and reply.status < 400


def is_away(reply: ServerReply | NoReply, error: SwarmError) -> bool:
    """Return whether the server is temporarily unavailable.

    A fault that the hive itself reports has a code: a 500 without a code comes from a proxy, or from a server that is
    shutting down.
    """
    return isinstance(reply, NoReply) or reply.status in AWAY or (reply.status == 500 and not error.code)


def error_of(reply: ServerReply | NoReply, path: str) -> SwarmError:
    if isinstance(reply, NoReply):
        return ServerUnreachable(f"{path}: {reply.why}")
    try:
        body = msgspec.json.decode(reply.body, type=dict[str, Any])
    except msgspec.MsgspecError:
        body = {"detail": reply.body[:300].decode(errors="replace")}
    why, code = body.get("detail", body), str(body.get("code", ""))
    if reply.status == 404 and not code:
        asked = (reply.url or path).partition("?")[0]
        why = f"The server has no {asked} ({why}): is this a hive's address, and does the hive have this engine?"
    return error_for(reply.status, code, why if isinstance(why, str) else str(why))
