"""Reads and writes a folder of archives with the events that compactions removed from a log. Each archive continues the
previous one."""

import re
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Self

import msgspec

from bombus.bus import BlobMissing, Bus, Stored
from bombus.errors import Code, Refused
from bombus.hive.state import Hive
from bombus.replay.archive import FileSource, read_header
from bombus.replay.export import export
from bombus.replay.source import BusSource, LogEnd, NotOnLog, Source

_NAME = re.compile(r"^([a-z0-9][a-z0-9-]{0,31})-(\d{16})-(\d{16})\.bombuslog\Z")
_DRAFT = re.compile(r"^\.([a-z0-9][a-z0-9-]{0,31})-\d{16}-\d{16}\.bombuslog-\w+\Z")


class LogSegment(msgspec.Struct, frozen=True):
    """An archive of the events `first` to `last` of a hive."""

    path: Path
    hive: str
    first: int
    last: int


def segments(folder: Path, hive: str) -> list[LogSegment]:
    """Return a hive's archives in a folder, oldest first."""
    return sorted((each for each in _of_all_hives(folder) if each.hive == hive), key=lambda each: each.last)


def _of_all_hives(folder: Path) -> Iterator[LogSegment]:
    named = ((path, _NAME.match(path.name)) for path in folder.iterdir())
    return (LogSegment(path, name[1], int(name[2]), int(name[3])) for path, name in named if name is not None)


def remove_drafts(folder: Path, hive: str) -> None:
    """Remove the drafts left by processes that were killed while writing an archive of this hive."""
    for path in folder.iterdir():
        name = _DRAFT.match(path.name)
        if name is not None and name[1] == hive:
            path.unlink(missing_ok=True)


async def archived_up_to(bus: Bus, folder: Path) -> int:
    """Return the number of the last event of this log that is in the folder, or 0 if none is.

    Raises `Refused` if the folder has archives of a different log under this hive's name.
    """
    found = segments(folder, bus.subjects.hive)
    if not found:
        return 0
    newest = found[-1]
    stream = bus.subjects.events_stream
    state = await bus.state(stream)
    if state.first_seq <= newest.last <= state.last_seq:
        if (await bus.get(stream, newest.last)).written_ns == read_header(newest.path).last_ns:
            return newest.last
    elif newest.last < state.first_seq:
        return newest.last
    raise Refused(
        Code.BAD_CONFIG,
        f"{newest.path} belongs to another log, of a hive that is also named {bus.subjects.hive}: name another folder "
        "with --archive",
    )


async def archive_part(bus: Bus, folder: Path, base: tuple[Hive, int], last: int) -> Path:
    """Write the events after `base` up to `last` as the next archive. It appears only once it is complete and durable.

    Calls are not included, because they have their own stream and retention. Raises `LogCorrupted`, `BusUnavailable` or
    `OSError`.
    """
    ends = await bus.get(bus.subjects.events_stream, last)
    part = _Part(BusSource(bus, "the log"), base, LogEnd(last, ends.written_ns))
    path = folder / f"{bus.subjects.hive}-{base[1] + 1:016d}-{last:016d}.bombuslog"
    await export(part, path, with_calls=False)
    return path


class _Part(Source):
    """A part of a log, beginning with the state before it."""

    def __init__(self, whole: Source, base: tuple[Hive, int], end: LogEnd) -> None:
        self.title = whole.title
        self.hive = whole.hive
        self._whole = whole
        self._base = base
        self._end = end

    async def base(self) -> tuple[Hive, int]:
        return self._base

    async def end(self) -> LogEnd:
        return self._end

    def stored(self, after: int = 0, until: int | None = None) -> AsyncGenerator[Stored, None]:
        last = self._end.seq if until is None else min(until, self._end.seq)
        return self._whole.stored(max(after, self._base[1]), last)

    async def messages(self, stream: str, seqs: Sequence[int]) -> list[bytes | None]:
        return await self._whole.messages(stream, seqs)

    async def blob(self, name: str) -> bytes:
        return await self._whole.blob(name)


class FolderSource(Source):
    """The log in a folder of archives: the newest archive and those before it, back to the first gap."""

    def __init__(self, folder: Path, parts: Sequence[FileSource]) -> None:
        self.title = str(folder)
        self.hive = parts[0].hive
        self._parts = parts

    @classmethod
    @contextmanager
    def open(cls, folder: Path, hive: str | None) -> Iterator[Self]:
        """Open the archives of a hive, by default the only one. Raises `NotOnLog` if there is no hive, or more than
        one."""
        found = _newest_chain(segments(folder, _hive_in(folder, hive)))
        with ExitStack() as files:
            yield cls(folder, [files.enter_context(FileSource.open(each.path)) for each in found])

    async def base(self) -> tuple[Hive, int]:
        return await self._parts[0].base()

    async def end(self) -> LogEnd:
        return await self._parts[-1].end()

    async def stored(self, after: int = 0, until: int | None = None) -> AsyncGenerator[Stored, None]:
        for part in self._parts:
            if (await part.end()).seq > after:
                async for stored in part.stored(after, until):
                    yield stored

    async def messages(self, stream: str, seqs: Sequence[int]) -> list[bytes | None]:
        return [None] * len(seqs)

    async def blob(self, name: str) -> bytes:
        raise BlobMissing(f"{self.title} has no object {name}: the archives of compactions have only events")


def _hive_in(folder: Path, wanted: str | None) -> str:
    names = sorted({each.hive for each in _of_all_hives(folder)})
    if wanted in names or (wanted is None and len(names) == 1):
        return wanted or names[0]
    if not names or wanted is not None:
        raise NotOnLog(
            f"{folder} has no archives{f' of hive {wanted}' if wanted else ''} that a compaction has written"
        )
    raise NotOnLog(f"{folder} has archives of several hives: choose one of {', '.join(names)} with --hive")


def _newest_chain(found: Sequence[LogSegment]) -> list[LogSegment]:
    chain = [found[-1]]
    for segment in reversed(found[:-1]):
        if segment.last != chain[0].first - 1:
            break
        chain.insert(0, segment)
    return chain
