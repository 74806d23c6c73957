"""A nats-server whose operator decides how large messages may be: 1 MB, unless the configuration says otherwise."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from bombus.bus import EmbeddedServer

DEFAULT_PAYLOAD_BYTES = 1 << 20


class OutsideServer(EmbeddedServer):
    """A server that takes messages of `payload` bytes from its next start on; None: of the server's own default."""

    payload: int | None = None

    def _config(self) -> str:
        line = "" if self.payload is None else f"max_payload: {self.payload}\n"
        config, count = re.subn(r"^max_payload: \d+\n", line, super()._config(), flags=re.MULTILINE)
        assert count == 1
        return config


@asynccontextmanager
async def outside_nats(folder: Path, payload: int | None = None) -> AsyncIterator[OutsideServer]:
    """Run such a server for the length of the block."""
    server = OutsideServer(folder, store_bytes_max=100 << 30)
    server.payload = payload
    try:
        await asyncio.to_thread(server.start)
        yield server
    finally:
        await asyncio.to_thread(server.stop, 2)
