"""The environment server, which leases its slots to clients over WebSockets. `slots.py` contains the rules for the
slots."""

import asyncio
import contextlib
import logging
import secrets
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from functools import partial
from http import HTTPStatus
from typing import Any

from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response

from bombus.environments.kinds import AgentEnvironment
from bombus.environments.openenv.messages import (
    MESSAGE_BYTES_MAX,
    SESSION_HEADER,
    CloseCode,
    NotAMessage,
    NotSendable,
    WireError,
    WireMessage,
    decode,
    encode,
    error_message,
)
from bombus.environments.serving.admission import (
    NotLetIn,
    check_caller,
    json_response,
    response,
    session_of,
    url_of,
    wait_s_of,
)
from bombus.environments.serving.mcp import answer_post
from bombus.environments.serving.pages import openapi
from bombus.environments.serving.posts import ClientGone, PostingConnection
from bombus.environments.serving.served_session import EnvironmentSource
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
    QueueLeft,
    Release,
    SlotCommand,
    SlotTable,
    decide,
    evolve,
)
from bombus.environments.serving.work import SessionWork, ends_session
from bombus.errors import Code, in_one_line
from bombus.machine.certificates import keep_current, served
from bombus.machine.host_names import OwnHostNames
from bombus.sdk.errors import InfraError
from bombus.sdk.running import contained

log = logging.getLogger(__name__)
sockets_log = logging.getLogger(f"{__name__}.sockets")
sockets_log.setLevel(logging.WARNING)  # avoids a line per connection

BEATS_PER_TTL = 4
TICK_S_MAX = 0.5
HANDSHAKE_S = 10.0
CLOSE_HANDSHAKE_S = 2.0
MESSAGES_WAITING_MAX = 4
POSTS_MAX = 32  # the most concurrent POST calls in one session

ENDED: Mapping[LeaseEnd, tuple[int, str]] = {
    LeaseEnd.RELEASED: (1000, ""),
    LeaseEnd.LAPSED: (CloseCode.LAPSED, "the lease lapsed: no message came from the client"),
    LeaseEnd.IDLE: (CloseCode.LAPSED, "the lease lapsed: the session was idle for too long"),
    LeaseEnd.BROKEN: (CloseCode.BROKEN, "the environment broke"),
}


class _Seat:
    """A session that has a slot or is waiting for one."""

    def __init__(self, connection: ServerConnection | None = None) -> None:
        self.connection = connection  # None for a session opened by POST, until a connection attaches to it
        self.work: SessionWork | None = None  # set once there is an environment
        self.posts = 0  # POST calls in progress
        self.granted: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self.making: asyncio.Task[AgentEnvironment] | None = None
        self.replying: asyncio.Task[bool] | None = None  # the task that answers the connection's next message
        self.beating: asyncio.Task[None] | None = None
        self.gone: ClientGone | None = None

    def made(self) -> AgentEnvironment | None:
        """Return the environment, or None if none has been made."""
        making = self.making
        if making is None or not making.done() or making.cancelled() or making.exception() is not None:
            return None
        return making.result()

    @property
    def is_at_work(self) -> bool:
        return self.work is not None and self.work.step is not None


