"""A client of bytes: sends what it is given, and returns what came back and how that ended."""

import asyncio
import contextlib
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum, auto

import httptools

ANSWER_BYTES = 64 << 20
Address = tuple[str, int]


class Ended(StrEnum):
    CLOSED = auto()  # by the server
    RESET = auto()  # by the server, which did not read all that was sent
    LEFT = auto()  # by us
    REFUSED = auto()  # there was no connection


@dataclass(frozen=True)
class Received:
    body: bytes
    ended: Ended


@dataclass
class HttpAnswer:
    status: int = 0
    body: bytes = b""
    complete: bool = False


async def exchange(address: Address, chunks: Sequence[bytes | float], within_s: float, reads: int | None) -> Received:
    """Send `chunks`, with pauses between them, and read until the server closes.

    Hangs up after `within_s`, or with `reads` after so many bytes, then by a reset.
    """
    try:
        reader, writer = await asyncio.open_connection(*address, limit=1 << 20)
    except OSError:
        return Received(b"", Ended.REFUSED)
    received = bytearray()
    ended = Ended.LEFT
    sending = asyncio.create_task(_send(writer, chunks))
    try:
        async with asyncio.timeout(within_s):
            while reads is None or len(received) < reads:
                part = await reader.read(1 << 16)
                if not part or len(received) > ANSWER_BYTES:
                    ended = Ended.CLOSED
                    break
                received += part
    except TimeoutError:
        pass
    except OSError:
        ended = Ended.RESET
    finally:
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        if reads is not None:
            _reset_on_close(writer)
        writer.close()
    return Received(bytes(received), ended)


async def _send(writer: asyncio.StreamWriter, chunks: Sequence[bytes | float]) -> None:
    with contextlib.suppress(OSError):  # the server may refuse before it has everything
        for chunk in chunks:
            if isinstance(chunk, float):
                await asyncio.sleep(chunk)
            else:
                writer.write(chunk)
                await writer.drain()


def _reset_on_close(writer: asyncio.StreamWriter) -> None:
    if not writer.is_closing():  # else asyncio may have closed the socket, as it does when a write fails
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


class _Parser:
    """Collects the answers of one connection for httptools."""

    def __init__(self) -> None:
        self.answers: list[HttpAnswer] = []
        self.parser = httptools.HttpResponseParser(self)

    def on_message_begin(self) -> None:
        self.answers.append(HttpAnswer())

    def on_headers_complete(self) -> None:
        self.answers[-1].status = self.parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self.answers[-1].body += body

    def on_message_complete(self) -> None:
        self.answers[-1].complete = True


def answers_in(received: bytes) -> list[HttpAnswer]:
    """Return the answers that a server has sent. Raises `ValueError` for what is not HTTP."""
    collecting = _Parser()
    try:
        collecting.parser.feed_data(received)
    except httptools.HttpParserUpgrade:
        pass
    except httptools.HttpParserError as error:
        raise ValueError(f"an answer that is not HTTP: {error}: {received[:200]!r}") from error
    return collecting.answers
