"""Imports nats-py without aiohttp, which would cost each process 12 MB and 0.2 s, and is needed only for websockets.

`allow_websockets` imports aiohttp if it is needed. If the program has already imported either package, nothing changes.
"""

import sys
from contextlib import suppress

if not sys.modules.keys() & {"nats", "aiohttp"}:
    sys.modules["aiohttp"] = None  # type: ignore[assignment]  # as if it were not installed
    try:
        import nats  # noqa: F401
    finally:
        del sys.modules["aiohttp"]


def allow_websockets(url: str) -> None:
    """Import aiohttp for nats-py if `url` needs it (`ws://` or `wss://`). If it is not installed, nats-py says so."""
    if not any(scheme in url for scheme in ("ws://", "wss://")):
        return
    from nats.aio import transport

    with suppress(ModuleNotFoundError):
        import aiohttp

        transport.aiohttp = aiohttp
