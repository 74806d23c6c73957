"""OpenEnv's messages on a WebSocket: one request at a time, each with one answer.

`Rpc` also includes the JSON-RPC methods that our servers add; other servers answer them with an error.
"""

import json
from enum import StrEnum
from typing import Any

import msgspec

from bombus.errors import in_one_line
from bombus.hive.failures import FailureKind

MESSAGE_BYTES_MAX = 16 << 20  # large because an observation may contain an image
SESSION_HEADER = "x-bombus-session"  # in the handshake's response, if the server is ours and the session has a slot


class WireError(StrEnum):
    """The codes in error messages."""

    INVALID_JSON = "INVALID_JSON"
    UNKNOWN_TYPE = "UNKNOWN_TYPE"
    VALIDATION_ERROR = "VALIDATION_ERROR"
    EXECUTION_ERROR = "EXECUTION_ERROR"
    CAPACITY_REACHED = "CAPACITY_REACHED"
    FACTORY_ERROR = "FACTORY_ERROR"
    SESSION_ERROR = "SESSION_ERROR"


# After any of these errors, a session cannot be used.
FATAL = frozenset({WireError.CAPACITY_REACHED, WireError.FACTORY_ERROR, WireError.SESSION_ERROR})


class Rpc(StrEnum):
    """The methods of `mcp` messages."""

    LIST_TOOLS = "tools/list"
    CALL_TOOL = "tools/call"
    IS_OVER = "bombus/is_over"
    SCORE = "bombus/score"


class SessionRpc(StrEnum):
    """The methods of `POST /mcp` with which a client opens and closes a session."""

    CREATE = "openenv/session/create"
    CLOSE = "openenv/session/close"


class RpcError:
    """The JSON-RPC error codes that are used here."""

    PARSE = -32700
    SERVER = -32000
    INVALID_REQUEST = -32600
    METHOD_NOT_FOUND = -32601
    INVALID_PARAMS = -32602
    INTERNAL = -32603


class CloseCode:
    """The reasons why a server closes a WebSocket."""

    BROKEN = 4500
    LAPSED = 4408


class WireMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A message in either direction."""

    type: str
    data: dict[str, Any] = {}


class StepResult(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a reset or a step: the observation, its reward, and whether the episode is done."""

    observation: dict[str, Any] = {}
    reward: float | None = None
    done: bool = False
    metadata: dict[str, Any] = {}


class RpcRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A JSON-RPC request. Its answer repeats `id`."""

    id: str | int | float | None = None
    method: str
    params: dict[str, Any] = {}


class NotARequest(ValueError):
    """These bytes are not a JSON-RPC request. `code` is the error code for the answer."""

    def __init__(self, code: int, why: str) -> None:
        super().__init__(why)
        self.code = code


class NotSendable(ValueError):
    """A message is too large or cannot be encoded as JSON."""


class NotAMessage(ValueError):
    """These bytes are not a message. `code` is the error code for the answer."""

    def __init__(self, code: WireError, why: str) -> None:
        super().__init__(why)
        self.code = code


def encode(message: WireMessage) -> str:
    """Return a message as the text to send. Unpaired surrogates, which UTF-8 cannot encode, become question marks.

    Raises `NotSendable` if the message is too long or cannot be written as JSON.
    """
    try:
        sent = _json(message)
    except (TypeError, ValueError, RecursionError) as error:
        raise NotSendable(f"it is not JSON: {in_one_line(error)}") from error
    if (size := len(sent)) > MESSAGE_BYTES_MAX:
        raise NotSendable(f"it has {size} bytes, but the limit is {MESSAGE_BYTES_MAX}: send less at a time")
    return sent.decode()


def _json(message: WireMessage) -> bytes:
    try:
        return msgspec.json.encode(message)
    except UnicodeEncodeError:
        return json.dumps(msgspec.to_builtins(message), ensure_ascii=False).encode(errors="replace")


def decode(text: str | bytes) -> WireMessage:
    """Decode a message. Raises `NotAMessage`."""
    try:
        found = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise NotAMessage(WireError.INVALID_JSON, f"the message is not JSON: {error}") from error
    try:
        return msgspec.convert(found, WireMessage)
    except msgspec.ValidationError as error:
        why = f'a message must be an object with "type" and, for most types, "data": {error}'
        raise NotAMessage(WireError.VALIDATION_ERROR, why) from error


def decode_rpc(body: bytes) -> RpcRequest:
    """Decode a JSON-RPC request. Raises `NotARequest`."""
    try:
        found = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise NotARequest(RpcError.PARSE, f"the body is not JSON: {error}") from error
    try:
        return msgspec.convert(found, RpcRequest)
    except msgspec.ValidationError as error:
        why = f'the body must be one request {{"jsonrpc": "2.0", "id", "method", "params": {{...}}}}: {error}'
        raise NotARequest(RpcError.INVALID_REQUEST, why) from error


def error_message(code: WireError, why: str, failure: FailureKind | None = None) -> WireMessage:
    """Return an error. `failure`, a field that only our servers send, says what ended the session."""
    data = {"message": why, "code": code.value}
    return WireMessage(type="error", data=data if failure is None else {**data, "failure": failure.value})


def observation_message(result: StepResult) -> WireMessage:
    return WireMessage(type="observation", data=msgspec.to_builtins(result))


def rpc_result(id: object, result: dict[str, Any]) -> WireMessage:
    return WireMessage(type="mcp", data={"jsonrpc": "2.0", "id": id, "result": result})


def rpc_error(id: object, code: int, why: str) -> WireMessage:
    return WireMessage(type="mcp", data={"jsonrpc": "2.0", "id": id, "error": {"code": code, "message": why}})
