"""The names of message headers, both our own and the server's that we set, and how much headers add to a message."""

from collections.abc import Mapping

from bombus.errors import Code, Refused

EPOCH = "Bombus-Epoch"  # on events: the epoch of the coordinator that wrote the event (R4)
INBOX = "Bombus-Inbox"  # on events: the sequence of the inbox message that the event answers (R2)
INBOX_DIGEST = "Bombus-Inbox-Digest"  # on events: the digest of that message, since its sequence may be reused (R6)
TIME = "Bombus-Time"  # on events copied from another log: when they were written there, in nanoseconds
REPLY = "Bombus-Reply"  # on commands: the core NATS subject for the answer
TRACEPARENT = "traceparent"  # W3C trace context

MSG_ID = "Nats-Msg-Id"
EXPECTED_LAST = "Nats-Expected-Last-Sequence"
EXPECTED_LAST_OF_SUBJECT = "Nats-Expected-Last-Subject-Sequence"
EXPECTED_LAST_FILTER = "Nats-Expected-Last-Subject-Sequence-Subject"
BATCH_ID = "Nats-Batch-Id"
BATCH_SEQUENCE = "Nats-Batch-Sequence"
BATCH_COMMIT = "Nats-Batch-Commit"
ROLLUP = "Nats-Rollup"
TTL = "Nats-TTL"

_BLOCK_BYTES = len(b"NATS/1.0\r\n\r\n")
_LINE_BYTES = len(b": \r\n")
_UTF8_BYTES = 4  # maximum per character


def header_bytes(headers: Mapping[str, str]) -> int:
    """Return the size of these headers on the wire."""
    if not headers:
        return 0
    return _BLOCK_BYTES + sum(_LINE_BYTES + _bytes(name) + _bytes(value) for name, value in headers.items())


def check_size(limit: int, what: str, body: bytes, headers: Mapping[str, str]) -> None:
    """Raise `Refused` for a message that, with its headers, is over the server's limit: the server would close the
    connection.

    `what` names the message in the error.
    """
    characters = sum(map(len, headers)) + sum(map(len, headers.values()))
    if len(body) + _BLOCK_BYTES + _LINE_BYTES * len(headers) + _UTF8_BYTES * characters <= limit:
        return  # the usual case; faster to check than the exact size
    if len(body) + (extra := header_bytes(headers)) > limit:
        raise Refused(
            Code.TOO_LARGE,
            f"{what}: {len(body)} bytes and {extra} bytes of headers are over the {limit} bytes that the NATS server "
            "takes in one message (its max_payload); send less at once, or raise it in the server's configuration",
        )


def _bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())