class EnvironmentServer:
    """Manages the slots, and answers connections. `clock` returns monotonic nanoseconds."""

    def __init__(
        self,
        settings: ServingSettings,
        source: EnvironmentSource,
        names: OwnHostNames,
        pages: Mapping[str, tuple[str, bytes]] | None = None,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.settings = settings
        self.table = SlotTable(settings.for_slots())
        self._source = source
        self._names = names
        self._pages = pages or {}
        self._documents: Mapping[str, Callable[[], Mapping[str, object]]] = {
            "/health": lambda: {"status": "healthy", **self.counts()},
            "/metadata": source.metadata,
            "/openapi.json": lambda: openapi(source.metadata()),
            "/schema": source.schema,
        }
        self._clock = clock
        self._seats: dict[str, _Seat] = {}
        self._sessions: dict[ServerConnection, str] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing = False

    # ---- the handshake ----------------------------------------------------------------------------------------

    async def admit(self, connection: ServerConnection, request: Request) -> Response | None:
        """Return the answer to a request that opens no session. For a request that opens or joins one, return None once
        the session has a slot and an environment."""
        try:
            return await self._admit(connection, request)
        except NotLetIn as refused:
            return refused.response()

    async def _admit(self, connection: ServerConnection, request: Request) -> Response | None:
        url = url_of(request)
        check_caller(request, self.settings.key, self._names)
        if url.path in self._documents:
            return json_response(HTTPStatus.OK, self._documents[url.path]())
        if url.path in self._pages:
            kind, body = self._pages[url.path]
            return response(HTTPStatus.OK, kind, body)
        if url.path == "/" and (slots := self.settings.slots) > 1:
            why = f"the page for trying an environment works only with one slot, but this server has {slots}"
            raise NotLetIn(HTTPStatus.NOT_FOUND, Code.UNKNOWN_PATH, f"{why}: serve the class with --slots 1")
        if url.path != "/ws":
            there = ", ".join(self._documents)
            why = f"this server has no such page: there is /ws for sessions, {there}, and POST /mcp"
            raise NotLetIn(HTTPStatus.NOT_FOUND, Code.UNKNOWN_PATH, why)
        if request.headers.get("Upgrade", "").lower() != "websocket":
            raise NotLetIn(HTTPStatus.UPGRADE_REQUIRED, Code.MALFORMED, "/ws speaks WebSocket: connect to ws://")
        if (session := session_of(url.query)) is not None:
            self._attach(connection, session)
            return None
        session, seat = secrets.token_hex(8), _Seat(connection)
        self._seats[session] = seat
        await self._take_slot(session, seat, wait_s_of(url.query), self._held_by(connection, session, seat))
        self._sessions[connection] = session
        await self._make_environment(session, seat)
        return None

    def _held_by(self, connection: ServerConnection, session: str, seat: _Seat) -> ClientGone:
        """Make a session end when its connection closes. Returns a future that is done once the connection has
        closed."""
        gone: ClientGone = asyncio.ensure_future(connection.wait_closed())
        gone.add_done_callback(lambda _: self._do(Release(session)))
        seat.gone = gone
        return gone

    def _attach(self, connection: ServerConnection, session: str) -> None:
        """Attach a connection to a session that was opened by POST. Raises `NotLetIn` if the session does not exist,
        has ended or already has a connection."""
        seat = self._live(session)
        if seat.connection is not None:
            raise NotLetIn(HTTPStatus.CONFLICT, WireError.SESSION_ERROR, "the session already has a connection")
        seat.connection = connection
        self._sessions[connection] = session
        self._held_by(connection, session, seat)
        self._do(Beat(session, self._clock(), worked=True))

    def _live(self, session: str) -> _Seat:
        """Return the seat of a session that has a slot and an environment. Raises `NotLetIn` for any other session."""
        seat = self._seats.get(session)
        if seat is None or seat.work is None or session not in self.table.leases:
            why = f"session {session[:64]!r} has ended, or does not exist: open another session, and reset it"
            raise NotLetIn(HTTPStatus.GONE, WireError.SESSION_ERROR, why)
        return seat

    async def _take_slot(self, session: str, seat: _Seat, wait_s: float, gone: ClientGone) -> None:
        if self._closing:
            self._seats.pop(session, None)
            raise _stopping()
        now = self._clock()
        self._do(Acquire(session, now, now + round(wait_s * SECOND)))
        try:
            await asyncio.wait({seat.granted, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if gone.done() or not seat.granted.done():
                self._do(Release(session))
            if session not in self.table.leases:
                self._seats.pop(session, None)
        if session not in self.table.leases:
            busy = NotLetIn(HTTPStatus.SERVICE_UNAVAILABLE, WireError.CAPACITY_REACHED, self._busy(wait_s))
            raise _stopping() if self._closing else busy

    async def _make_environment(self, session: str, seat: _Seat) -> None:
        """Make a session's environment. Meanwhile, keep the session alive: its client is waiting for the handshake and
        cannot send heartbeats."""
        over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        seat.making = making = asyncio.create_task(self._source.make(session, over.done))
        until = self._clock() + round(HANDSHAKE_S * SECOND)
        while not making.done() and session in self.table.leases and self._clock() < until:
            await asyncio.wait({making}, timeout=self.settings.ttl_s / BEATS_PER_TTL)
            self._do(Beat(session, self._clock(), worked=True))
        try:
            if not making.done() or making.cancelled():
                raise InfraError(f"no environment could be made within {HANDSHAKE_S:.0f} s")
            seat.work = SessionWork(making.result(), session, self._source, self.settings.step_s, over)
        except Exception as error:  # any error in the environment's own code is reported to the client
            self._do(Release(session, LeaseEnd.BROKEN))
            log.warning("no environment could be made for session %s: %s", session, in_one_line(error))
            raise NotLetIn(HTTPStatus.INTERNAL_SERVER_ERROR, WireError.FACTORY_ERROR, in_one_line(error)) from error

    def _busy(self, wait_s: float) -> str:
        waited = f", and none became free in {wait_s:g} s" if wait_s else ": connect with ?wait_s= to wait for one"
        return f"{self._source.exhausted}: all {self.settings.slots} slots are taken{waited}"

    def name_session(self, connection: ServerConnection, request: Request, answer: Response) -> None:
        """Put the session's name into the handshake's response."""
        if connection in self._sessions:
            answer.headers[SESSION_HEADER] = self._sessions[connection]

    # ---- a session ----------------------------------------------------------------------------------------------

    async def serve_session(self, connection: ServerConnection) -> None:
        """Answer the messages in a session until the session ends. A session may end while a message is still being
        carried out."""
        session = self._sessions.get(connection, "")
        seat = self._seats.get(session)
        if seat is None or seat.work is None or seat.gone is None:  # its lease ended during the handshake
            return
        seat.beating = asyncio.create_task(self._beat(session, connection, seat))
        talking = asyncio.create_task(self._talk(session, connection, seat, seat.work))
        await asyncio.wait({talking, seat.work.over}, return_when=asyncio.FIRST_COMPLETED)
        if talking.done() and not talking.cancelled():
            talking.result()  # raises any error, which is logged and closes the connection
        if (answer := seat.work.late_answer(seat.replying)) is not None:
            with contextlib.suppress(ConnectionClosed):
                await connection.send(_text_of(answer))
        self._do(Release(session, LeaseEnd.BROKEN if seat.work.is_broken else LeaseEnd.RELEASED))
        await asyncio.wait({seat.gone})  # `_clean` closes the connection, and says why the session ended

    async def _talk(self, session: str, connection: ServerConnection, seat: _Seat, work: SessionWork) -> None:
        """Answer the messages on a connection one after another, each in its own task."""
        goes_on = True
        with contextlib.suppress(ConnectionClosed):
            while goes_on:
                seat.replying = asyncio.create_task(self._answer_next(session, connection, work))
                goes_on = await seat.replying

    async def _answer_next(self, session: str, connection: ServerConnection, work: SessionWork) -> bool:
        """Wait for a message and answer it. Returns whether another one may follow.

        The task that waits also runs the environment's code and sends the answer. With a separate task for that, if
        many sessions had a message at the same time, the first answer would be delayed until all sessions had reached
        the same point.
        """
        text = await connection.recv()
        if session not in self.table.leases:
            return False
        self._do(Beat(session, self._clock(), worked=True))
        answer = await _answer(work, text)
        if answer is None:
            return False
        self._do(Beat(session, self._clock(), worked=True))
        await connection.send(_text_of(answer))
        self._end_if_broken(session, answer)
        return True

    async def _beat(self, session: str, connection: ServerConnection, seat: _Seat) -> None:
        """Ping the client repeatedly, and note each pong."""
        with contextlib.suppress(ConnectionClosed):
            while True:
                await asyncio.shield(await connection.ping())
                self._do(Beat(session, self._clock(), worked=seat.is_at_work))
                await asyncio.sleep(self.settings.ttl_s / BEATS_PER_TTL)

    # ---- POST ---------------------------------------------------------------------------------------------------

    async def post(self, request: Request, body: bytes, gone: ClientGone) -> Response:
        """Answer a POST. `gone` is done once its client has disconnected."""
        try:
            check_caller(request, self.settings.key, self._names)
            return await answer_post(self, request, body, gone)
        except NotLetIn as refused:
            return refused.response()

    async def open_by_post(self, wait_s: float, gone: ClientGone) -> str:
        """Open a session without a connection, and return its name. Raises `NotLetIn` if the session gets no slot or
        environment.

        Until a connection attaches, the session ends if it receives no call for as long as a lease lives.
        """
        session, seat = secrets.token_hex(16), _Seat()
        self._seats[session] = seat
        await self._take_slot(session, seat, wait_s, gone)
        await self._make_environment(session, seat)
        if gone.done():
            self._do(Release(session))
        return session

    async def call_by_post(self, session: str, data: dict[str, Any], gone: ClientGone) -> WireMessage:
        """Carry out a JSON-RPC request in a session. Raises `NotLetIn` if the session has ended or has too many calls
        in progress.

        If the client disconnects during the call, the session's state is uncertain, so the session ends.
        """
        seat = self._live(session)
        assert seat.work is not None
        if seat.posts >= POSTS_MAX:
            why = f"{POSTS_MAX} calls of this session are in progress: send another once one of them is answered"
            raise NotLetIn(HTTPStatus.TOO_MANY_REQUESTS, Code.OVERLOADED, why)
        message = WireMessage(type="mcp", data=data)
        step = asyncio.create_task(seat.work.carry_out(message, is_posted=True))
        ends: set[asyncio.Future[Any]] = {step, seat.work.over, gone}
        seat.posts += 1
        self._do(Beat(session, self._clock(), worked=True))
        while not any(end.done() for end in ends):
            if seat.connection is None:  # if there is a connection, its pongs show that the client is there
                self._do(Beat(session, self._clock(), worked=True))
            pause_s = self.settings.ttl_s / BEATS_PER_TTL
            await asyncio.wait(ends, timeout=pause_s, return_when=asyncio.FIRST_COMPLETED)
        seat.posts -= 1
        answer = seat.work.late_answer(step)
        if answer is None and step.done() and not step.cancelled():
            answer = step.result()
        if answer is None:
            self._do(Release(session, LeaseEnd.BROKEN))
            why = "the session ended before the call was carried out: open another session, and reset it"
            raise NotLetIn(HTTPStatus.GONE, WireError.SESSION_ERROR, why)
        self._do(Beat(session, self._clock(), worked=True))
        self._end_if_broken(session, answer)
        return answer

    def close_by_post(self, session: str) -> None:
        """End a session. Does nothing if it has ended already."""
        self._do(Release(session))

    def _end_if_broken(self, session: str, answer: WireMessage) -> None:
        if ends_session(answer):
            self._do(Release(session, LeaseEnd.BROKEN))

    # ---- slots --------------------------------------------------------------------------------------------------

    def counts(self) -> dict[str, int]:
        """Return the numbers of slots, leased slots and waiting clients."""
        return {"slots": self.settings.slots, "leased": len(self.table.leases), "waiting": len(self.table.queue)}

    def working(self) -> int:
        """Return how many sessions are currently carrying out a message."""
        return sum(seat.is_at_work for seat in self._seats.values())

    def _do(self, command: SlotCommand) -> None:
        for event in decide(command, self.table):
            evolve(self.table, event)
            match event:
                case LeaseGranted(session) | LeaseRefused(session) | QueueLeft(session):
                    granted = self._seats[session].granted
                    if not granted.done():
                        granted.set_result(isinstance(event, LeaseGranted))
                case LeaseEnded(session, slot, reason):
                    level = logging.DEBUG if reason == LeaseEnd.RELEASED else logging.WARNING
                    log.log(level, "session %s lost slot %d: %s", session, slot, reason)
                    seat = self._seats.pop(session)
                    if seat.work is not None:
                        seat.work.end()
                    self._spawn(self._clean(session, seat, slot, reason))

    async def _clean(self, session: str, seat: _Seat, slot: int, reason: LeaseEnd) -> None:
        """Clean up after a session and free its slot, even if part of the cleanup fails. Each part has a time limit."""
        try:
            if seat.connection is not None:
                self._sessions.pop(seat.connection, None)
                self._spawn(_hang_up(seat.connection, *ENDED[reason]))
            has_ended = await self._end_work(seat)
            if (environment := seat.made()) is not None:
                has_ended &= await self._within("the environment was not closed", session, environment.close())
            cleaning = self._source.clean(session, in_use=not has_ended)
            await self._within("the environment's backend was not cleaned", session, cleaning)
        finally:
            self._do(Cleaned(slot, self._clock()))

    async def _end_work(self, seat: _Seat) -> bool:
        """End a session's running work. Returns whether all of it has ended.

        A cancelled step may keep running in a thread. If the session's environment is still being made, this waits for
        it, so that it can be closed.
        """
        step, making = seat.work.step if seat.work is not None else None, seat.making
        was_cut = seat.work is not None and seat.work.was_cut
        if seat.beating is not None:
            seat.beating.cancel()
        if running := {task for task in (step, making) if task is not None and not task.done()}:
            await asyncio.wait(running, timeout=self.settings.close_s)
        if making is not None and not making.done():
            was_cut = True
            making.cancel()
            await asyncio.wait({making}, timeout=self.settings.close_s)
        return not was_cut

    async def _within(self, failure: str, session: str, work: Awaitable[None]) -> bool:
        """Await one part of a session's cleanup, and return whether that part succeeded in time."""
        try:
            async with asyncio.timeout(self.settings.close_s):
                await contained(work)
        except Exception as error:  # the slot must be freed even if the environment's own code fails
            log.error("%s after session %s: %s", failure, session, in_one_line(error))
            return False
        return True

    async def run(self) -> None:
        """Advance the slots' time periodically, until cancelled."""
        pause_s = min(TICK_S_MAX, self.settings.ttl_s / 8)
        before, stood_still = self._clock(), False
        while True:
            await asyncio.sleep(pause_s)
            now = self._clock()
            # If this process itself was suspended, clients get one more tick to show that they are still there.
            stood_still = not stood_still and now - before > max(self.settings.ttl_s / 2, 4 * pause_s) * SECOND
            if not stood_still:
                self._do(Elapsed(now))
            before = now

    async def close(self) -> None:
        """End all sessions, and wait until their environments are cleaned up, which takes at most about four times
        `close_s` for each."""
        self._closing = True
        for session in [*self.table.queue, *self.table.leases]:
            self._do(Release(session))
        while self._tasks:
            await asyncio.wait(set(self._tasks))

    def _spawn(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._note_end)

    def _note_end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a session was not ended cleanly: %s", in_one_line(error), exc_info=error)


async def _hang_up(connection: ServerConnection, code: int, reason: str) -> None:
    """Close a connection. Cut it if the client does not answer, or does not even read the data sent before."""
    cut = asyncio.get_running_loop().call_later(2 * CLOSE_HANDSHAKE_S, connection.transport.abort)
    try:
        await connection.close(code, reason)
    finally:
        cut.cancel()


def _stopping() -> NotLetIn:
    return NotLetIn(HTTPStatus.SERVICE_UNAVAILABLE, Code.OVERLOADED, "the server is stopping: try again later")


async def _answer(work: SessionWork, text: str | bytes) -> WireMessage | None:
    """Return the answer to a message, or None if there is none."""
    try:
        message = decode(text)
    except NotAMessage as error:
        return error_message(error.code, str(error))
    return None if message.type == "close" else await work.carry_out(message)


def _text_of(answer: WireMessage) -> str:
    """Return an answer as the text to send. If it cannot be sent, return an error message that says why."""
    try:
        return encode(answer)
    except NotSendable as error:
        return encode(error_message(WireError.EXECUTION_ERROR, f"the environment's answer cannot be sent: {error}"))


@contextlib.asynccontextmanager
async def environment_server(server: EnvironmentServer, bound: socket.socket) -> AsyncIterator[EnvironmentServer]:
    """Serve on a bound socket while the block runs, then end all sessions."""
    async with serve(
        server.serve_session,
        sock=bound,
        ssl=(context := served()),
        process_request=server.admit,
        process_response=server.name_session,
        open_timeout=WAIT_S_MAX + 2 * HANDSHAKE_S,
        close_timeout=CLOSE_HANDSHAKE_S,
        ping_interval=None,
        create_connection=partial(PostingConnection, answer=server.post),
        max_size=MESSAGE_BYTES_MAX,
        max_queue=MESSAGES_WAITING_MAX,
        compression=None,
        server_header=None,
        logger=sockets_log,
    ):
        beside = [asyncio.create_task(each) for each in (server.run(), keep_current(context))]
        try:
            yield server
        finally:
            for task in beside:
                task.cancel()
            await server.close()
