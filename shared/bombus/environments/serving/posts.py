"""POST requests to an environment server's port. The WebSocket library itself handles only GET."""

import asyncio
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any

import h11
from websockets.asyncio.server import ServerConnection
from websockets.datastructures import Headers
from websockets.http11 import Request, Response

from bombus.environments.openenv.messages import MESSAGE_BYTES_MAX
from bombus.environments.serving.admission import NotLetIn
from bombus.errors import Code

POST = b"POST "
REQUEST_S = 10.0  # time limit for a whole request to arrive
ANSWER_S = 60.0  # time limit for the client to read the answer

ClientGone = asyncio.Future[Any]  # done once the client has disconnected
PostAnswerer = Callable[[Request, bytes, ClientGone], Awaitable[Response]]


class PostingConnection(ServerConnection):  # type: ignore[misc]  # websockets is not installed for every check
    """A connection that begins with a POST is answered once and closed; the library handles any other connection.

    Either kind of connection is cut if no complete request arrives in time.
    """

    def __init__(self, *args: Any, answer: PostAnswerer, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._answer = answer
        self._begun: bytes | None = b""  # bytes received before the method is known, or None after that
        self._post: h11.Connection | None = None
        self._head: h11.Request | None = None
        self._body = bytearray()
        self._answering: asyncio.Task[None] | None = None
        self._gone: ClientGone = self.loop.create_future()
        self._is_whole = False
        self._cutting: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._cutting = self.loop.call_later(REQUEST_S, self._cut_when_silent)

    def data_received(self, data: bytes) -> None:
        if self._begun is not None:
            data = self._begun + data
            is_known = len(data) >= len(POST) or not POST.startswith(data)
            self._begun = None if is_known else data
            if not is_known:
                return
            if data.startswith(POST):
                self._post = h11.Connection(h11.SERVER)
        if self._post is None:
            super().data_received(data)
        elif self._answering is None:
            self._read(self._post, data)

    def eof_received(self) -> None:
        if self._post is None:
            super().eof_received()

    def connection_lost(self, error: Exception | None) -> None:
        if self._cutting is not None:
            self._cutting.cancel()
        if not self._gone.done():
            self._gone.set_result(None)
        super().connection_lost(error)

    def _cut_when_silent(self) -> None:
        if self.request is None and self._answering is None:
            self.transport.abort()

    # ---- a POST -----------------------------------------------------------------------------------------------------

    def _read(self, post: h11.Connection, data: bytes) -> None:
        """Read the data, and begin to answer once the request is complete or known to be invalid."""
        try:
            post.receive_data(data)
            self._is_whole = self._takes_events(post)
        except NotLetIn as refused:
            self._reply(self._refused(refused))
        except h11.RemoteProtocolError as error:
            why = f"the request is not HTTP: {error}"
            self._reply(self._refused(NotLetIn(HTTPStatus.BAD_REQUEST, Code.MALFORMED, why)))
        else:
            if self._is_whole:
                head = self._head
                assert head is not None
                named = Headers((name.decode("latin-1"), value.decode("latin-1")) for name, value in head.headers)
                request = Request(head.target.decode("latin-1"), named, "POST")
                self._reply(self._answer(request, bytes(self._body), self._gone))

    def _takes_events(self, post: h11.Connection) -> bool:
        """Process the data received so far, and return whether the request is complete. Raises `NotLetIn` if the body
        is too long."""
        while True:
            match event := post.next_event():
                case h11.Request():
                    self._head = event
                    if post.they_are_waiting_for_100_continue:
                        go_on = post.send(h11.InformationalResponse(status_code=100, headers=[]))
                        self.transport.write(go_on)
                case h11.Data():
                    self._body += event.data
                    if len(self._body) > MESSAGE_BYTES_MAX:
                        why = f"the body is over {MESSAGE_BYTES_MAX} bytes: send less at a time"
                        raise NotLetIn(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, Code.TOO_LARGE, why)
                case h11.EndOfMessage():
                    return True
                case _:
                    return False

    async def _refused(self, refused: NotLetIn) -> Response:
        return refused.response()

    def _reply(self, answer: Awaitable[Response]) -> None:
        self._answering = self.loop.create_task(self._send(answer))

    async def _send(self, answer: Awaitable[Response]) -> None:
        try:
            sent = (await answer).serialize()
        except BaseException:
            self.transport.abort()
            raise
        if self.transport.is_closing():  # the client has disconnected already
            return
        self.transport.write(sent)
        if self._is_whole:
            self.transport.close()
        else:  # the client is still sending: if we closed the connection, it could not read the answer
            self.transport.write_eof()
        self._cutting = self.loop.call_later(ANSWER_S if self._is_whole else REQUEST_S, self.transport.abort)
