"""Decode what the server sends: stored messages, acknowledgements, errors. Pure functions and small structs."""

from collections.abc import Iterator, Mapping
from datetime import datetime
from types import MappingProxyType
from typing import Any, Protocol
from zlib import crc32

import msgspec

from bombus.bus.headers import INBOX, INBOX_DIGEST, MSG_ID, TIME
from bombus.config.streams import LIMIT_FLAGS, limit_flag
from bombus.errors import BombusError, BusUnavailable, Code, Refused

NO_HEADERS: Mapping[str, str] = MappingProxyType({})

NO_PEERS = 10005  # too few servers are known, for instance because a cluster has just started
NO_MESSAGE = 10037
STREAM_NOT_FOUND = 10059
NAME_IN_USE = 10058
NOT_A_CLUSTER = 10074  # a single server was asked for several replicas
STREAM_FULL = 10077
TOO_LITTLE_STORAGE = 10047
MESSAGE_TOO_LARGE = 10054
IN_PROCESS = 10158  # a replicated stream has received this message id before, but has no majority for it yet
# The codes for a wrong last sequence (10164 with three replicas), and for a batch that is partly stored already.
WRONG_SEQUENCE = frozenset({10071, 10164, 10201})


class WrongSequence(BombusError):
    """The stream does not end at the expected position: another writer appended to it, or the message was stored
    earlier."""


class AckLost(BusUnavailable):
    """No acknowledgement came, for instance because the connection broke. The message may or may not be stored."""


class StreamFull(BusUnavailable):
    """The stream accepts no more messages until old ones are purged or its limit is raised."""


class NotNow(BusUnavailable):
    """The server cannot do this now, for instance because a stream has no leader. Nothing was stored."""


class ServerRefused(BombusError):
    """The server understood the request and declined it, for a reason that a retry does not change. Most likely a bug
    in bombus."""

    def __init__(self, what: str, code: int, err_code: int, description: str) -> None:
        super().__init__(f"{what}: {description} ({code}, {err_code})")
        self.code = code
        self.err_code = err_code
        self.description = description


class MessagePlace(msgspec.Struct, frozen=True, gc=False):
    """The place of a message in a stream: its sequence, and a digest that would differ for another message at that
    sequence (R6).

    The digest is "" if it is not known, as for events written by versions that did not store digests.
    """

    seq: int = 0
    digest: str = ""


class Stored(msgspec.Struct, frozen=True, gc=False):
    """A message stored in a stream. `time_ns` is the server's clock when it was stored."""

    seq: int
    subject: str
    data: bytes
    headers: Mapping[str, str]
    time_ns: int

    @property
    def place(self) -> MessagePlace:
        """Return the message's place. Its digest contains the time of storage and a checksum of id and body."""
        checksum = crc32(self.data, crc32(self.headers.get(MSG_ID, "").encode()))
        return MessagePlace(self.seq, f"{self.time_ns:x}{checksum:08x}")

    @property
    def written_ns(self) -> int:
        """Return when this event was written or, for an imported event, when its original hive stored it."""
        return int(self.headers.get(TIME, self.time_ns))

    @property
    def answers(self) -> MessagePlace:
        """Return the inbox message that this event answers."""
        return MessagePlace(int(self.headers[INBOX]), self.headers.get(INBOX_DIGEST, ""))


class PubAck(msgspec.Struct, frozen=True, gc=False):
    """An acknowledgement. `duplicate` means that the message id was already stored, at `seq` (with one replica)."""

    seq: int
    duplicate: bool = False


class StreamState(msgspec.Struct, frozen=True):
    """The bounds and size of a stream. When the stream is empty, `first_seq` is `last_seq` + 1."""

    first_seq: int
    last_seq: int
    messages: int
    bytes: int
    max_bytes: int
    replicas: int
    late: int = 0  # number of replicas that are offline or have not caught up

    @property
    def fill(self) -> float:
        """Return the fraction of `max_bytes` in use, 0 when there is no limit."""
        return self.bytes / self.max_bytes if self.max_bytes > 0 else 0.0


