"""Imports nats-py without aiohttp, which it needs only for websockets: that would cost each process 12 MB and 0.2 s.

`allow_websockets` makes up for it. A program that has imported either of the two itself keeps what it has.
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
    """Let nats-py have aiohttp, which servers at `ws://` or `wss://` need. Where it is missing, nats-py says so."""
    if not any(scheme in url for scheme in ("ws://", "wss://")):
        return
    from nats.aio import transport

    with suppress(ModuleNotFoundError):
        import aiohttp

        transport.aiohttp = aiohttp
