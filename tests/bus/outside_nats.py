"""A nats-server with the default size of messages, 1 MB, as an operator's own server has it."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from bombus.bus import EmbeddedServer

DEFAULT_PAYLOAD_BYTES = 1 << 20


class OutsideServer(EmbeddedServer):
    """A server whose configuration does not say how large messages may be."""

    def _config(self) -> str:
        config, count = re.subn(r"^max_payload: \d+\n", "", super()._config(), flags=re.MULTILINE)
        assert count == 1
        return config


@asynccontextmanager
async def outside_nats(folder: Path) -> AsyncIterator[OutsideServer]:
    """Run such a server for the length of the block."""
    server = OutsideServer(folder, store_bytes_max=100 << 30)
    try:
        await asyncio.to_thread(server.start)
        yield server
    finally:
        await asyncio.to_thread(server.stop, 2)
