"""nats-py, with less to import, to publish and to receive.

It is imported without aiohttp, which would cost each process 12 MB and 0.2 s, and is needed only for websockets:
`allow_websockets` imports aiohttp then. If the program has already imported either package, nothing changes.
"""

import logging
import re
import ssl
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

if not sys.modules.keys() & {"nats", "aiohttp"}:
    sys.modules["aiohttp"] = None  # type: ignore[assignment]  # as if it were not installed
    try:
        import nats  # noqa: F401
    finally:
        del sys.modules["aiohttp"]

from nats.aio.client import Client
from nats.errors import Error

from bombus.machine.certificates import trusted

# nats-py makes its readers of TLS without saying that they are, of which asyncio warns at the end of each connection.
logging.getLogger("asyncio").addFilter(lambda record: "eof_received() has no effect" not in record.getMessage())

Receive = Callable[[str, str, bytes, bytes], None]  # takes a message: subject, reply, body and block of headers

_LINE = re.compile(r"HPUB [^ \t\r\n]+ [^ \t\r\n]+ [0-9]+ [0-9]+")


class LeanClient(Client):  # type: ignore[misc]  # nats-py is not typed
    """nats-py's client, with a shorter way for the messages of a publisher, and for what a process receives most.

    nats-py spends more on a message than encoding it takes: it looks for bad names in each header, and passes what it
    receives through a queue to a task. A login is sent only over TLS if `is_tls`.
    """

    def __init__(self, is_tls: bool = False) -> None:
        super().__init__()
        self._is_tls = is_tls
        self._receivers: dict[int, Receive] = {}  # by the id of a subscription

    async def receive(self, subject: str, receive: Receive) -> Any:
        """Subscribe to `subject`, and call `receive` with each message, in the turn of the loop in which it arrives.
        Return the subscription."""
        sid = self._sid + 1  # which `subscribe` takes before it waits
        self._receivers[sid] = receive
        try:
            return await self.subscribe(subject)
        except BaseException:
            del self._receivers[sid]
            raise

    def _remove_sub(self, sid: int, max_msgs: int = 0) -> None:
        super()._remove_sub(sid, max_msgs)
        self._receivers.pop(sid, None)

    async def publish_short(self, subject: str, body: bytes, reply: str, headers: Mapping[str, str]) -> None:
        """Send what `publish` sends, for headers whose names are known to be right. Raises the same errors."""
        block = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
        encoded = f"NATS/1.0\r\n{block}\r\n".encode()
        line = f"HPUB {subject} {reply} {len(encoded)} {len(encoded) + len(body)}"
        is_plain = block.count("\n") == block.count("\r") == len(headers) and _LINE.fullmatch(line)
        if not (is_plain and self.is_connected and not self.is_draining):
            await self.publish(subject, body, reply, dict(headers))
            return
        self.stats["out_msgs"] += 1
        self.stats["out_bytes"] += len(body)
        await self._send_command(b"".join((line.encode(), b"\r\n", encoded, body, b"\r\n")))
        if self._flush_queue.empty():
            await self._flush_pending()

    async def _process_msg(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes | None) -> None:
        receive = self._receivers.get(sid)
        if receive is None:
            await super()._process_msg(sid, subject, reply, data, headers)
            return
        self.stats["in_msgs"] += 1
        self.stats["in_bytes"] += len(data)
        try:
            receive(subject.decode(), reply.decode(), data, headers or b"")
        except Exception as error:  # nats-py treats the errors of a subscription's callback in the same way
            await self._error_cb(error)

    @property
    def ssl_context(self) -> ssl.SSLContext:
        return trusted()

    def _connect_command(self) -> bytes:
        # A server, or whoever is between, that does not offer TLS would get the password otherwise.
        if self._is_tls and self._transport._io_writer.get_extra_info("ssl_object") is None:
            raise Error("the server does not speak TLS, which the address asks for (tls://)")
        return bytes(super()._connect_command())


def allow_websockets(url: str) -> None:
    """Import aiohttp for nats-py if `url` needs it (`ws://` or `wss://`). If it is not installed, nats-py says so."""
    if not any(scheme in url for scheme in ("ws://", "wss://")):
        return
    from nats.aio import transport

    with suppress(ModuleNotFoundError):
        import aiohttp

        transport.aiohttp = aiohttp
