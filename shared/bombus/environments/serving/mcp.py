"""`POST /mcp`: sessions and calls of tools in JSON-RPC, as OpenEnv's `MCPToolClient` makes them."""

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
    """The sessions of a server, by their names. `gone` is done once the client that asks has left."""

    async def open_by_post(self, wait_s: float, gone: ClientGone) -> str:
        """Open a session, and return its name. Raises `NotLetIn`."""
        ...

    async def call_by_post(self, session: str, data: dict[str, Any], gone: ClientGone) -> WireMessage:
        """Carry out a request of JSON-RPC in a session. Raises `NotLetIn`."""
        ...

    def close_by_post(self, session: str) -> None:
        """End a session. One that has ended stays as it is."""
        ...


async def answer_post(sessions: PostedSessions, request: Request, body: bytes, gone: ClientGone) -> Response:
    """Answer a POST from a caller that was let in. Raises `NotLetIn` for paths other than `/mcp`.

    What is wrong with a request of JSON-RPC, also that no slot is free, is an error of JSON-RPC: OpenEnv's client shows
    its sentence, and of an HTTP status only the number.
    """
    url = url_of(request)
    if url.path != PATH:
        why = f"only {PATH} takes a POST: sessions are at /ws"
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
            why = f"params has no session_id: get one with {SessionRpc.CREATE}"
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
    """Return the answer to `tools/call` as OpenEnv's server gives it: a failure as an error, the text as `data` too."""
    result = answer.data.get("result")
    if not isinstance(result, dict):
        return answer
    text = result["content"][0]["text"]
    return (
        rpc_error(number, RpcError.INTERNAL, text) if result["isError"] else rpc_result(number, result | {"data": text})
    )
