"""Reads the log of a hive for the screen, over its bus or through a gateway, and carries out what a person asks."""

import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any

import httpx
import msgspec

from bombus.bus import BlobMissing, Bus, Stored, snapshots
from bombus.errors import BusUnavailable, Code, LogCorrupted, Refused
from bombus.hive import inbox
from bombus.hive.decoding import decoded
from bombus.hive.events import AnyEvent, encode_event
from bombus.hive.state import Hive
from bombus.hive.subjects import Subjects
from bombus.insight.watch import LogWatch
from bombus.machine.process import operator_name
from bombus.replay.source import CALLS, BusSource, LogEnd, NotOnLog, Source
from bombus.sdk.errors import SwarmError
from bombus.sdk.requests import error_of, is_away
from bombus.sdk.transport import address, client_options, reply_of
from bombus_overwatch.app import Overwatch
from bombus_overwatch.model import EpisodeRecord, HiveView

SILENCE_S = 10.0  # a gateway sends something at least every two seconds
UNKNOWN = b"\xc0"  # stands for an event that only a newer release understands; gateways leave those out


async def run(link: "BusLink | GatewayLink", title: str) -> None:
    """Show a hive until the user quits. While it is away, the screen waits for it.

    If the log is corrupt or the hive refuses, closes the screen and raises `LogCorrupted` or `SwarmError`.
    """
    watch = LogWatch(link.open, moment=HiveView)
    try:
        with watch.viewing():
            await Overwatch(title, watch, operator=link).run_async()
    finally:
        await watch.close()
    if watch.failure is not None:
        raise watch.failure


class BusLink:
    """A hive that is reached over its bus. Raises `ValueError` for a bad hive name."""

    def __init__(self, nats_url: str, hive: str) -> None:
        self._nats_url = nats_url
        self._hive = Subjects(hive).hive
        self._connected: Bus | None = None

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Source]:
        async with await Bus.connect(self._nats_url, self._hive, name="overwatch") as bus:
            self._connected = bus
            yield BusSource(bus, f"hive {self._hive}")

    @property
    def _bus(self) -> Bus:
        if self._connected is None or not self._connected.is_connected:
            raise BusUnavailable("the bus is away; try again once it is back")
        return self._connected

    async def stop(self, engine: str) -> None:
        await self._bus.inbox.request(inbox.Stop(id=uuid.uuid4().hex, engine=engine, by=operator_name()))

    async def abort(self, engine: str, record: EpisodeRecord) -> None:
        command = inbox.Abort(
            id=uuid.uuid4().hex,
            engine=engine,
            client=record.client,
            episodes=(record.episode,),
            detail=inbox.BY_OPERATOR,
            by=operator_name(),
        )
        await self._bus.inbox.request(command)


