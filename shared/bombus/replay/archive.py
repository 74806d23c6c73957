"""A log as one file, for golden logs, bug reports, exports and backups.

The file is a gzip of frames, each a little-endian uint32 length and a msgpack struct: an `ArchiveHeader`; the events
byte for byte, in batches, each followed by the calls and tokenizers that its events name; the bodies of operations and
rollout groups that are still needed (since format 2); and a `Trailer`. A file without a trailer was cut off.
"""

import asyncio
import gzip
import sqlite3
import struct
import zlib
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal, NamedTuple, Self

import msgspec

from bombus.bus import BlobMissing, Stored, snapshots
from bombus.errors import LogCorrupted
from bombus.hive.decoding import decoded
from bombus.hive.state import Hive
from bombus.replay.source import CALLS, LogEnd, NotOnLog, Source

FORMAT = 2
FRAME_BYTES_MAX = 256 << 20
BLOBS = "blobs"
GZIP = 16 + zlib.MAX_WBITS
CHUNK_BYTES = 64 << 10
FRAMES_AT_ONCE = 256
PLACE_BYTES = 512 << 10  # unpacked, between two places; doubled whenever there are too many
PLACES_MAX = 512  # some 40 kB each
SEQ_MAX = (1 << 63) - 1
_Seq = Annotated[int, msgspec.Meta(ge=0, le=SEQ_MAX)]
_length = struct.Struct("<I")


class ArchiveHeader(msgspec.Struct, frozen=True, kw_only=True, tag="header", omit_defaults=True):
    """The first frame. `base` is a snapshot of the state before the first event, or empty if the log is not
    compacted."""

    format: int
    bombus: str
    hive: str
    last: int
    last_ns: int
    base: bytes = b""


class EventFrame(msgspec.Struct, frozen=True, tag="event", array_like=True):
    seq: _Seq
    time_ns: int
    subject: str
    headers: dict[str, str]
    data: bytes


class CallFrame(msgspec.Struct, frozen=True, tag="call", array_like=True):
    seq: _Seq
    data: bytes


class BlobFrame(msgspec.Struct, frozen=True, tag="blob", array_like=True):
    name: str
    data: bytes


class PartFrame(msgspec.Struct, frozen=True, tag="part", array_like=True):
    """A message from a stream of bodies."""

    stream: Literal["ops", "trajectories"]
    seq: _Seq
    data: bytes


class Trailer(msgspec.Struct, frozen=True, tag="trailer", array_like=True):
    """The last frame, with counts of what the file contains. `calls_gone` counts calls that were purged before the
    export or do not match their digest (R6).

    `groups` counts the log's rollout groups: the file has the sizes of all of them, but only the bodies that are still
    needed.
    """

    events: int
    calls: int
    blobs: int
    calls_gone: int = 0
    groups: int = 0


ArchiveFrame = EventFrame | CallFrame | BlobFrame | PartFrame | Trailer
_encoder = msgspec.msgpack.Encoder()
_header = msgspec.msgpack.Decoder(ArchiveHeader)
_frame: msgspec.msgpack.Decoder[ArchiveFrame] = msgspec.msgpack.Decoder(ArchiveFrame)


def pack(frame: ArchiveHeader | ArchiveFrame) -> bytes:
    """Encode a frame as it is stored in the file."""
    body = _encoder.encode(frame)
    return _length.pack(len(body)) + body


class _Place(NamedTuple):
    """A place in a file from which it can be read again: `last` is the event before it, and `unpacked` how many bytes
    are."""

    last: int
    offset: int
    unpacked: int
    gzip: "zlib._Decompress"
    rest: bytes