class EpochFence(msgspec.Struct, frozen=True):
    """The position of an epoch's `epoch.opened`, or 0 if there is none. An append requires that this `epoch.opened` is
    the newest one."""

    epoch: int
    opened: int
    replicas: int


class ReceivedMessage(Protocol):
    """The part of nats-py's `Msg` that we use."""

    subject: str
    reply: str
    data: bytes
    headers: dict[str, str] | None


class ApiReply(Protocol):
    """The part that all of JetStream's API answers share."""

    @property
    def error(self) -> "ApiError | None": ...


# ---- the server's JSON answers -------------------------------------------------------------------------------


class ApiError(msgspec.Struct, frozen=True):
    code: int = 0
    err_code: int = 0
    description: str = ""


class _Ack(msgspec.Struct, frozen=True, gc=False):
    seq: int = 0
    duplicate: bool = False
    error: ApiError | None = None


class _RawMessage(msgspec.Struct, frozen=True):
    """A message in JSON. On the wire, `data` and `hdrs` are base64, which msgspec decodes."""

    subject: str
    seq: int
    time: str
    data: bytes = b""
    hdrs: bytes = b""


class GetReply(msgspec.Struct, frozen=True):
    message: _RawMessage | None = None
    error: ApiError | None = None


class _State(msgspec.Struct, frozen=True):
    first_seq: int = 0
    last_seq: int = 0
    messages: int = 0
    bytes: int = 0
    subjects: dict[str, int] = {}  # present only if the request has a filter


class _Config(msgspec.Struct, frozen=True):
    max_bytes: int = -1
    num_replicas: int = 1


class _Peer(msgspec.Struct, frozen=True):
    current: bool = False
    offline: bool = False


class _Cluster(msgspec.Struct, frozen=True):
    """The followers of a stream's leader. `replicas` is the server's name for them."""

    replicas: tuple[_Peer, ...] = ()


class InfoReply(msgspec.Struct, frozen=True):
    """The answer to STREAM.INFO, STREAM.CREATE and STREAM.UPDATE."""

    config: _Config = _Config()
    state: _State = _State()
    cluster: _Cluster = _Cluster()
    error: ApiError | None = None

    @property
    def stream_state(self) -> StreamState:
        state, config = self.state, self.config
        current = sum(peer.current and not peer.offline for peer in self.cluster.replicas)
        return StreamState(
            state.first_seq,
            state.last_seq,
            state.messages,
            state.bytes,
            config.max_bytes,
            config.num_replicas,
            late=config.num_replicas - 1 - current,
        )


class ConfigReply(msgspec.Struct, frozen=True):
    """The answer to STREAM.INFO with the complete configuration, which an update must repeat."""

    config: dict[str, Any] = {}
    state: _State = _State()
    error: ApiError | None = None


class PurgeReply(msgspec.Struct, frozen=True):
    purged: int = 0
    error: ApiError | None = None


class ConsumerReply(msgspec.Struct, frozen=True):
    error: ApiError | None = None


decode_get = msgspec.json.Decoder(GetReply).decode
decode_info = msgspec.json.Decoder(InfoReply).decode
decode_config = msgspec.json.Decoder(ConfigReply).decode
decode_purge = msgspec.json.Decoder(PurgeReply).decode
decode_consumer = msgspec.json.Decoder(ConsumerReply).decode
_decode_ack = msgspec.json.Decoder(_Ack).decode


def ack_of(body: bytes, what: str) -> PubAck | BombusError:
    """Return the acknowledgement in `body`, or the error to raise. `what` names the published message in the error."""
    ack = _decode_ack(body)
    if ack.error is None:
        return PubAck(ack.seq, ack.duplicate)
    return error_of(ack.error, what)


_STREAMS = {"inbox": "inbox", "event": "events", "call": "calls", "op": "ops", "trajectory": "trajectories"}


def _limit_flag(subject: str) -> str:
    """Return the flag that sets the size of the stream that takes this subject."""
    return limit_flag(_STREAMS.get(subject.split(".")[2] if subject.startswith("bombus.") else "", "blobs"))


