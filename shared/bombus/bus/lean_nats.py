"""Imports nats-py without aiohttp, which it uses for websockets, and which would cost each process 12 MB and 0.2 s.

What imports nats-py afterwards finds it as it is here: it says of a server at `ws://` that aiohttp is not installed. A
program that has imported either of the two itself keeps what it has.
"""

import sys

if not sys.modules.keys() & {"nats", "aiohttp"}:
    sys.modules["aiohttp"] = None  # type: ignore[assignment]  # as if it were not installed
    try:
        import nats  # noqa: F401
    finally:
        del sys.modules["aiohttp"]
