"""What many tests share: one real nats-server for the whole run, and a hive of its own for each test."""

import itertools
import os
from collections.abc import AsyncIterator, Iterator

import pytest

from bombus.bus import Bus, EmbeddedServer, StreamLimits
from bombus.bus.streams import stream_configs

MB = 1 << 20
SMALL_STREAMS = StreamLimits(
    inbox_bytes_max=64 * MB, events_bytes_max=64 * MB, calls_bytes_max=64 * MB, blobs_bytes_max=64 * MB
)
_numbers = itertools.count(1)


@pytest.fixture(scope="session")
def nats_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a nats-server that runs for the whole session. Tests that kill one start their own."""
    # Streams reserve their limits. Tests make many hives and fill none, so the sum is not bounded by the disk.
    server = EmbeddedServer(tmp_path_factory.mktemp("nats"), store_bytes_max=100 << 40)
    server.start()
    yield server.url
    server.stop()


@pytest.fixture
def hive() -> str:
    """The name of a hive that no other test uses."""
    return f"t{os.getpid()}-{next(_numbers)}"


@pytest.fixture
async def bus(nats_url: str, hive: str) -> AsyncIterator[Bus]:
    """A connection to a hive whose streams are there, and are removed afterwards."""
    async with await Bus.connect(nats_url, hive, name="test") as bus:
        await bus.ensure_streams(SMALL_STREAMS)
        yield bus
        for config in stream_configs(bus.subjects, SMALL_STREAMS):
            await bus.requests.ask(f"$JS.API.STREAM.DELETE.{config['name']}")