def error_of(error: ApiError, what: str) -> BombusError:
    """Return the bombus error that corresponds to a server error."""
    if error.err_code in WRONG_SEQUENCE:
        return WrongSequence(f"{what}: {error.description}")
    if error.err_code == STREAM_FULL:
        return StreamFull(
            f"{what}: the stream is full ({error.description}); raise its limit with {_limit_flag(what)} of "
            "`bombus up`, or let old data be purged"
        )
    if error.err_code == TOO_LITTLE_STORAGE:
        return BusUnavailable(
            f"{what}: the server has too little storage left for the streams' limits; lower them ({LIMIT_FLAGS}) or "
            "give the server more disk"
        )
    if error.err_code == NOT_A_CLUSTER:
        return Refused(
            Code.BAD_CONFIG,
            f"{what}: --stream-replicas is refused, because this NATS server is not in a cluster; give --nats the "
            "servers of a "
            "cluster, or leave the streams at 1 replica",
        )
    if error.err_code == MESSAGE_TOO_LARGE:
        return Refused(Code.TOO_LARGE, f"{what}: {error.description}")
    if error.err_code == IN_PROCESS:
        return AckLost(f"{what}: it was sent before, but too few replicas have it so far ({error.description})")
    if error.err_code == NO_PEERS:
        few = "fewer servers of the cluster are up than the streams have replicas (--stream-replicas)"
        return NotNow(f"{what}: {few}: {error.description} ({error.code}, {error.err_code})")
    if error.code >= 500:
        return NotNow(f"{what}: {error.description} ({error.code}, {error.err_code})")
    return ServerRefused(what, error.code, error.err_code, error.description)


# ---- stored messages, in the three forms in which they arrive ---------------------------------------------------


def stored_from_get(raw: _RawMessage) -> Stored:
    """Decode an answer to STREAM.MSG.GET, which comes from the stream's leader."""
    return Stored(raw.seq, raw.subject, raw.data, parse_headers(raw.hdrs), parse_time_ns(raw.time))


def stored_from_direct(message: ReceivedMessage) -> Stored:
    """Decode an answer to DIRECT.GET, which any replica may give. The server mixes its own headers with the
    message's."""
    headers = message.headers or {}
    return Stored(
        int(headers["Nats-Sequence"]),
        headers["Nats-Subject"],
        message.data,
        headers,
        parse_time_ns(headers["Nats-Time-Stamp"]),
    )


def parse_headers(raw: bytes) -> Mapping[str, str]:
    """Parse a header block, `NATS/1.0\\r\\nName: value\\r\\n...`, into a mapping."""
    if not raw:
        return NO_HEADERS
    headers: dict[str, str] = {}
    for line in raw.split(b"\r\n")[1:]:
        name, colon, value = line.partition(b":")
        if colon:
            headers[name.decode("ascii", "replace")] = value.strip().decode("utf-8", "replace")
    return headers


class LazyHeaders(Mapping[str, str]):
    """A header block that is parsed on first use: on a long log, most headers are never read."""

    __slots__ = ("_parsed", "_raw")

    def __init__(self, raw: bytes) -> None:
        self._raw = raw
        self._parsed: Mapping[str, str] | None = None

    def __getitem__(self, name: str) -> str:
        return self._headers()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._headers())

    def __len__(self) -> int:
        return len(self._headers())

    def _headers(self) -> Mapping[str, str]:
        if self._parsed is None:
            self._parsed = parse_headers(self._raw)
        return self._parsed


def parse_time_ns(text: str) -> int:
    """Return an RFC 3339 time in UTC, with up to nine decimals in its seconds, as nanoseconds since the epoch."""
    moment, _, fraction = text.removesuffix("Z").partition(".")
    seconds = int(datetime.fromisoformat(moment + "+00:00").timestamp())
    return seconds * 1_000_000_000 + int((fraction or "0").ljust(9, "0")[:9])