class _Unpacker:
    """Reads the bytes of an open gzip, from its beginning or from a place."""

    def __init__(self, file: BinaryIO, place: _Place | None = None) -> None:
        self._file = file
        self._gzip = zlib.decompressobj(GZIP) if place is None else place.gzip.copy()
        self._ready = bytearray(b"" if place is None else place.rest)
        self._used = 0
        self.unpacked = 0 if place is None else place.unpacked
        if place is not None:
            file.seek(place.offset)

    def place(self, last: int) -> _Place:
        return _Place(last, self._file.tell(), self.unpacked, self._gzip.copy(), bytes(self._ready[self._used :]))

    def read(self, size: int) -> bytes:
        """Return the next `size` bytes, or fewer at the end. Raises `EOFError` if the file was cut off, or
        `zlib.error`."""
        while len(self._ready) - self._used < size:
            packed = self._gzip.unused_data or self._file.read(CHUNK_BYTES)
            if not packed:
                if not self._gzip.eof:
                    raise EOFError
                break
            if self._gzip.eof:
                self._gzip = zlib.decompressobj(GZIP)
            del self._ready[: self._used]
            self._used = 0
            self._ready += self._gzip.decompress(packed)
        part = bytes(self._ready[self._used : self._used + size])
        self._used += len(part)
        self.unpacked += len(part)
        return part


class FileSource(Source):
    """A log in an archive. All calls, bodies and tokenizers are unpacked to a temporary file when one of them is first
    read."""

    def __init__(self, path: Path, header: ArchiveHeader, spool: sqlite3.Connection) -> None:
        self.title = str(path)
        self.hive = header.hive
        self.header = header
        self._path = path
        self._spool = spool
        self._unpacked = False
        self._unpacking = asyncio.Lock()
        self._places: list[_Place] = []  # in order
        self._apart = PLACE_BYTES

    @classmethod
    @contextmanager
    def open(cls, path: Path) -> Iterator[Self]:
        """Open an archive. Raises `NotOnLog` if the file is not an archive that this version can read."""
        if not path.is_file():
            raise NotOnLog(f"there is no file {path}")
        header = read_header(path)
        with closing(sqlite3.connect("")) as spool:  # an empty name means a temporary file
            yield cls(path, header, spool)

    async def base(self) -> tuple[Hive, int]:
        if not self.header.base:
            return Hive(), 0
        start = snapshots.decode(self.header.base)
        return start.hive, start.position

    async def end(self) -> LogEnd:
        return LogEnd(self.header.last, self.header.last_ns)

    async def stored(self, after: int = 0, until: int | None = None) -> AsyncGenerator[Stored, None]:
        last = self.header.last if until is None else min(until, self.header.last)
        if after >= last:
            return
        place = next((place for place in reversed(self._places) if place.last <= after), None)
        with self._path.open("rb") as file:
            unpacker = _Unpacker(file, place)
            for frame in _frames(self._path, unpacker):
                if not isinstance(frame, EventFrame):
                    continue
                self._remember(unpacker, frame.seq)
                if frame.seq > last:
                    return
                if frame.seq > after:
                    yield Stored(frame.seq, frame.subject, frame.data, frame.headers, frame.time_ns)

    def _remember(self, unpacker: _Unpacker, last: int) -> None:
        """Remember a place now and then, so that reading from the middle need not begin at the start of the file."""
        known = self._places[-1].unpacked if self._places else 0
        if unpacker.unpacked >= known + self._apart:
            self._places.append(unpacker.place(last))
            if len(self._places) > PLACES_MAX:
                del self._places[1::2]
                self._apart *= 2

    async def messages(self, stream: str, seqs: Sequence[int]) -> list[bytes | None]:
        await self._unpack_gradually()
        return [self._kept(stream, seq) for seq in seqs]

    async def blob(self, name: str) -> bytes:
        await self._unpack_gradually()
        body = self._kept(BLOBS, name)
        if body is None:
            raise BlobMissing(f"{self._path} has no object {name}")
        return body

    def all_messages(self, stream: str) -> Iterator[tuple[int, bytes]]:
        """Yield the sequence number and data of each message of a stream, in ascending order."""
        return self._all_kept(stream)

    def all_blobs(self) -> Iterator[tuple[str, bytes]]:
        return self._all_kept(BLOBS)

    def _all_kept(self, stream: str) -> Iterator[tuple[Any, bytes]]:
        return self._unpack().execute("SELECT key, data FROM kept WHERE stream = ? ORDER BY key", (stream,))

    def _kept(self, stream: str, key: int | str) -> bytes | None:
        if isinstance(key, int) and key > SEQ_MAX:
            return None
        query = self._unpack().execute("SELECT data FROM kept WHERE stream = ? AND key = ?", (stream, key))
        found: tuple[bytes] | None = query.fetchone()
        return None if found is None else found[0]

    async def _unpack_gradually(self) -> None:
        """Unpack the file while other tasks go on, since that can take long."""
        async with self._unpacking:
            for _ in self._unpack_parts():
                await asyncio.sleep(0)

    def _unpack(self) -> sqlite3.Connection:
        for _ in self._unpack_parts():
            pass
        return self._spool

    def _unpack_parts(self) -> Iterator[None]:
        """Unpack the file, pausing now and then."""
        if self._unpacked:
            return
        rows: list[tuple[str, int | str, bytes]] = []
        try:
            self._spool.execute("CREATE TABLE IF NOT EXISTS kept (stream, key, data, PRIMARY KEY (stream, key))")
            with self._path.open("rb") as file:
                for number, frame in enumerate(_frames(self._path, _Unpacker(file)), 1):
                    if (row := _row(frame)) is not None:
                        rows.append(row)
                    if number % FRAMES_AT_ONCE == 0 or isinstance(frame, Trailer):
                        self._spool.executemany("INSERT OR REPLACE INTO kept VALUES (?, ?, ?)", rows)
                        rows.clear()
                        yield
        except sqlite3.OperationalError as error:
            raise OSError(f"{self._path} cannot be unpacked into the temporary folder: {error}") from error
        self._unpacked = True


