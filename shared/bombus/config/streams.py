"""The settings of a hive's streams: how many servers keep each stream, and the size at which it is full."""

import argparse
import re
from typing import Annotated

from pydantic import BeforeValidator, Field, field_validator

from bombus.config.flags import Flag
from bombus.config.parts import Part

STREAM_BYTES_MIN = 4096
PAYLOAD_BYTES = 8 << 20  # `max_payload` of the server that we start: its largest message, including headers
POWER_NAME = "bombus-power-"  # prefix of the name of our own server if its disk is synced (`--durability power`)
_TAKES = "a size of at least 4KiB, such as 512MB or 4GiB"
_SIZE = re.compile(r"^(\d+(?:\.\d+)?) ?([kMGT]?)(i?)B?\Z")
_POWERS = {"": 0, "k": 1, "M": 2, "G": 3, "T": 4}


def byte_count(text: str) -> int:
    """Parse a size such as `512MB`, `4GiB` or `4294967296` into bytes. Raises `ValueError` for any other text."""
    found = _SIZE.match(text.strip().replace("Ki", "ki"))
    if found is None:
        raise ValueError(f"{text!r} cannot be read as a size: give {_TAKES}")
    number, prefix, binary = found.groups()
    return int(float(number) * (1024 if binary else 1000) ** _POWERS[prefix])


def _from_text(value: object) -> object:
    return byte_count(value) if isinstance(value, str) else value


def _typed(text: str) -> int:
    try:
        return byte_count(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _size_flag(stream: str, new: str) -> Flag:
    help = f"the size at which {stream} is full, such as 512MB or 4GiB"
    return Flag(metavar="SIZE", read=_typed, help=help, default=f"unchanged; {new} for a new stream")


Size = Annotated[int, BeforeValidator(_from_text), Field(ge=STREAM_BYTES_MIN, le=1 << 50)]
Limit = Annotated[Size | None, Field(description=_TAKES)]


class StreamLimits(Part):
    """The limits of a hive's streams: how many servers keep each stream, and the size at which it is full and accepts
    no more messages. Each server reserves that much disk space.

    Settings that are not given stay unchanged. A new stream gets 1 replica and 256MiB for `inbox` (messages that are
    not decided yet), 1GiB for `events` (the log), 4GiB for `calls` (the records of model calls), 1GiB for `ops`
    (training operations and their results), 2GiB for `trajectories` (rollout groups), 2GiB for `blobs` (snapshots,
    tokenizers, and weights sent through the object store). Existing streams are changed when the hive starts. More than
    one replica requires a cluster of at least as many NATS servers, given in `nats`.
    """

    replicas: Annotated[
        int | None,
        Flag(
            name="--stream-replicas",
            metavar="N",
            help="how many servers of a NATS cluster keep each stream: 1, 3 or 5",
            default="unchanged; 1 for new streams",
        ),
    ] = Field(default=None, description="1, 3 or 5")
    inbox_bytes_max: Annotated[Limit, _size_flag("the stream of messages to the coordinator", "256MiB")] = None
    events_bytes_max: Annotated[Limit, _size_flag("the log", "1GiB")] = None
    calls_bytes_max: Annotated[Limit, _size_flag("the stream of recorded calls", "4GiB")] = None
    ops_bytes_max: Annotated[Limit, _size_flag("the stream of training operations", "1GiB")] = None
    trajectories_bytes_max: Annotated[Limit, _size_flag("the stream of rollout groups", "2GiB")] = None
    blobs_bytes_max: Annotated[Limit, _size_flag("the stream of large objects", "2GiB")] = None

    @field_validator("replicas")
    @classmethod
    def _an_odd_number_of_servers(cls, replicas: int | None) -> int | None:
        if replicas not in (None, 1, 3, 5):
            raise ValueError("it must be 1, 3 or 5")
        return replicas


AS_THEY_ARE = StreamLimits()
NEW_STREAMS = StreamLimits(
    replicas=1,
    inbox_bytes_max=256 << 20,
    events_bytes_max=1 << 30,
    calls_bytes_max=4 << 30,
    ops_bytes_max=1 << 30,
    trajectories_bytes_max=2 << 30,
    blobs_bytes_max=2 << 30,
)

STREAMS = ("inbox", "events", "calls", "ops", "trajectories", "blobs")
DISK_RESERVE_BYTES = 256 << 20  # no new work is accepted if a disk has less free space than this


def limit_flag(stream: str) -> str:
    """Return the flag that sets the size of a stream, by its short name."""
    return f"--{stream}-bytes-max"


LIMIT_FLAGS = ", ".join(map(limit_flag, STREAMS))


def bytes_reserved(limits: StreamLimits) -> int:
    """Return the sum of the size limits, in bytes, for a new hive's streams."""
    given = ((getattr(limits, f"{name}_bytes_max"), getattr(NEW_STREAMS, f"{name}_bytes_max")) for name in STREAMS)
    return sum(wanted or new for wanted, new in given)


def disk_needed(limits: StreamLimits) -> int:
    """Return how many bytes must be free on a disk for a new hive.

    The server lets streams use three quarters of the free space, and full streams must leave the reserve that new work
    requires.
    """
    reserved = bytes_reserved(limits)
    return max(-(-reserved * 4 // 3), reserved + DISK_RESERVE_BYTES)
