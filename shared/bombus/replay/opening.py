"""Opens the log that a command line names: in a running hive, in a stopped hive's data folder, or in an archive."""

import argparse
import asyncio
import os
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from bombus.bus import Bus, EmbeddedServer, ServerRefused
from bombus.bus.wire import STREAM_NOT_FOUND
from bombus.cli import DEFAULT_NATS, URL_FILE
from bombus.replay.archive import FileSource
from bombus.replay.segments import FolderSource
from bombus.replay.source import BusSource, NotOnLog, Source

CONNECT_S = 10.0
NATS_PORT = 4222
STREAMS = "nats/jetstream/jetstream/*/streams/BOMBUS_*_events"  # in a data folder: the events of its hives
PROBE_S = 2.0  # time to find out whether a hive is still running on a data folder
STORE_BYTES_MAX = 1 << 50  # streams reserve their limits; a server that only reads must not fail for lack of disk space


def add_source_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that say which log to read (see `open_source`)."""
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--nats", metavar="URL", help="the log of a running hive (default: $BOMBUS_NATS)")
    where.add_argument(
        "--data",
        metavar="DIR",
        type=Path,
        help="the data folder of a hive, running or stopped (default: .bombus, if it exists)",
    )
    where.add_argument(
        "--log",
        metavar="FILE",
        type=Path,
        help="an archive made by `bombus log export`, or the folder in which compactions archive",
    )
    parser.add_argument(
        "--hive", metavar="NAME", help="which hive, if the bus has several (default: $BOMBUS_HIVE, or main)"
    )


def arguments_for(log: str, hive: str | None = None) -> argparse.Namespace:
    """Return the arguments that name a log by one word: a data folder, an archive, a folder of archives, or the address
    of a bus."""
    path, is_bus = Path(log), "://" in log
    is_data = not is_bus and ((path / "nats").is_dir() or (path / URL_FILE.name).is_file())
    return argparse.Namespace(
        nats=log if is_bus else None,
        data=path if is_data else None,
        log=None if is_bus or is_data else path,
        hive=hive,
    )


@asynccontextmanager
async def open_source(arguments: argparse.Namespace) -> AsyncIterator[Source]:
    """Open the log that the command line names. Raises `NotOnLog` if there is none, or `BusUnavailable`."""
    hive = arguments.hive or os.environ.get("BOMBUS_HIVE", "main")
    url = arguments.nats or os.environ.get("BOMBUS_NATS", "")
    if arguments.log is not None:
        folder = arguments.log.is_dir()
        with FolderSource.open(arguments.log, arguments.hive) if folder else FileSource.open(arguments.log) as archive:
            yield archive
    elif arguments.data is not None or (not url and URL_FILE.parent.is_dir()):
        data = arguments.data or URL_FILE.parent
        async with _on_folder(data, arguments.hive) as source:
            yield source
    else:
        async with _on_bus(url or DEFAULT_NATS, hive, f"hive {hive}") as source:
            yield source


@asynccontextmanager
async def _on_bus(url: str, hive: str, title: str, running: bool = True) -> AsyncIterator[BusSource]:
    async with await Bus.connect(url, hive, name="replay", timeout_s=CONNECT_S, patient=False) as bus:
        try:
            await bus.state(bus.subjects.events_stream)
        except ServerRefused as refused:
            if refused.err_code != STREAM_NOT_FOUND:
                raise
            raise NotOnLog(f"there is no hive {hive} on this bus; name yours with --hive") from refused
        yield BusSource(bus, title, running)


@asynccontextmanager
async def _on_folder(data: Path, hive: str | None) -> AsyncIterator[BusSource]:
    """Use the bus of the hive that runs on the folder. If no hive does, start a server on the folder's files while they
    are read."""
    running = data / URL_FILE.name
    if running.is_file():
        url = running.read_text().strip()
        if await _still_runs(data, url):
            async with _on_bus(url, hive or "main", f"the log in {data}") as source:
                yield source
            return
    name = _hive_in(data, hive)
    with _served(data / "nats") as server:
        await asyncio.to_thread(server.start)
        async with _on_bus(server.url, name, f"the log in {data}", running=False) as source:
            yield source


async def _still_runs(data: Path, url: str) -> bool:
    """Return whether the bus at the address in a data folder belongs to that folder.

    A killed hive leaves its address behind, and another server may be using the port by now. An external bus is
    identified by its address alone.
    """
    ours = data / "nats" / "nats-server.conf"
    expected = re.search(r"^server_name: (\S+)$", ours.read_text(), re.MULTILINE) if ours.is_file() else None
    for server in url.split(","):
        place = urlsplit(server)
        try:
            async with asyncio.timeout(PROBE_S):
                reader, writer = await asyncio.open_connection(place.hostname, place.port or NATS_PORT)
                with closing(writer):
                    greeting = await reader.readline()
        except (OSError, TimeoutError):
            continue
        name = re.search(rb'"server_name":"([^"]*)"', greeting)
        if greeting.startswith(b"INFO ") and (expected is None or (name and name[1].decode() == expected[1])):
            return True
    return False


@contextmanager
def _served(folder: Path) -> Iterator[EmbeddedServer]:
    server = EmbeddedServer(folder, store_bytes_max=STORE_BYTES_MAX)
    try:
        yield server
    finally:
        server.stop()


def _hive_in(data: Path, wanted: str | None) -> str:
    """Return the name of the hive whose log is in a data folder. Raises `NotOnLog`."""
    streams = data.glob(STREAMS)
    names = sorted(stream.name.removeprefix("BOMBUS_").removesuffix("_events") for stream in streams)
    if wanted in names or (wanted is None and len(names) == 1):
        return wanted or names[0]
    if not names:
        below = sorted(str(folder) for folder in data.glob("*/") if any(folder.glob(STREAMS)))
        if below:
            raise NotOnLog(f"{data} has no log, but a folder in it has: use --data {' or '.join(below)}")
        raise NotOnLog(f"{data} has no log: name the folder that was given to `bombus up --data-dir`")
    if wanted is None:
        raise NotOnLog(f"{data} has several hives: choose one of {', '.join(names)} with --hive")
    raise NotOnLog(f"{data} has no hive {wanted}; its hives are {', '.join(names)}")
