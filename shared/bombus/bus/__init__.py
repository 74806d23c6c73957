"""The bus: NATS JetStream as bombus uses it. Needs nats-py (`bombus[bus]`); the SDK does without this package."""

from bombus.bus.blobs import BlobMissing
from bombus.bus.connection import Bus
from bombus.bus.flight import Outgoing, fly, log_id
from bombus.bus.headers import EPOCH, INBOX, REPLY, TRACEPARENT
from bombus.bus.reader import Reader
from bombus.bus.server import EmbeddedServer
from bombus.bus.streams import StreamLimits
from bombus.bus.wire import AckLost, PubAck, ServerRefused, Stored, StreamState, WrongSequence

__all__ = [
    "EPOCH",
    "INBOX",
    "REPLY",
    "TRACEPARENT",
    "AckLost",
    "BlobMissing",
    "Bus",
    "EmbeddedServer",
    "Outgoing",
    "PubAck",
    "Reader",
    "ServerRefused",
    "Stored",
    "StreamLimits",
    "StreamState",
    "WrongSequence",
    "fly",
    "log_id",
]