class GatewayLink(Source):
    """A hive that is reached through a gateway, with the key of an operator. Raises `ValueError` for a bad URL."""

    running = True

    def __init__(self, swarm_url: str) -> None:
        self._url, key = address(swarm_url, None)
        self.title, self.hive = f"the gateway at {self._url}", ""
        self._options = {"timeout": SILENCE_S, **client_options(self._url, None, key)}
        self._began = self._told = Told(0)

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Source]:
        self._told = Told(-1)
        async with aclosing(self.newer(None)) as batches:
            while self._told.position < 0:
                await anext(batches)
        yield self

    async def base(self) -> tuple[Hive, int]:
        state = self._began.state
        return snapshots.decode(state).hive if state else Hive(), self._began.position

    async def end(self) -> LogEnd:
        return LogEnd(self._told.position, 0)

    async def stored(self, after: int = 0, until: int | None = None) -> AsyncGenerator[Stored, None]:
        last = (await self.end()).seq if until is None else until
        if after >= last:
            return
        async with aclosing(self.newer(after)) as batches:
            async for batch in batches:
                for stored in batch:
                    if stored.seq <= last:
                        yield stored
                if batch and batch[-1].seq >= last:
                    return

    async def newer(self, after: int | None, last: Stored | None = None) -> AsyncGenerator[list[Stored], None]:
        """Yield the events that the gateway sends after a position, or from the beginning, without end.

        `last` is sent again, to find out whether its log is still the same. Raises `NotOnLog` if it is another one."""
        if last is not None and last.data == UNKNOWN:
            last = None
        start = after if after is None or last is None else after - 1
        query, rest, reached = {} if start is None else {"after": str(start)}, b"", start
        try:
            async with (
                httpx.AsyncClient(**self._options) as http,
                http.stream("GET", "/events", params=query) as reply,
            ):
                await _check(reply)
                async for chunk in reply.aiter_raw():
                    *blocks, rest = (rest + chunk).split(b"\n\n")
                    batch: list[Stored] = []
                    for stored in filter(None, (self._take(block, after) for block in blocks)):
                        left_out = () if reached is None else range(reached + 1, stored.seq)
                        batch += [*(Stored(seq, "", UNKNOWN, {}, 0) for seq in left_out), stored]
                        reached = stored.seq
                    if batch and last is not None:
                        if batch[0].data != last.data:
                            raise NotOnLog(f"{self.title} has another log now: it is read from its beginning")
                        last = None
                        del batch[0]
                    yield batch
        except httpx.HTTPError as error:
            raise self._away(error) from error
        except msgspec.MsgspecError as error:
            raise LogCorrupted(f"what {self._url} sends cannot be read as the events of a hive: {error}") from error
        raise BusUnavailable(f"{self.title} is stopping")

    def _take(self, block: bytes, after: int | None) -> Stored | None:
        """Return the event that was sent, as the bus has it, if it was one."""
        position, sent = read_sent(block)
        if isinstance(sent, Told):
            if not sent.bus:
                raise BusUnavailable(f"the bus of {self.title} is away")
            if sent.state is None:
                self._told = sent
            elif after is None:
                self._began = sent
            else:
                raise NotOnLog(f"the log was compacted beyond event {after}: it is read again")
        elif position is not None:
            known = (UNKNOWN, 0) if sent is None else (encode_event(sent), sent.at_ns)
            return Stored(position, "", known[0], {}, known[1])
        return None

    async def messages(self, stream: str, seqs: Sequence[int]) -> list[bytes | None]:
        return [await self._call(seq) if stream == CALLS else None for seq in seqs]

    async def _call(self, seq: int) -> bytes:
        reply = await self._request("GET", "/call_record", params={"seq": seq})
        try:
            await _check(reply)
        except SwarmError as error:
            raise LogCorrupted(str(error)) from error  # the rest of a transcript is shown
        return reply.content

    async def blob(self, name: str) -> bytes:
        raise BlobMissing(f"{self.title} does not show objects such as {name}")

    async def stop(self, engine: str) -> None:
        await self._send(f"/e/{engine}/stop_engine", {})

    async def abort(self, engine: str, record: EpisodeRecord) -> None:
        await self._send(f"/e/{engine}/stop_episode", {"episode": record.episode})

    async def _send(self, path: str, body: dict[str, str]) -> None:
        reply = await self._request("POST", path, json=body)
        await _check(reply)
        if why := reply.json().get("failure_reason"):
            raise Refused(Code.WRONG_PHASE, why)

    async def _request(self, method: str, path: str, **content: Any) -> httpx.Response:
        try:
            async with httpx.AsyncClient(**self._options) as http:
                return await http.request(method, path, **content)
        except httpx.HTTPError as error:
            raise self._away(error) from error

    def _away(self, error: httpx.HTTPError) -> BusUnavailable:
        return BusUnavailable(f"{self.title} is away: {error or type(error).__name__}")


class Told(msgspec.Struct, frozen=True):
    """How far the gateway has read the log, and whether it is connected to the bus. With a `state`, the stream begins
    at that position, with this snapshot or, if it is empty, with a log that has every event."""

    position: int
    bus: bool = True
    state: bytes | None = None


_told = msgspec.json.Decoder(Told)
_events: msgspec.json.Decoder[AnyEvent] = msgspec.json.Decoder(AnyEvent, strict=False)


async def _check(response: httpx.Response) -> None:
    """Raise `BusUnavailable` for an answer that may be another one later, and `SwarmError` for any other refusal."""
    if response.status_code != httpx.codes.OK:
        await response.aread()
        reply = reply_of(response)
        error = error_of(reply, response.url.path)
        if is_away(reply, error):
            raise BusUnavailable(error.why)
        raise error


def read_sent(block: bytes) -> tuple[int | None, Told | AnyEvent | None]:
    """Decode a server-sent event: its position, if it has one, and its data. Raises `msgspec.MsgspecError`.

    The data are None for a comment, and for an event that only a newer release understands, which every fold skips.
    """
    fields = {name: value for name, _, value in (line.partition(b": ") for line in block.split(b"\n"))}
    position = msgspec.json.decode(fields[b"id"], type=int) if b"id" in fields else None
    data = fields.get(b"data", b"")
    if b"event" in fields:
        return position, decoded(_told.decode, data)
    if data and position is None:
        raise msgspec.ValidationError("an event has no position; is this the address of a page, not of a gateway?")
    try:
        return position, decoded(_events.decode, data) if data else None
    except msgspec.ValidationError:
        return position, None
