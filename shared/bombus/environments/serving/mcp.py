"""`POST /mcp`: sessions and tool calls over JSON-RPC, as OpenEnv's `MCPToolClient` sends them."""

from http import HTTPStatus
from typing import Any, Protocol

import msgspec
from websockets.http11 import Request, Response

from bombus.environments.openenv.messages import (
    NotARequest,
    Rpc,
    RpcError,
    SessionRpc,
    WireMessage,
    decode_rpc,
    rpc_error,
    rpc_result,
)
from bombus.environments.serving.admission import NotLetIn, json_response, url_of, wait_s_of
from bombus.environments.serving.posts import ClientGone
from bombus.errors import Code

PATH = "/mcp"


class PostedSessions(Protocol):
    """A server's sessions, identified by name. The future `gone` is done once the requesting client has
    disconnected."""

    async def open_by_post(self, wait_s: float, gone: ClientGone) -> str:
        """Open a session, and return its name. Raises `NotLetIn`."""
        ...

    async def call_by_post(self, session: str, data: dict[str, Any], gone: ClientGone) -> WireMessage:
        """Carry out a JSON-RPC request in a session. Raises `NotLetIn`."""
        ...

    def close_by_post(self, session: str) -> None:
        """End a session. Does nothing if it has ended already."""
        ...


async def answer_post(sessions: PostedSessions, request: Request, body: bytes, gone: ClientGone) -> Response:
    """Answer a POST from an authorized caller. Raises `NotLetIn` for paths other than `/mcp`.

    If a JSON-RPC request fails, even because no slot is free, the answer is a JSON-RPC error rather than an HTTP error:
    OpenEnv's client shows the message of the former, but only the status code of the latter.
    """
    url = url_of(request)
    if url.path != PATH:
        why = f"only {PATH} accepts a POST: sessions are at /ws"
        raise NotLetIn(HTTPStatus.NOT_FOUND, Code.UNKNOWN_PATH, why)
    wait_s = wait_s_of(url.query)
    answer = await _answer(sessions, body, wait_s, gone)
    return json_response(HTTPStatus.OK, answer.data)


async def _answer(sessions: PostedSessions, body: bytes, wait_s: float, gone: ClientGone) -> WireMessage:
    try:
        asked = decode_rpc(body)
    except NotARequest as error:
        return rpc_error(None, error.code, str(error))
    number, method, params = asked.id, asked.method, asked.params
    try:
        if method == SessionRpc.CREATE:
            return rpc_result(number, {"session_id": await sessions.open_by_post(wait_s, gone)})
        session = params.get("session_id")
        if not isinstance(session, str):
            why = f"the params have no session_id: get one with {SessionRpc.CREATE}"
            return rpc_error(number, RpcError.INVALID_PARAMS, why)
        if method == SessionRpc.CLOSE:
            sessions.close_by_post(session)
            return rpc_result(number, {"session_id": session, "closed": True})
        answer = await sessions.call_by_post(session, msgspec.structs.asdict(asked), gone)
    except NotLetIn as refused:
        return rpc_error(number, RpcError.SERVER, str(refused))
    if answer.type == "error":
        return rpc_error(number, RpcError.SERVER, str(answer.data.get("message", "")))
    return _called(number, answer) if method == Rpc.CALL_TOOL else answer


def _called(number: object, answer: WireMessage) -> WireMessage:
    """Convert the answer to `tools/call` to the form that OpenEnv's server uses: a failure becomes an error, and a
    result repeats its text as `data`."""
    result = answer.data.get("result")
    if not isinstance(result, dict):
        return answer
    text = result["content"][0]["text"]
    return (
        rpc_error(number, RpcError.INTERNAL, text) if result["isError"] else rpc_result(number, result | {"data": text})
    )
