"""The environment server: leases of slots over WebSockets. What is decided about slots is in `slots.py`."""

import asyncio
import contextlib
import logging
import secrets
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from functools import partial
from http import HTTPStatus
from typing import Protocol
from urllib.parse import urlsplit

from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response

from bombus.environments.kinds import AgentEnvironment
from bombus.environments.openenv.messages import (
    MESSAGE_BYTES_MAX,
    SESSION_HEADER,
    CloseCode,
    NotAMessage,
    WireError,
    WireMessage,
    decode,
    encode,
    error_message,
)
from bombus.environments.serving.doors import NotLetIn, check_caller, json_response, response, wait_s_of
from bombus.environments.serving.settings import WAIT_S_MAX, ServingSettings
from bombus.environments.serving.slots import (
    SECOND,
    Acquire,
    Beat,
    Cleaned,
    Elapsed,
    LeaseEnd,
    LeaseEnded,
    LeaseGranted,
    LeaseRefused,
    Release,
    SlotCommand,
    SlotTable,
    decide,
    evolve,
)
from bombus.environments.serving.worlds import WorldSession
from bombus.errors import Code, in_one_line
from bombus.host.host_names import OwnHostNames
from bombus.sdk.errors import InfraError

log = logging.getLogger(__name__)
sockets_log = logging.getLogger(f"{__name__}.sockets")
sockets_log.setLevel(logging.WARNING)  # not each connection

BEATS_PER_TTL = 4
TICK_S_MAX = 0.5
HANDSHAKE_S = 10.0
CLOSE_HANDSHAKE_S = 2.0
MESSAGES_WAITING_MAX = 4

ENDED: Mapping[LeaseEnd, tuple[int, str]] = {
    LeaseEnd.RELEASED: (1000, ""),
    LeaseEnd.LAPSED: (CloseCode.LAPSED, "the lease lapsed: nothing was heard of the client"),
    LeaseEnd.IDLE: (CloseCode.LAPSED, "the lease lapsed: the session was idle for too long"),
    LeaseEnd.BROKEN: (CloseCode.BROKEN, "the world broke"),
}


class WorldSource(Protocol):
    """Where worlds come from, and what they stand on."""

    exhausted: str  # what a client is told when all slots are taken

    async def make(self, session: str) -> AgentEnvironment:
        """Return a new world for a session. Raises `InfraError`."""
        ...

    async def renew(self, session: str) -> None:
        """Make what the session's world stands on like new, for another task. Raises `InfraError`."""
        ...

    async def check(self, session: str) -> None:
        """Raise `InfraError` when what the session's world stands on is broken."""
        ...

    async def clean(self, session: str) -> None:
        """Take back what the session's world stood on. Doing it again does nothing."""
        ...

    def schema(self) -> dict[str, object]:
        """Return the JSON schemas of actions, observations and states."""
        ...


class _Seat:
    """A session that has a slot, or waits for one."""

    def __init__(self, connection: ServerConnection) -> None:
        self.connection = connection
        self.granted: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self.making: asyncio.Task[AgentEnvironment] | None = None
        self.step: asyncio.Task[WireMessage] | None = None
        self.beating: asyncio.Task[None] | None = None
        self.gone: asyncio.Future[None] | None = None

    def made(self) -> AgentEnvironment | None:
        """Return the world, None when there is none (yet)."""
        making = self.making
        if making is None or not making.done() or making.cancelled() or making.exception() is not None:
            return None
        return making.result()

    @property
    def is_at_work(self) -> bool:
        return self.step is not None and not self.step.done()


