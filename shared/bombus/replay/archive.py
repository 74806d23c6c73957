"""A log as one file: for golden logs, bug reports and exports.

A gzip of frames, each a little-endian uint32 length and a msgpack struct: an `ArchiveHeader`, the events byte for byte,
each followed by the calls that it names, the tokenizers, and a `Trailer`. A file without its trailer was cut off.
"""

import gzip
import struct
import tempfile
import zlib
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Self

import msgspec

from bombus.bus import BlobMissing, Stored, snapshots
from bombus.errors import LogCorrupted
from bombus.hive.decoding import decoded
from bombus.hive.records import CallRef
from bombus.hive.state import Hive
from bombus.replay.source import LogEnd, NotOnLog, Source

FORMAT = 1
FRAME_BYTES_MAX = 256 << 20
_length = struct.Struct("<I")


class ArchiveHeader(msgspec.Struct, frozen=True, kw_only=True, tag="header", omit_defaults=True):
    """`base` is a snapshot of the state before the first event; empty when the log starts at its beginning."""

    format: int
    bombus: str
    hive: str
    last: int
    last_ns: int
    base: bytes = b""


class EventFrame(msgspec.Struct, frozen=True, tag="event", array_like=True):
    seq: int
    time_ns: int
    subject: str
    headers: dict[str, str]
    data: bytes


class CallFrame(msgspec.Struct, frozen=True, tag="call", array_like=True):
    seq: int
    data: bytes


class BlobFrame(msgspec.Struct, frozen=True, tag="blob", array_like=True):
    name: str
    data: bytes


class Trailer(msgspec.Struct, frozen=True, tag="trailer", array_like=True):
    """How much there is. `calls_gone` counts calls that were purged before the export or fail their digest (R6).

    `groups` counts the scored groups of the log, of which the file has their sizes, and not their bodies.
    """

    events: int
    calls: int
    blobs: int
    calls_gone: int = 0
    groups: int = 0


ArchiveFrame = EventFrame | CallFrame | BlobFrame | Trailer
_encoder = msgspec.msgpack.Encoder()
_header = msgspec.msgpack.Decoder(ArchiveHeader)
_frame: msgspec.msgpack.Decoder[ArchiveFrame] = msgspec.msgpack.Decoder(ArchiveFrame)


def pack(frame: ArchiveHeader | ArchiveFrame) -> bytes:
    """Encode a frame as it is stored in the file."""
    body = _encoder.encode(frame)
    return _length.pack(len(body)) + body


class FileSource(Source):
    """A log in an archive. Calls and tokenizers are unpacked to a temporary file when the first of them is read."""

    def __init__(self, path: Path, header: ArchiveHeader, spool: IO[bytes]) -> None:
        self.title = str(path)
        self.hive = header.hive
        self._header = header
        self._path = path
        self._spool = spool
        self._spans: dict[int | str, tuple[int, int]] | None = None

    @classmethod
    @contextmanager
    def open(cls, path: Path) -> Iterator[Self]:
        """Open an archive. Raises `NotOnLog` when the file is not an archive that this version can read."""
        if not path.is_file():
            raise NotOnLog(f"there is no file {path}")
        with tempfile.TemporaryFile() as spool:
            yield cls(path, read_header(path), spool)

    async def base(self) -> tuple[Hive, int]:
        if not self._header.base:
            return Hive(), 0
        start = snapshots.decode(self._header.base)
        return start.hive, start.position

    async def end(self) -> LogEnd:
        return LogEnd(self._header.last, self._header.last_ns)

    async def stored(self, after: int = 0, until: int | None = None) -> AsyncGenerator[Stored, None]:
        last = self._header.last if until is None else min(until, self._header.last)
        if after >= last:
            return
        for frame in _frames(self._path):
            if isinstance(frame, EventFrame) and frame.seq > after:
                if frame.seq > last:
                    return
                yield Stored(frame.seq, frame.subject, frame.data, frame.headers, frame.time_ns)

    async def bodies(self, refs: Sequence[CallRef]) -> list[bytes | None]:
        return [self._unpacked(ref.seq) for ref in refs]

    async def blob(self, name: str) -> bytes:
        body = self._unpacked(name)
        if body is None:
            raise BlobMissing(f"{self._path} has no object {name}")
        return body

    def _unpacked(self, key: int | str) -> bytes | None:
        span = self._all_spans().get(key)
        if span is None:
            return None
        offset, length = span
        self._spool.seek(offset)
        return self._spool.read(length)

    def _all_spans(self) -> dict[int | str, tuple[int, int]]:
        """Return where each call and object is in the temporary file, as (offset, length)."""
        if self._spans is None:
            spans: dict[int | str, tuple[int, int]] = {}
            for frame in _frames(self._path):
                if isinstance(frame, CallFrame | BlobFrame):
                    key = frame.seq if isinstance(frame, CallFrame) else frame.name
                    spans[key] = (self._spool.tell(), len(frame.data))
                    self._spool.write(frame.data)
            self._spans = spans
        return self._spans


def read_header(path: Path) -> ArchiveHeader:
    """Return what an archive begins with. Raises `NotOnLog`, and `LogCorrupted` for a file that was cut off."""
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


def _frames(path: Path) -> Iterator[ArchiveFrame]:
    """Yield everything after the header. Raises `LogCorrupted` for a file that is damaged or was cut off."""
    try:
        with gzip.open(path) as file:
            _body(file, path)
            while True:
                frame = decoded(_frame.decode, _body(file, path))
                yield frame
                if isinstance(frame, Trailer):
                    file.read(1)  # reach the end of the gzip, where its checksum is
                    return
    except EOFError as error:
        raise _cut_off(path) from error
    except (gzip.BadGzipFile, zlib.error, msgspec.MsgspecError) as error:
        raise LogCorrupted(f"{path} is damaged ({error}): export the log again") from error


def _body(file: gzip.GzipFile, path: Path) -> bytes:
    head = file.read(_length.size)
    if len(head) < _length.size:
        raise EOFError
    (length,) = _length.unpack(head)
    if length > FRAME_BYTES_MAX:
        raise LogCorrupted(f"{path} is damaged: a frame of {length} bytes")
    body = file.read(length)
    if len(body) < length:
        raise EOFError
    return body


def _cut_off(path: Path) -> LogCorrupted:
    return LogCorrupted(f"{path} was cut off before its end: copy it again, or export the log again")
