"""Connects the screen to a hive, over its bus or through a gateway, and keeps it connected."""

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable

import httpx
import msgspec

from bombus.bus import Bus, ServerRefused, snapshots
from bombus.bus.follow import Follower
from bombus.errors import BusUnavailable, Code, LogCorrupted, Refused
from bombus.hive import inbox
from bombus.hive.decoding import decoded
from bombus.hive.events import AnyEvent
from bombus.hive.state import Hive
from bombus.hive.subjects import Subjects
from bombus.replay.episode.story import read_story
from bombus.replay.episode.text import text
from bombus.replay.episode.tree import read_transcript
from bombus.replay.source import BusSource, NotOnLog
from bombus.sdk.requests import error_of, is_away
from bombus.sdk.transport import address, client_options, reply_of
from bombus_overwatch.app import Overwatch
from bombus_overwatch.model import EpisodeRecord
from bombus_overwatch.screen import Link

RETRY_S = 1.0
SILENCE_S = 10.0  # a gateway sends something at least every two seconds
TOKENS_LISTED = 0  # tokens of each reply in a transcript that are listed one by one
LINK_CHECK_S = 0.1
AWAY = "the bus is away: this is the last known state, and updates resume when the bus is back"


async def run(link: "BusLink | GatewayLink", title: str) -> None:
    """Show a hive until the user quits. While it is away, the screen waits for it.

    If the log is corrupt or the hive refuses, closes the screen and raises `LogCorrupted` or `SwarmError`.
    """
    app = Overwatch(title, operator=link)
    feed = asyncio.create_task(_feed(app, link))
    feed.add_done_callback(lambda done: None if done.cancelled() else app.exit())
    try:
        await app.run_async()
    finally:
        feed.cancel()
        await asyncio.gather(feed, return_exceptions=True)
    if not feed.cancelled():
        feed.result()


async def _feed(app: Overwatch, link: "BusLink | GatewayLink") -> None:
    """Follow the log until cancelled. Raises errors in the log, and `SwarmError` if the hive refuses to show it."""
    await app.up.wait()
    while True:
        try:
            await link.feed(app)
        except (BusUnavailable, ServerRefused) as error:
            app.report(Link.CONNECTING, str(error))  # the server or the hive's streams may not exist yet
        await asyncio.sleep(RETRY_S)


# ---- over the bus -------------------------------------------------------------------------------------------------


class BusLink:
    """A hive that is reached over its bus. Raises `ValueError` for a bad hive name."""

    def __init__(self, nats_url: str, hive: str) -> None:
        self._nats_url = nats_url
        self._hive = Subjects(hive).hive
        self._connected: Bus | None = None

    async def feed(self, app: Overwatch) -> None:
        async with await Bus.connect(self._nats_url, self._hive, name="overwatch") as bus:
            self._connected = bus
            await follow(app, bus)

    @property
    def _bus(self) -> Bus:
        if self._connected is None or not self._connected.is_connected:
            raise BusUnavailable("the bus is away; try again once it is back")
        return self._connected

    async def stop(self, engine: str) -> None:
        await self._bus.inbox.request(inbox.Stop(id=uuid.uuid4().hex, engine=engine))

    async def abort(self, engine: str, record: EpisodeRecord) -> None:
        command = inbox.Abort(
            id=uuid.uuid4().hex,
            engine=engine,
            client=record.client,
            episodes=(record.episode,),
            detail=inbox.BY_OPERATOR,
        )
        await self._bus.inbox.request(command)

    async def transcript(self, episode: str) -> str:
        source = BusSource(self._bus, f"hive {self._hive}")
        transcript = await read_transcript(source, await read_story(source, episode), False)
        return "\n".join(text(transcript, TOKENS_LISTED, colour=False))


async def follow(app: Overwatch, bus: Bus) -> None:
    """Fold the hive's events into the screen, starting with the oldest one kept, until the bus is closed.

    Raises what `Reader.read` raises.
    """
    app.report(Link.CATCHING_UP)
    last = await bus.last(bus.subjects.events_stream)
    target = last.seq if last is not None else 0
    follower = Follower(bus, on_event=app.take, on_start=app.begin)
    watch = asyncio.create_task(_watch(app, bus, follower, target))
    try:
        await follower.run()
    finally:
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)


async def _watch(app: Overwatch, bus: Bus, follower: Follower, target: int) -> None:
    """Keep the link state on the screen up to date, by checking our own socket; nothing is sent to the server."""
    shown: Link | None = None
    while True:
        link = _link(bus.is_connected, follower.position >= target)
        if link != shown:
            app.report(link, AWAY if link == Link.AWAY else "", target)
            shown = link
        await asyncio.sleep(LINK_CHECK_S)


def _link(connected: bool, caught_up: bool) -> Link:
    if not connected:
        return Link.AWAY
    return Link.LIVE if caught_up else Link.CATCHING_UP