def _row(frame: ArchiveFrame) -> tuple[str, int | str, bytes] | None:
    """Return the stream, key and data of a call, body or tokenizer, or None for other frames."""
    match frame:
        case CallFrame():
            return CALLS, frame.seq, frame.data
        case PartFrame():
            return frame.stream, frame.seq, frame.data
        case BlobFrame():
            return BLOBS, frame.name, frame.data
        case _:
            return None


def read_header(path: Path) -> ArchiveHeader:
    """Return an archive's header. Raises `NotOnLog` if the file is not an archive, and `LogCorrupted` if it was cut
    off."""
    try:
        with gzip.open(path) as file:
            header = decoded(_header.decode, _body(file, path))
    except (gzip.BadGzipFile, zlib.error, msgspec.MsgspecError) as error:
        raise NotOnLog(f"{path} is not an archive of a log; `bombus log export` makes one") from error
    except EOFError as error:
        raise _cut_off(path) from error
    if header.format > FORMAT:
        raise NotOnLog(
            f"{path} has format {header.format}, written by bombus {header.bombus}; this version reads up to format "
            f"{FORMAT}: upgrade bombus"
        )
    return header


def _frames(path: Path, unpacker: _Unpacker) -> Iterator[ArchiveFrame]:
    """Yield everything after the header, or after a place. Raises `LogCorrupted` for a file that is damaged or was cut
    off."""
    try:
        if not unpacker.unpacked:
            _body(unpacker, path)
        while True:
            frame = decoded(_frame.decode, _body(unpacker, path))
            yield frame
            if isinstance(frame, Trailer):
                unpacker.read(1)  # read up to the end of the gzip, where its checksum is
                return
    except EOFError as error:
        raise _cut_off(path) from error
    except (zlib.error, msgspec.MsgspecError) as error:
        raise LogCorrupted(f"{path} is damaged ({error}): export the log again") from error


def _body(file: _Unpacker | gzip.GzipFile, path: Path) -> bytes:
    head = file.read(_length.size)
    if len(head) < _length.size:
        raise EOFError
    (length,) = _length.unpack(head)
    if length > FRAME_BYTES_MAX:
        raise LogCorrupted(f"{path} is damaged: it has a frame of {length} bytes")
    body = file.read(length)
    if len(body) < length:
        raise EOFError
    return body


def _cut_off(path: Path) -> LogCorrupted:
    return LogCorrupted(f"{path} was cut off before its end: copy it again, or export the log again")