class SilenceLimited(ServerConnection):  # type: ignore[misc]  # websockets is not there for every check
    """A connection that is cut when no request comes on it in time."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.loop.call_later(HANDSHAKE_S, self._cut_when_silent)

    def _cut_when_silent(self) -> None:
        if self.request is None:
            self.transport.abort()


class EnvironmentServer:
    """Holds the slots, and answers connections. `clock` gives nanoseconds that never go back."""

    def __init__(
        self,
        settings: ServingSettings,
        source: WorldSource,
        names: OwnHostNames,
        pages: Mapping[str, tuple[str, bytes]] | None = None,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.settings = settings
        self.table = SlotTable(settings.for_slots())
        self._source = source
        self._names = names
        self._pages = pages or {}
        self._clock = clock
        self._seats: dict[str, _Seat] = {}
        self._sessions: dict[ServerConnection, str] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing = False

    # ---- the handshake ----------------------------------------------------------------------------------------

    async def admit(self, connection: ServerConnection, request: Request) -> Response | None:
        """Answer a request that opens no session; return None once there is a slot and a world in it."""
        try:
            return await self._admit(connection, request)
        except NotLetIn as refused:
            return refused.response()

    async def _admit(self, connection: ServerConnection, request: Request) -> Response | None:
        url = urlsplit(request.path)
        check_caller(request, self.settings.key, self._names)
        if url.path == "/health":
            return json_response(HTTPStatus.OK, {"status": "healthy", **self.counts()})
        if url.path == "/schema":
            return json_response(HTTPStatus.OK, self._source.schema())
        if url.path in self._pages:
            kind, body = self._pages[url.path]
            return response(HTTPStatus.OK, kind, body)
        if url.path != "/ws":
            why = "there is nothing here: sessions are at /ws, and there are /health and /schema"
            raise NotLetIn(HTTPStatus.NOT_FOUND, Code.UNKNOWN_PATH, why)
        if request.headers.get("Upgrade", "").lower() != "websocket":
            raise NotLetIn(HTTPStatus.UPGRADE_REQUIRED, Code.MALFORMED, "/ws speaks WebSocket: connect to ws://")
        if self._closing:
            raise NotLetIn(HTTPStatus.SERVICE_UNAVAILABLE, Code.OVERLOADED, "the server is stopping: come again later")
        await self._take_slot(connection, wait_s_of(url.query))
        return None

    async def _take_slot(self, connection: ServerConnection, wait_s: float) -> None:
        session = secrets.token_hex(8)
        seat = self._seats[session] = _Seat(connection)
        now = self._clock()
        self._do(Acquire(session, now, now + round(wait_s * SECOND)))
        gone = seat.gone = asyncio.ensure_future(connection.wait_closed())
        gone.add_done_callback(lambda _: self._do(Release(session)))
        await asyncio.wait({seat.granted, gone}, return_when=asyncio.FIRST_COMPLETED)
        if gone.done():
            self._do(Release(session))
        if session not in self.table.leases:
            self._seats.pop(session, None)
            raise NotLetIn(HTTPStatus.SERVICE_UNAVAILABLE, WireError.CAPACITY_REACHED, self._busy(wait_s))
        self._sessions[connection] = session
        await self._make_world(session, seat)

    async def _make_world(self, session: str, seat: _Seat) -> None:
        """Make a session's world. Meanwhile the client, which waits for this server, cannot be asked for a sign."""
        seat.making = making = asyncio.create_task(self._source.make(session))
        until = self._clock() + round(HANDSHAKE_S * SECOND)
        while not making.done() and session in self.table.leases and self._clock() < until:
            await asyncio.wait({making}, timeout=self.settings.ttl_s / BEATS_PER_TTL)
            self._do(Beat(session, self._clock(), worked=True))
        try:
            if not making.done() or making.cancelled():
                raise InfraError(f"no world could be made within {HANDSHAKE_S:.0f} s")
            making.result()
        except Exception as error:  # the code of a world is its author's: whatever it raises is told to the client
            self._do(Release(session, LeaseEnd.BROKEN))
            log.warning("no world could be made for session %s: %s", session, in_one_line(error))
            raise NotLetIn(HTTPStatus.INTERNAL_SERVER_ERROR, WireError.FACTORY_ERROR, in_one_line(error)) from error

    def _busy(self, wait_s: float) -> str:
        waited = f", and none became free in {wait_s:g} s" if wait_s else ": connect with ?wait_s= to wait for one"
        return f"{self._source.exhausted}: all {self.settings.slots} slots are taken{waited}"

    def name_session(self, connection: ServerConnection, request: Request, answer: Response) -> None:
        """Put the session's name into the answer to its handshake."""
        if connection in self._sessions:
            answer.headers[SESSION_HEADER] = self._sessions[connection]

    # ---- a session ----------------------------------------------------------------------------------------------

    async def serve_session(self, connection: ServerConnection) -> None:
        """Answer the messages of a session until it ends."""
        session = self._sessions[connection]
        seat = self._seats.get(session)
        world = None if seat is None else seat.made()
        if seat is None or world is None:  # its lease ended during the handshake
            return
        seat.beating = asyncio.create_task(self._beat(session, seat))
        worlds = WorldSession(
            world, session, partial(self._source.renew, session), partial(self._source.check, session)
        )
        with contextlib.suppress(ConnectionClosed):
            async for text in connection:
                if session not in self.table.leases:
                    return
                self._do(Beat(session, self._clock(), worked=True))
                answer = await self._answer(seat, worlds, text)
                if answer is None:
                    break
                self._do(Beat(session, self._clock(), worked=True))
                await connection.send(encode(answer))
                if answer.data.get("code") == WireError.SESSION_ERROR and answer.type == "error":
                    self._do(Release(session, LeaseEnd.BROKEN))
        self._do(Release(session))

    async def _answer(self, seat: _Seat, worlds: WorldSession, text: str | bytes) -> WireMessage | None:
        """Return the answer to a message, None where there is none to give."""
        try:
            message = decode(text)
        except NotAMessage as error:
            return error_message(error.code, str(error))
        if message.type == "close":
            return None
        seat.step = step = asyncio.create_task(worlds.answer(message))
        done, _ = await asyncio.wait({step}, timeout=self.settings.step_s)
        if not done:
            step.cancel()
            why = f"the {message.type} took longer than {self.settings.step_s:g} s: the session is over"
            return error_message(WireError.SESSION_ERROR, why)
        if step.cancelled():
            return None
        try:
            return step.result()
        except InfraError as error:
            return error_message(WireError.SESSION_ERROR, f"the world broke, and the session is over: {error}")

    async def _beat(self, session: str, seat: _Seat) -> None:
        """Ask the client whether it is there, again and again, and note each time that it says so."""
        with contextlib.suppress(ConnectionClosed):
            while True:
                await asyncio.shield(await seat.connection.ping())
                self._do(Beat(session, self._clock(), worked=seat.is_at_work))
                await asyncio.sleep(self.settings.ttl_s / BEATS_PER_TTL)

    # ---- slots --------------------------------------------------------------------------------------------------

    def counts(self) -> dict[str, int]:
        """Return how many slots there are, are leased, and how many clients wait."""
        return {"slots": self.settings.slots, "leased": len(self.table.leases), "waiting": len(self.table.queue)}

    def working(self) -> int:
        """Return how many sessions are in the middle of a message."""
        return sum(seat.is_at_work for seat in self._seats.values())

    def _do(self, command: SlotCommand) -> None:
        for event in decide(command, self.table):
            evolve(self.table, event)
            match event:
                case LeaseGranted(session) | LeaseRefused(session):
                    granted = self._seats[session].granted
                    if not granted.done():
                        granted.set_result(isinstance(event, LeaseGranted))
                case LeaseEnded(session, slot, reason):
                    level = logging.DEBUG if reason == LeaseEnd.RELEASED else logging.WARNING
                    log.log(level, "session %s lost slot %d: %s", session, slot, reason)
                    self._spawn(self._clean(session, slot, reason))

    async def _clean(self, session: str, slot: int, reason: LeaseEnd) -> None:
        """End what a session left, and make its slot free. Each part has its time, so the slot is never lost."""
        seat = self._seats.pop(session)
        self._sessions.pop(seat.connection, None)
        self._spawn(seat.connection.close(*ENDED[reason]))  # it is cut if the client does not answer
        for task in (seat.beating, seat.step):
            if task is not None:
                task.cancel()
        running = {task for task in (seat.step, seat.making) if task is not None}
        if running:  # a world that is being made is waited for, so that it can be closed
            await asyncio.wait(running, timeout=self.settings.close_s)
        if (world := seat.made()) is not None:
            await self._within("the world was not closed", session, world.close())
        await self._within("what the world stood on was not cleaned", session, self._source.clean(session))
        self._do(Cleaned(slot, self._clock()))

    async def _within(self, failure: str, session: str, work: Awaitable[None]) -> None:
        try:
            async with asyncio.timeout(self.settings.close_s):
                await work
        except Exception as error:  # a slot is given back whatever a world's own code does at its end
            log.error("%s after session %s: %s", failure, session, in_one_line(error))

    async def run(self) -> None:
        """Let time pass, until cancelled."""
        pause_s = min(TICK_S_MAX, self.settings.ttl_s / 8)
        before, stood_still = self._clock(), False
        while True:
            await asyncio.sleep(pause_s)
            now = self._clock()
            # After this process itself stood still, clients have one more moment to be heard of.
            stood_still = not stood_still and now - before > max(self.settings.ttl_s / 2, 4 * pause_s) * SECOND
            if not stood_still:
                self._do(Elapsed(now))
            before = now

    async def close(self) -> None:
        """End all sessions, and wait until their worlds are given up. It takes at most about three times `close_s`."""
        self._closing = True
        for session in [*self.table.queue, *self.table.leases]:
            self._do(Release(session))
        while self._tasks:
            await asyncio.wait(set(self._tasks))

    def _spawn(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


@contextlib.asynccontextmanager
async def environment_server(server: EnvironmentServer, bound: socket.socket) -> AsyncIterator[EnvironmentServer]:
    """Serve on a bound socket while the block runs, then end all sessions."""
    async with serve(
        server.serve_session,
        sock=bound,
        process_request=server.admit,
        process_response=server.name_session,
        open_timeout=WAIT_S_MAX + 2 * HANDSHAKE_S,
        close_timeout=CLOSE_HANDSHAKE_S,
        ping_interval=None,
        create_connection=SilenceLimited,
        max_size=MESSAGE_BYTES_MAX,
        max_queue=MESSAGES_WAITING_MAX,
        compression=None,
        server_header=None,
        logger=sockets_log,
    ):
        ticking = asyncio.create_task(server.run())
        try:
            yield server
        finally:
            ticking.cancel()
            await server.close()