# ---- over a gateway -----------------------------------------------------------------------------------------------


class GatewayLink:
    """A hive that is reached through a gateway, with the key of an operator. Raises `ValueError` for a bad URL."""

    def __init__(self, swarm_url: str) -> None:
        self._url, key = address(swarm_url, None)
        self._options = {"timeout": SILENCE_S, **client_options(self._url, None, key)}
        self._after: int | None = None  # the newest event that has arrived
        self._target = 0  # the position to catch up to

    async def feed(self, app: Overwatch) -> None:
        resumed = {} if self._after is None else {"last-event-id": str(self._after)}
        shown: Link | None = None
        try:
            async with (
                httpx.AsyncClient(**self._options) as http,
                http.stream("GET", "/events", headers=resumed) as reply,
            ):
                await _check(reply)
                async for block in _blocks(reply):
                    position, sent = read_sent(block)
                    link = self._take(app, position, sent)
                    if link != shown:
                        app.report(link, AWAY if link == Link.AWAY else "", self._target)
                        shown = link
        except httpx.HTTPError as error:
            raise BusUnavailable(_unreachable(self._url, error)) from error
        except msgspec.MsgspecError as error:
            raise LogCorrupted(f"what {self._url} sends cannot be read as the events of a hive: {error}") from error

    def _take(self, app: Overwatch, position: int | None, sent: "Begin | Told | AnyEvent | None") -> Link:
        """Take in what the gateway sent. Return the state of the link since then."""
        is_away = False
        if isinstance(sent, Begin):
            app.begin(sent.position, snapshots.decode(sent.state).hive if sent.state else Hive())
        elif isinstance(sent, Told):
            self._target, is_away = sent.position, not sent.bus
        elif sent is not None and position is not None:
            app.take(position, sent)
        if position is not None:
            self._after = position
        return _link(not is_away, (self._after or 0) >= self._target)

    async def stop(self, engine: str) -> None:
        await self._send(f"/e/{engine}/stop_engine", {})

    async def abort(self, engine: str, record: EpisodeRecord) -> None:
        await self._send(f"/e/{engine}/stop_episode", {"episode": record.episode})

    async def _send(self, path: str, body: dict[str, str]) -> None:
        try:
            async with httpx.AsyncClient(**self._options) as http:
                reply = await http.post(path, json=body)
        except httpx.HTTPError as error:
            raise BusUnavailable(_unreachable(self._url, error)) from error
        await _check(reply)
        if why := reply.json().get("failure_reason"):
            raise Refused(Code.WRONG_PHASE, why)

    async def transcript(self, episode: str) -> str:
        raise NotOnLog(
            f"A gateway does not show what others call. On the hive's machine, `bombus replay episode {episode}` does."
        )


class Begin(msgspec.Struct, frozen=True):
    """The state before the first event, as a snapshot; `state` is empty if the log has every event."""

    position: int
    state: bytes


class Told(msgspec.Struct, frozen=True):
    """How far the gateway has read the log, and whether it is connected to the bus."""

    position: int
    bus: bool


_named: dict[bytes, Callable[[bytes], Begin | Told]] = {
    b"begin": msgspec.json.Decoder(Begin).decode,
    b"position": msgspec.json.Decoder(Told).decode,
}
_events: msgspec.json.Decoder[AnyEvent] = msgspec.json.Decoder(AnyEvent, strict=False)


def _unreachable(url: str, error: httpx.HTTPError) -> str:
    return f"the gateway at {url} is away: {error or type(error).__name__}"


async def _check(response: httpx.Response) -> None:
    """Raise `BusUnavailable` for an answer that may be another one later, and `SwarmError` for any other refusal."""
    if response.status_code != httpx.codes.OK:
        await response.aread()
        reply = reply_of(response)
        error = error_of(reply, response.url.path)
        if is_away(reply, error):
            raise BusUnavailable(error.why)
        raise error


async def _blocks(reply: httpx.Response) -> AsyncIterator[bytes]:
    """Yield each server-sent event."""
    rest = b""
    async for chunk in reply.aiter_raw():
        *blocks, rest = (rest + chunk).split(b"\n\n")
        for block in blocks:
            yield block


def read_sent(block: bytes) -> tuple[int | None, Begin | Told | AnyEvent | None]:
    """Decode a server-sent event: its position, if it has one, and its data. Raises `msgspec.MsgspecError`.

    The data are None for a comment, and for an event that only a newer release understands, which every fold skips.
    """
    fields = {name: value for name, _, value in (line.partition(b": ") for line in block.split(b"\n"))}
    position = msgspec.json.decode(fields[b"id"], type=int) if b"id" in fields else None
    decode, data = _named.get(fields.get(b"event", b"")), fields.get(b"data", b"")
    if decode is not None:
        return position, decoded(decode, data)
    try:
        return position, decoded(_events.decode, data) if data else None
    except msgspec.ValidationError:
        return position, None
