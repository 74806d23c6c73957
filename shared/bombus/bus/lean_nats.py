"""Imports nats-py without aiohttp, which it has for websockets: 12 MB and a fifth of a second of each process.

What imports nats-py afterwards finds it as it is here: a server at `ws://` is refused, with the reason. A program that
has imported either of the two itself keeps what it has.
"""

import sys

if not sys.modules.keys() & {"nats", "aiohttp"}:
    sys.modules["aiohttp"] = None  # type: ignore[assignment]  # as if it were not installed
    try:
        import nats  # noqa: F401
    finally:
        del sys.modules["aiohttp"]
