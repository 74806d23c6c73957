"""The bus: NATS JetStream as bombus uses it. It needs nats-py (`bombus[bus]`); the SDK does not."""

import bombus.bus.lean_nats  # noqa: F401  # before what imports nats-py
from bombus.bus.append import Outgoing, append, log_id
from bombus.bus.blobs import BlobMissing, Blobs
from bombus.bus.connection import Bus
from bombus.bus.headers import EPOCH, INBOX, INBOX_DIGEST, REPLY, TRACEPARENT
from bombus.bus.reader import Reader
from bombus.bus.server import EmbeddedServer
from bombus.bus.wire import AckLost, MessagePlace, PubAck, ServerRefused, Stored, StreamFull, StreamState, WrongSequence

__all__ = [
    "EPOCH",
    "INBOX",
    "INBOX_DIGEST",
    "REPLY",
    "TRACEPARENT",
    "AckLost",
    "BlobMissing",
    "Blobs",
    "Bus",
    "EmbeddedServer",
    "MessagePlace",
    "Outgoing",
    "PubAck",
    "Reader",
    "ServerRefused",
    "Stored",
    "StreamFull",
    "StreamState",
    "WrongSequence",
    "append",
    "log_id",
]
